"""Scalable softmax: scores grow with the logarithm of how many tokens compete (Nakanishi 2025, arXiv 2501.19399)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from posbench.schemes.base import Scheme, Shape


class Ssmax(Scheme):
    """Scalable softmax: replace q_i by `s_h ln(i + 1) q_i`, with s learned for each layer and head.

    s starts at 1 / ln(training length), so that the last query of a training window is initially unscaled. i is the
    position: a causal query at position i sees i + 1 tokens. It is also used with `window`, although queries then see
    fewer. So scores are not relative. The optional bias of the paper is omitted.
    """

    group = "biases on the scores"  # implemented by scaling q
    is_relative = False
    keeps_norms = False
    per_layer = True

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.s = nn.Parameter(torch.full((shape.num_heads,), 1 / math.log(max(2, shape.context_length))))

    def prepare(self, pos: Tensor, length: int) -> Tensor:
        """Return `ln(i + 1)`, by which queries are scaled, for each position i in `pos`, [T, 1] float64.

        Arguments: length is not used.
        """
        return (pos.to(torch.float64)[..., None] + 1).log()

    def q(self, x: Tensor, pos: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        return (x.to(wide) * (self.s[:, None, None] * pos)).to(x.dtype)
