"""KERPLE: a penalty that grows with the logarithm of distance, learned by head (Chi et al. 2022, arXiv 2205.09921)."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.schemes.base import Bias, Placement, Scheme, Shape

ONE = math.log(math.e - 1)  # softplus(ONE) = 1


class Kerple(Scheme):
    """`bias_h(i, j) = -a_h ln(1 + b_h (i - j))`: the paper's logarithmic kernel.

    a and b are positive (softplus of what is learned), start at 1 (the authors': at random), for all layers.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.a = nn.Parameter(torch.full((shape.num_heads,), ONE))  # before the softplus, as b
        self.b = nn.Parameter(torch.full((shape.num_heads,), ONE))

    def bias(self, q: Tensor, k: Tensor, gates: Any, at: Placement) -> Bias:
        a, b = F.softplus(self.a)[:, None], F.softplus(self.b)[:, None]
        return at.look_up(-a * torch.log1p(b * at.distances(q)))
