"""The forgetting transformer: each token's gate fades all earlier tokens (Lin et al. 2025, arXiv 2503.02130)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.schemes.base import Bias, Placement, Scheme, Shape


class Fox(Scheme):
    """Forgetting gates: add the bias `sum_{l=j+1..i} ln sigmoid(w_h . x_l + b_h)` to the scores.

    x is the hidden states after the layer's norm. Each layer has its own w, initialised like the model's matrices, and
    b, initialised to 0. The rest of the paper's "Pro" block is omitted: it is no position scheme.
    """

    per_layer = True
    decayed = frozenset({"w"})

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.w = self.normal(shape.num_heads, shape.d_model)
        self.b = nn.Parameter(torch.zeros(shape.num_heads))

    def gate(self, x: Tensor, pos: Tensor) -> Tensor:
        """Return `ln sigmoid(w_h . x + b_h)` of each token, [B, H, T, 1]."""
        return F.logsigmoid(F.linear(x.to(self.w.dtype), self.w, self.b)).mT[..., None]

    def bias(self, q: Tensor, k: Tensor, gates: Any, at: Placement) -> Bias:
        # The sum from j + 1 to i is the difference of two running sums.
        until_query, until_key = gates.sum_at_query[..., 0], gates.sum_at_key[..., 0]
        return lambda b, h, i, j: until_query[b, h, i] - until_key[b, h, j]

    def flops_per_token(self, length: int) -> float:
        return 2.0 * self.w.numel()
