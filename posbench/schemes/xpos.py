"""xPos: RoPE whose scores also decay with distance, slow pairs less (Sun et al. 2022, arXiv 2212.10554)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from posbench.schemes.base import Shape, require_number
from posbench.schemes.rescaling import RescaleOption
from posbench.schemes.rotary import Rotary, Turn

_LARGEST = 108 * math.log(2)  # float32 ends at 2 ** 128; a factor of 2 ** 20 is left for q and k themselves


class Xpos(Rotary):
    """xPos: RoPE on q and k, with pair t multiplied by `zeta_t ** (d / span)` at distance d.

    `zeta_t = (t / (D/2) + 0.4) / 1.4`. q at position p is multiplied by `zeta_t ** (p / span)`, k by the inverse, with
    p from the middle of the input. They exceed float32 above `longest` tokens.
    Options: `base`; `span` (512 tokens in the paper); `rescale` and `factor` of `Rotary`, which do not change the
    powers. Raises: ConfigError for a span that is not above 0.
    """

    keeps_norms = False

    def __init__(
        self,
        shape: Shape,
        base: float | str = 10000.0,
        span: float = 512.0,
        rescale: RescaleOption | None = None,
        factor: float | None = None,
    ) -> None:
        super().__init__(shape, ("q", "k"), base, rescale, factor)
        self.span = require_number("span", span, 1e-3, 1e9, "512 tokens in the paper")

    @property
    def longest(self) -> int:
        """Return the longest input in tokens for which the fastest pair's power fits float32 (30,594 at span 512)."""
        # The limit also keeps the scores of later keys, which are computed before they are masked, from overflowing.
        fastest_zeta = 0.4 / 1.4  # zeta_0
        return math.floor(_LARGEST * self.span / -math.log(fastest_zeta))

    def prepare(self, pos: Tensor, length: int) -> Any:
        """Return cosines and sines for q, times a power of zeta, and for k, times the inverse power."""
        cos_sin = super().prepare(pos, length)
        pairs = torch.arange(self.width // 2, dtype=torch.float64, device=pos.device)
        zeta = (pairs / (self.width // 2) + 0.4) / 1.4
        # Counted from the middle of the input, which keeps the factors small.
        power = zeta ** ((pos.to(torch.float64)[..., None] - length / 2) / self.span)
        cos, sin = cos_sin.cos, cos_sin.sin
        return cos_sin._replace(cos=cos * power, sin=sin * power), Turn(cos / power, sin / power)

    def q(self, x: Tensor, pos: Any) -> Tensor:
        return super().q(x, pos[0])

    def k(self, x: Tensor, pos: Any) -> Tensor:
        return super().k(x, pos[1])
