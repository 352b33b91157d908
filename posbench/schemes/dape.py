"""DAPE: ALiBi's bias, adapted to the scores by a small network over all heads (Zheng et al. 2024, arXiv 2405.14722)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.schemes.alibi import Alibi
from posbench.schemes.base import Bias, Placement, Shape, require_integer
from posbench.schemes.cope import scaled_scores


class Dape(Alibi):
    """DAPE: add `a_h + f_h(s_1 .. s_H, a_1 .. a_H)` to the scaled scores s of H heads, with ALiBi's biases a.

    f is a network (linear, LeakyReLU of slope 0.01, linear), one per layer (version 1 of the paper and its code). Its
    matrices are initialised like the model's, its constants to 0.

    Options: `width`, hidden units of f (32 in the paper). Raises: ConfigError unless a whole number above 0.
    """

    per_layer = True
    reads_keys = True
    has_kinks = True
    decayed = frozenset({"inner", "outer"})

    def __init__(self, shape: Shape, width: int = 32) -> None:
        super().__init__(shape)
        self.inner = self.normal(require_integer("width", width, 1, "32 in the paper"), 2 * shape.num_heads)
        self.inner_constant = nn.Parameter(torch.zeros(width))
        self.outer = self.normal(shape.num_heads, width)
        self.outer_constant = nn.Parameter(torch.zeros(shape.num_heads))

    def bias(self, q: Tensor, k: Tensor, gates: Any, at: Placement) -> Bias:
        alibi = super().bias(q, k, gates, at)
        scores = scaled_scores(q, k, self.shape.head_dim)  # [B, H, T, keys]
        sequence, head, query, key = (torch.arange(size, device=q.device) for size in scores.shape)
        prior = alibi(sequence[:, None, None, None], head[:, None, None], query[:, None], key)
        # The network mixes heads, so they become the last dimension.
        both = torch.cat((scores, prior.to(scores.dtype).expand_as(scores)), dim=1).movedim(1, -1)
        hidden = F.leaky_relu(F.linear(both, self.inner, self.inner_constant))
        added = F.linear(hidden, self.outer, self.outer_constant).movedim(-1, 1)
        return lambda b, h, i, j: alibi(b, h, i, j) + added[b, h, i, j]

    def log_decay(self) -> None:
        """Return None: the bias depends on the scores."""
        return None

    def flops_per_token(self, length: int) -> float:
        """Return the FLOPs per token of f's two matrices in one layer."""
        # On average a query sees half of the `length` keys.
        return 1.0 * length * (self.inner.numel() + self.outer.numel())
