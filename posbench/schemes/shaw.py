"""Relative keys: a learned vector for each distance that queries meet (Shaw et al. 2018, arXiv 1803.02155)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from posbench.schemes.base import Bias, Placement, Scheme, Shape, whole


class Shaw(Scheme):
    """`q_i . a_min(i - j, clip) / sqrt(D)` on the scores, with a table a [clip + 1, D] in each layer, learned from 0.

    Shared by heads (section 3.3 of the paper). Its vectors on values are left out.

    Options: `clip`, tokens from which on all distances share a vector.
    Raises: ConfigError where that is not a whole number above 0.
    """

    per_layer = True

    def __init__(self, shape: Shape, clip: int = 16) -> None:
        super().__init__(shape)
        self.table = nn.Parameter(torch.zeros(whole("clip", clip, 1, "16 in the paper") + 1, shape.head_dim))

    def bias(self, q: Tensor, k: Tensor, gates: Any, at: Placement) -> Bias:
        wide = torch.promote_types(q.dtype, torch.float32)
        D, clip = self.shape.head_dim, len(self.table) - 1
        products = q[..., :D].to(wide) @ self.table.to(wide).t() * D**-0.5  # [B, H, T, clip + 1]
        # Later keys are masked.
        return lambda b, h, i, j: products[b, h, i, at.distance(b, i, j).clamp(min=0, max=clip)]

    def flops_per_token(self, length: int) -> float:
        return 2.0 * self.shape.num_heads * self.table.numel()
