"""xPos: rotated scores that also fade with distance, the slow pairs less (Sun et al. 2022, arXiv 2212.10554)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from posbench.schemes.base import Shape, number
from posbench.schemes.rotary import Rotary, Turn

_LARGEST = 108 * math.log(2)  # float32 ends at 2 ** 128; the rest is left for q and k themselves


class Xpos(Rotary):
    """QK whose pair t is multiplied by `zeta_t ** (d / span)`, `zeta_t = (t / (D/2) + 0.4) / 1.4`, d the distance.

    q takes the power of its own position and k the inverse, both counted from the middle of the window, so that they
    stay small. In float32 they leave its range at some length: `longest`. Options: `base`, `span` (512 tokens in the
    paper), `rescale` and `factor` of `Rotary`, which leave the powers as they are.
    Raises: ConfigError for a span that is not above 0.
    """

    keeps_norms = False

    def __init__(
        self,
        shape: Shape,
        base: float | str = 10000.0,
        span: float = 512.0,
        rescale: str | None = None,
        factor: float | None = None,
    ) -> None:
        super().__init__(shape, ("q", "k"), base, rescale, factor)
        self.span = number("span", span, 1e-3, 1e9, "512 tokens in the paper")

    @property
    def longest(self) -> int:
        """Tokens at which the largest power, of the fastest pair, reaches the end of float32 (30,594 at a span of 512).

        So far that keys behind a query, which are masked only after their scores are made, do not overflow either.
        """
        return math.floor(_LARGEST * self.span / -math.log(0.4 / 1.4))

    def prepare(self, pos: Tensor, length: int) -> Any:
        """Cosines and sines for q, and for k, with the powers in them: neither turns anything else."""
        by = super().prepare(pos, length)
        pairs = torch.arange(self.width // 2, dtype=torch.float64, device=pos.device)
        zeta = (pairs / (self.width // 2) + 0.4) / 1.4
        power = zeta ** ((pos.to(torch.float64)[..., None] - length / 2) / self.span)
        return by._replace(cos=by.cos * power, sin=by.sin * power), Turn(by.cos / power, by.sin / power)

    def q(self, x: Tensor, pos: Any) -> Tensor:
        return super().q(x, pos[0])

    def k(self, x: Tensor, pos: Any) -> Tensor:
        return super().k(x, pos[1])
