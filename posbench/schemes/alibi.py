"""ALiBi: a penalty on the scores that grows linearly with distance, with one slope per head (arXiv 2108.12409)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from posbench.config import ConfigError
from posbench.schemes.base import Bias, Placement, Scheme, Shape, require_number


def exponents(num_heads: int) -> Tensor:
    """Return `log2` of the ALiBi slope of each of H heads, [H] float32."""
    # With P the largest power of two up to H: -8h / P for h = 1 .. P, then every second value for 2P heads.
    power = 2 ** math.floor(math.log2(num_heads))
    regular = -8 * torch.arange(1, power + 1) / power
    between = -8 * torch.arange(1, 2 * power + 1, 2) / (2 * power)
    # Multiples of a power of two, so they are exact in every floating-point format.
    return torch.cat((regular, between))[:num_heads]


def slopes(num_heads: int) -> Tensor:
    """Return ALiBi's slope `m_h` > 0 of each head, [H] float64."""
    return torch.exp2(exponents(num_heads).to(torch.float64))


def _checked(powers: Sequence[float] | None, H: int) -> Tensor:
    if powers is None:
        return exponents(H)
    if isinstance(powers, str) or not isinstance(powers, Sequence) or len(powers) != H:
        raise ConfigError(f"scheme.exponents={powers} must be a list of {H} numbers, one for each head")
    for power in powers:
        require_number("exponents", power, -64, 8, "the paper's eight heads have -1 to -8")
    return torch.tensor(powers, dtype=torch.float32)


class Alibi(Scheme):
    """ALiBi: add the fixed bias `-m_h (i - j)` to the scaled scores of head h.

    Options: `exponents`, log2 m_h of each head; without it the paper's, which follow from the number of heads.
    Raises: ConfigError for exponents that are not H numbers.
    """

    exponents: Tensor

    def __init__(self, shape: Shape, exponents: Sequence[float] | None = None) -> None:
        super().__init__(shape)
        self.register_buffer("exponents", _checked(exponents, shape.num_heads), persistent=False)

    def bias(self, q: Tensor, k: Tensor, gates: Any, at: Placement) -> Bias:
        def penalty(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            # The slope multiplies the distance: slope times position would be wrong by whole logits in low precision.
            return torch.exp2(self.exponents[h]) * -at.distance(b, i, j)

        return penalty

    def log_decay(self) -> Tensor | float | None:
        """Return `-m_h`, [H]: the decay of retention (arXiv 2307.08621)."""
        return -torch.exp2(self.exponents)
