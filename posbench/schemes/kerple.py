"""KERPLE: a learned penalty per head that grows with the log of distance (Chi et al. 2022, arXiv 2205.09921)."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.schemes.base import Bias, Placement, Scheme, Shape

ONE = math.log(math.e - 1)  # softplus(ONE) = 1


class Kerple(Scheme):
    """KERPLE: add the bias `-a_h ln(1 + b_h (i - j))`, the paper's logarithmic kernel, to the scores.

    a and b are shared by all layers, positive by softplus, and start at 1 (the authors draw them at random).
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.a = nn.Parameter(torch.full((shape.num_heads,), ONE))  # before the softplus, like b
        self.b = nn.Parameter(torch.full((shape.num_heads,), ONE))

    def bias(self, q: Tensor, k: Tensor, gates: Any, at: Placement) -> Bias:
        a, b = F.softplus(self.a)[:, None], F.softplus(self.b)[:, None]
        return at.look_up(-a * torch.log1p(b * at.distances(q)))
