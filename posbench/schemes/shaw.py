"""Relative keys: a learned vector for each distance that queries meet (Shaw et al. 2018, arXiv 1803.02155)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from posbench.config import ConfigError
from posbench.schemes.base import At, Bias, Scheme, Shape
from posbench.schemes.layered import Layered


class Shaw(Layered):
    """`q_i . a_min(i - j, clip) / sqrt(D)` on the scores, with a table a [clip + 1, D] in each layer, learned from 0.

    Shared by heads, as in section 3.4 of the paper. Its vectors on values are left out.

    Options: `clip`, tokens from which on all distances share a vector.
    Raises: ConfigError where that is not a whole number above 0.
    """

    def __init__(self, shape: Shape, clip: int = 16) -> None:
        if not isinstance(clip, int) or isinstance(clip, bool) or clip < 1:
            raise ConfigError(f"scheme.clip={clip} must be a whole number of tokens above 0 (16 is the paper's)")
        super().__init__(shape, [ShawLayer(shape, clip) for _ in range(shape.num_layers)])


class ShawLayer(Scheme):
    """The vectors of one layer."""

    def __init__(self, shape: Shape, clip: int) -> None:
        super().__init__(shape)
        self.table = nn.Parameter(torch.zeros(clip + 1, shape.head_dim))

    def bias(self, q: Tensor, gate: Tensor | None, at: At) -> Bias:
        wide = torch.promote_types(q.dtype, torch.float32)
        D, clip = self.shape.head_dim, len(self.table) - 1
        products = q[..., :D].to(wide) @ self.table.to(wide).t() * D**-0.5  # [B, H, T, clip + 1]

        def look_up(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return products[b, h, i, (i + at.query - (j + at.key)).clamp(min=0, max=clip)]  # later keys are masked

        return look_up
