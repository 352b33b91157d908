"""FIRE: a learned function of the distance as a share of the query's position (Li et al. 2023, arXiv 2310.04418)."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.schemes.base import Bias, Placement, Scheme, Shape, whole


def before_softplus(x: float) -> float:
    """The number whose softplus is `x`."""
    return math.log(math.expm1(x))


class Fire(Scheme):
    """`bias_h(i, j) = MLP_h(ln(1 + c (i - j)) / ln(1 + c max(L, i)))`, a ReLU in the MLP, one for all layers.

    c and L are learned and positive, by softplus: c begins at 0.1 (the authors' code), L at the training length. Up to
    L tokens the bias depends on the distance alone, beyond it on the query's position too: so it is not relative. The
    MLP's matrices begin as the model's, its biases at 0 (the authors': uniform, both), so units of negative weight stay
    silent.

    Options: `hidden`, units of the MLP between its one input and the heads (32 in the paper).
    Raises: ConfigError where that is not a whole number above 0.
    """

    is_relative = False
    decayed = frozenset({"hidden_weight", "output_weight"})

    def __init__(self, shape: Shape, hidden: int = 32) -> None:
        super().__init__(shape)
        whole("hidden", hidden, 1, "32 in the paper")
        self.c = nn.Parameter(torch.tensor(before_softplus(0.1)))
        self.L = nn.Parameter(torch.tensor(before_softplus(1.0)))  # in training lengths
        self.hidden_weight = self.normal(hidden, 1)
        self.hidden_bias = nn.Parameter(torch.zeros(hidden))
        self.output_weight = self.normal(shape.num_heads, hidden)
        self.output_bias = nn.Parameter(torch.zeros(shape.num_heads))

    def bias(self, q: Tensor, k: Tensor, gates: Any, at: Placement) -> Bias:
        c, L = F.softplus(self.c), F.softplus(self.L) * self.shape.context_length
        by_distance = torch.log1p(c * at.distances(q))
        by_query = torch.log1p(c * torch.maximum(L, at.pos.to(L.dtype)))
        rows = by_distance.expand(self.shape.num_heads, -1)
        knots, constants, slopes = self._pieces()
        constants_of_heads, slopes_of_heads = constants.t().contiguous(), slopes.t().contiguous()  # [H, pieces]

        def mlp(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            distance = at.distance(b, i, j).clamp(min=0)  # later keys are masked
            # FlexAttention, which has no dimension of heads here, cannot compile the gradient of a vector that is read
            # at differences of positions, only that of a matrix.
            log = rows[h, distance] if h.ndim == 0 else by_distance[distance]
            share = log / at.of_query(by_query, b, i)
            piece = torch.zeros_like(share, dtype=torch.long)
            for knot in knots:
                piece = piece + (share > knot)
            return constants_of_heads[h, piece] + slopes_of_heads[h, piece] * share

        return mlp

    def _pieces(self) -> tuple[list[Tensor], Tensor, Tensor]:
        """The MLP as what it is, a line between each two of the points in [0, 1] where a unit sets in or stops.

        So a score takes one line of its head, not all units: [H, T, T, hidden] never stands in memory.
        Returns: the points, ascending, `hidden` of them; constants and slopes of the lines, [hidden + 1, H] each.
        """
        weight, bias = self.hidden_weight[:, 0], self.hidden_bias
        with torch.no_grad():
            knots = (-bias / weight).nan_to_num(0.0).clamp(0, 1).sort().values
            ends = torch.cat((knots.new_zeros(1), knots, knots.new_ones(1)))
            middles = (ends[1:] + ends[:-1]) / 2
            active = (middles[:, None] * weight + bias > 0).to(weight.dtype)  # [pieces, hidden]
        constants = (active * bias) @ self.output_weight.t() + self.output_bias
        return list(knots), constants, (active * weight) @ self.output_weight.t()
