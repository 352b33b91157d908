"""ALiBi: a penalty on the scores that grows linearly with distance, with one slope per head (arXiv 2108.12409)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from posbench.schemes.base import Bias, Placement, Scheme, Shape


def exponents(num_heads: int) -> Tensor:
    """Return `log2` of the ALiBi slope of each of H heads, [H] float32: dyadic fractions, exact in every format.

    If H is a power of two the values are `-8h / H` for h = 1 .. H. Otherwise, with P the largest power of two below H,
    they are the values for P heads, then every second value (1st, 3rd, ...) for 2P heads.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    regular = -8 * torch.arange(1, power + 1) / power
    between = -8 * torch.arange(1, 2 * power + 1, 2) / (2 * power)
    return torch.cat((regular, between))[:num_heads]


def slopes(num_heads: int) -> Tensor:
    """Return ALiBi's slope `m_h` > 0 of each head, [H] float64."""
    return torch.exp2(exponents(num_heads).to(torch.float64))


class Alibi(Scheme):
    """ALiBi: add the fixed bias `-m_h (i - j)` to the scaled scores, m_h the slope of head h.

    The slope multiplies the distance; times the key's position it would be wrong by whole logits in low precision.
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
        """Return the bias per token of distance, `-m_h` [H]: the decay of retention (arXiv 2307.08621)."""
        return -torch.exp2(self.exponents)
