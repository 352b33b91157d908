"""FoPE: rotations whose cosines and sines are sums over several frequencies (Hua et al. 2024, arXiv 2412.17739)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from posbench.schemes.base import Shape, require_number
from posbench.schemes.partial import Hope
from posbench.schemes.rescaling import RescaleOption


class Fope(Hope):
    """FoPE: rotate q and k by `cos'_t = sum_s A_st cos(p w_s)` and `sin'_t = sum_s B_st sin(p w_s)` at position p.

    Sums are over frequencies w_s with periods up to the training length; slower pairs are not rotated (HoPE). Each key
    head and its queries have one A and one B, shared by all layers: the identity plus fixed random numbers. `cos'^2 +
    sin'^2` is not 1, and A is not B, so lengths change and scores depend on i and j.

    Options: `base`; `gain`, which scales the random numbers (0.3 in the authors' code, 0.5 in Intern-S1-Pro, whose base
    is 5e6); `rescale` and `factor` of `Rotary`. Raises: ConfigError for a gain below 0.
    """

    is_relative = False
    keeps_norms = False
    cos_mix: Tensor  # A, [Hkv, D/2, D/2]
    sin_mix: Tensor  # B

    def __init__(
        self,
        shape: Shape,
        base: float | str = 10000.0,
        gain: float = 0.3,
        rescale: RescaleOption | None = None,
        factor: float | None = None,
    ) -> None:
        super().__init__(shape, ("q", "k"), base, rescale, factor)
        self.gain = require_number("gain", gain, 0, 10, "0.3 is the authors'")
        kept = int(self.frequencies().count_nonzero())  # pairs
        heads = shape.num_kv_heads
        # Glorot's deviation, as torch counts the fans of a tensor [Hkv, kept, kept].
        std = self.gain * (2 / max(1, kept * (kept + heads))) ** 0.5
        # NumPy's old generator gives the same numbers everywhere and in every seed, like the constants of a definition.
        # Fixed, because the authors and Intern-S1-Pro do not train them.
        drawn = std * np.random.RandomState(0).standard_normal((2, heads, kept, kept))
        for name, mix in zip(("cos_mix", "sin_mix"), drawn, strict=True):
            matrix = torch.eye(self.width // 2, dtype=torch.float64).repeat(heads, 1, 1)
            matrix[:, :kept, :kept] += torch.from_numpy(mix)
            self.register_buffer(name, matrix.float(), persistent=False)

    def prepare(self, pos: Tensor, length: int) -> Any:
        """Return the mixed cosines and sines, [Hkv, T, D/2] float64, or [B, Hkv, T, D/2] if `pos` is [B, 1, T]."""
        plain = super().prepare(pos, length)
        return plain._replace(cos=plain.cos @ self.cos_mix.double(), sin=plain.sin @ self.sin_mix.double())

    def q(self, x: Tensor, pos: Any) -> Tensor:
        queries_per_key = self.shape.num_heads // self.shape.num_kv_heads
        cos, sin = (part.repeat_interleave(queries_per_key, dim=-3) for part in (pos.cos, pos.sin))
        return super().q(x, pos._replace(cos=cos, sin=sin))
