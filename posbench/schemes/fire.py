"""FIRE: a learned function of the distance divided by the query's position (Li et al. 2023, arXiv 2310.04418)."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.schemes.base import Bias, Placement, Scheme, Shape, require_integer


def inverse_softplus(x: float) -> float:
    """Return the y whose softplus, ln(1 + e^y), is `x` > 0."""
    return math.log(math.expm1(x))


class Fire(Scheme):
    """FIRE: add the bias `MLP_h(ln(1 + c (i - j)) / ln(1 + c max(L, i)))`; all layers share one ReLU MLP.

    c and L are learned, positive by softplus; c starts at 0.1 (the authors' code), L at the training length. For
    queries at i > L the bias depends on i too, so it is not relative. The MLP's matrices are initialised like the
    model's and its biases to 0.

    Options: `hidden`, hidden units of the MLP (32 in the paper). Raises: ConfigError unless a whole number above 0.
    """

    is_relative = False
    reads_length = True
    decayed = frozenset({"hidden_weight", "output_weight"})

    def __init__(self, shape: Shape, hidden: int = 32) -> None:
        super().__init__(shape)
        require_integer("hidden", hidden, 1, "32 in the paper")
        self.c = nn.Parameter(torch.tensor(inverse_softplus(0.1)))
        self.L = nn.Parameter(torch.tensor(inverse_softplus(1.0)))  # unit: the training length
        self.hidden_weight = self.normal(hidden, 1)
        # The authors draw weights and biases uniformly; with biases of 0, units with a negative weight start inactive.
        self.hidden_bias = nn.Parameter(torch.zeros(hidden))
        self.output_weight = self.normal(shape.num_heads, hidden)
        self.output_bias = nn.Parameter(torch.zeros(shape.num_heads))

    def bias(self, q: Tensor, k: Tensor, gates: Any, at: Placement) -> Bias:
        c, L = F.softplus(self.c), F.softplus(self.L) * self.shape.positions_length
        by_distance = torch.log1p(c * at.distances(q))
        by_query = torch.log1p(c * torch.maximum(L, at.pos.to(L.dtype)))
        by_head_and_distance = by_distance.expand(self.shape.num_heads, -1)  # equal for all heads
        knots, constants, slopes = self._pieces()
        constants_of_heads, slopes_of_heads = constants.t().contiguous(), slopes.t().contiguous()  # [H, pieces]

        def mlp(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            distance = at.distance(b, i, j).clamp(min=0)  # later keys are masked
            # FlexAttention passes a scalar h. It cannot compile the gradient of a vector indexed by a difference of
            # positions, but it can for a matrix.
            numerator = by_head_and_distance[h, distance] if h.ndim == 0 else by_distance[distance]
            share = numerator / at.value_at_query(by_query, b, i)
            # The number of a piece is the number of knots below it.
            piece = torch.zeros_like(share, dtype=torch.long)
            for knot in knots:
                piece = piece + (share > knot)
            return constants_of_heads[h, piece] + slopes_of_heads[h, piece] * share

        return mlp

    def _pieces(self) -> tuple[list[Tensor], Tensor, Tensor]:
        """Return the MLP as a piecewise linear function on [0, 1]: each hidden unit switches at one knot.

        Returns: `hidden` knots in ascending order; constants and slopes of the pieces, [hidden + 1, H] each.
        """
        # The bias of a score is then constant + slope * input, and no [H, T, T, hidden] tensor is allocated.
        weight, bias = self.hidden_weight[:, 0], self.hidden_bias
        # A unit is on or off in a whole piece, so its state in the middle tells.
        with torch.no_grad():
            # A unit with weight 0 never switches, so any knot serves it.
            knots = (-bias / weight).nan_to_num(0.0).clamp(0, 1).sort().values
            ends = torch.cat((knots.new_zeros(1), knots, knots.new_ones(1)))
            middles = (ends[1:] + ends[:-1]) / 2
            active = (middles[:, None] * weight + bias > 0).to(weight.dtype)  # [pieces, hidden]
        constants = (active * bias) @ self.output_weight.t() + self.output_bias
        return list(knots), constants, (active * weight) @ self.output_weight.t()
