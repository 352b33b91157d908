"""ALiBi: a penalty on the scores that grows linearly with distance, with one slope per head (arXiv 2108.12409)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from posbench.schemes.base import Bias, Placement, Scheme, Shape


def exponents(num_heads: int) -> Tensor:
    """Return `log2` of each head's slope, [H] float32: dyadic fractions, which every number format holds exactly.

    If H is a power of two they are `-8h / H` for h = 1 .. H. Otherwise, with P the largest power of two below H, they
    are the exponents of P heads, then every second exponent (1st, 3rd, ...) of 2P heads.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    regular = -8 * torch.arange(1, power + 1) / power
    between = -8 * torch.arange(1, 2 * power + 1, 2) / (2 * power)
    return torch.cat((regular, between))[:num_heads]


def slopes(num_heads: int) -> Tensor:
    """Return the slopes `m_h`, [H] float64."""
    return torch.exp2(exponents(num_heads).to(torch.float64))


class Alibi(Scheme):
    """ALiBi: add the fixed bias `-m_h (i - j)` to the scaled scores.

    The slope multiplies the distance, not the key's position, which would be wrong by whole logits in low precision.
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
        """Return `-m_h`, [H]; in linear attention this is the decay of retention (arXiv 2307.08621)."""
        return -torch.exp2(self.exponents)
