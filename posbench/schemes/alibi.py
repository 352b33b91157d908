"""ALiBi: a penalty on the scores that grows linearly with distance, at each head's own slope (arXiv 2108.12409)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from posbench.schemes.base import Bias, Placement, Scheme, Shape


def exponents(num_heads: int) -> Tensor:
    """`log2` of each head's slope, [H] float32: dyadic fractions, so exact in every number format.

    `-8h / H` for h = 1 .. H where H is a power of two. Otherwise those of P heads, P the largest power of two below H,
    then every second one (1st, 3rd, ...) of 2P heads until there are H.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    own = -8 * torch.arange(1, power + 1) / power
    between = -8 * torch.arange(1, 2 * power + 1, 2) / (2 * power)
    return torch.cat((own, between))[:num_heads]


def slopes(num_heads: int) -> Tensor:
    """The slopes `m_h`, [H] float64."""
    return torch.exp2(exponents(num_heads).to(torch.float64))


class Alibi(Scheme):
    """`bias_h(i, j) = -m_h (i - j)`, not learned, added to the scaled scores and not scaled itself.

    Made from the relative distance: an absolute key index times the slope is off by whole logits in low precision.
    """

    exponents: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.register_buffer("exponents", exponents(shape.num_heads), persistent=False)

    def bias(self, q: Tensor, k: Tensor, gates: Any, at: Placement) -> Bias:
        def penalty(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return torch.exp2(self.exponents[h]) * -at.distance(b, i, j)

        return penalty

    def log_decay(self) -> Tensor | float | None:
        """[H]: under linear attention e^bias is retention's decay (arXiv 2307.08621), at ALiBi's slopes."""
        return -torch.exp2(self.exponents)
