"""KERPLE: a penalty that grows with the logarithm of distance, learned by head (Chi et al. 2022, arXiv 2205.09921)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.schemes.base import At, Bias, Scheme, Shape
from posbench.schemes.distances import distances, look_up

ONE = math.log(math.e - 1)  # softplus(ONE) = 1


class Kerple(Scheme):
    """`bias_h(i, j) = -a_h ln(1 + b_h (i - j))`: the paper's logarithmic kernel.

    a and b are positive (softplus of what is learned), start at 1 and are shared by all layers.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.a = nn.Parameter(torch.full((shape.num_heads,), ONE))  # before the softplus, as b
        self.b = nn.Parameter(torch.full((shape.num_heads,), ONE))

    def bias(self, q: Tensor, gate: Tensor | None, at: At) -> Bias:
        a, b = F.softplus(self.a)[:, None], F.softplus(self.b)[:, None]
        return look_up(-a * torch.log1p(b * distances(q, at)), at)
