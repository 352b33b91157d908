"""Relative keys: queries are multiplied with a learned vector per distance (Shaw et al. 2018, arXiv 1803.02155)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from posbench.schemes.base import Bias, Placement, Scheme, Shape, require_integer


class Shaw(Scheme):
    """Relative keys: add `q_i . a_min(i - j, clip) / sqrt(D)` to the scores, with a learned table a [clip + 1, D].

    Each layer has its own table, learned from 0 and shared by heads (section 3.3). The paper's vectors for values are
    omitted.
    Options: `clip`, the distance in tokens from which all distances share a vector (16 in the paper).
    Raises: ConfigError unless `clip` is a whole number above 0.
    """

    per_layer = True

    def __init__(self, shape: Shape, clip: int = 16) -> None:
        super().__init__(shape)
        self.table = nn.Parameter(torch.zeros(require_integer("clip", clip, 1, "16 in the paper") + 1, shape.head_dim))

    def bias(self, q: Tensor, k: Tensor, gates: Any, at: Placement) -> Bias:
        wide = torch.promote_types(q.dtype, torch.float32)
        # Another scheme may have made q wider; only its first D channels are content.
        D, clip = self.shape.head_dim, len(self.table) - 1
        products = q[..., :D].to(wide) @ self.table.to(wide).t() * D**-0.5  # [B, H, T, clip + 1]
        # Later keys are masked, so their clamped distances do not matter.
        return lambda b, h, i, j: products[b, h, i, at.distance(b, i, j).clamp(min=0, max=clip)]

    def flops_per_token(self, length: int) -> float:
        return 2.0 * self.shape.num_heads * self.table.numel()
