"""Rotate at other frequencies than RoPE's: fewer, learned, or mixed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from posbench.config import ConfigError
from posbench.schemes.base import Shape, require_number
from posbench.schemes.rescaling import RescaleOption
from posbench.schemes.rotary import Rotary


class PartialRotary(Rotary):
    """Rotate only the first `r = fraction * D` channels, in pairs (t, t + r/2) with `inv_freq = base ** (-2t / r)`.

    This is "rotary_pct" of GPT-NeoX (arXiv 2204.06745) and "partial_rotary_factor" of Qwen3-Next.
    Options: `fraction`, and the options of `Rotary`. Raises: ConfigError unless r is even and at least 2.
    """

    def __init__(self, shape: Shape, fraction: float, **options: Any) -> None:
        super().__init__(shape, **options)
        require_number("fraction", fraction, 0, 1, "0.25 is usual")
        self._width = int(fraction * shape.head_dim)
        if self._width < 2 or self._width % 2 or self._width != fraction * shape.head_dim:
            raise ConfigError(
                f"scheme.fraction={fraction} of model.head_dim={shape.head_dim} is {fraction * shape.head_dim:g} "
                "channels, which must be an even number, 2 or more, because pairs are rotated: change the fraction"
            )

    @property
    def width(self) -> int:
        return self._width


class PRope(Rotary):
    """p-RoPE: use RoPE's frequencies for the fastest `floor(fraction * D / 2)` pairs and 0 for the others.

    From Barbero et al. 2024 (arXiv 2410.06205), used by Gemma 4. A rescaling counts all D channels.

    Options: `fraction`, and the options of `Rotary`.
    """

    def __init__(self, shape: Shape, fraction: float, **options: Any) -> None:
        super().__init__(shape, **options)
        require_number("fraction", fraction, 0, 1, "0.25 is usual")
        self.kept = math.floor(fraction * shape.head_dim / 2)  # pairs

    def frequencies(self, device: torch.device | None = None) -> Tensor:
        inv_freq = super().frequencies(device)
        return inv_freq * (torch.arange(len(inv_freq), device=device) < self.kept)


class Hope(Rotary):
    """HoPE: zero frequencies with periods, 2 pi / inv_freq tokens, above the training length (arXiv 2410.21216)."""

    reads_length = True

    def frequencies(self, device: torch.device | None = None) -> Tensor:
        inv_freq = super().frequencies(device)
        return inv_freq * (2 * math.pi / inv_freq <= self.shape.positions_length)


class Clipped(Rotary):
    """Clipped RoPE: multiply the n slowest frequencies by `(1 + cos(pi m / (n - 1))) / 2`, m = 0 .. n - 1.

    Li et al. 2026 (arXiv 2602.05258) call it "CoPE" (soft clipping). n is the number of pairs with a period, 2 pi /
    inv_freq tokens, above the training length.
    """

    reads_length = True

    def frequencies(self, device: torch.device | None = None) -> Tensor:
        inv_freq = super().frequencies(device)
        # The authors' code clips 20 of Llama 3's 64 pairs; this definition clips 29.
        slow = 2 * math.pi / inv_freq > self.shape.positions_length
        m = (slow.cumsum(0) - 1).clamp(min=0).double()  # 0 up to and including the fastest slow pair
        # A single slow pair has m = 0 and stays unchanged; the clamp avoids 0 / 0.
        return inv_freq * (1 + torch.cos(math.pi * m / (slow.sum() - 1).clamp(min=1))) / 2


class LearnedFrequencies(Rotary):
    """LeRoPE: use `inv_freq_t = base ** (-2t / D) * exp(log_scale_t)`, log_scale learned from 0 (arXiv 2607.10134).

    RoPE with learned frequencies, shared by all layers and heads; gradients flow through the float64 angles.
    """

    def __init__(self, shape: Shape, **options: Any) -> None:
        super().__init__(shape, **options)
        self.log_scale = nn.Parameter(torch.zeros(self.width // 2))

    def frequencies(self, device: torch.device | None = None) -> Tensor:
        return super().frequencies(device) * self.log_scale.double().exp()


class LearnedBase(Rotary):
    """RoPE with a learned base: `inv_freq_t = (base * exp(log_scale)) ** (-2t / D)`, log_scale [1] learned from 0."""

    def __init__(self, shape: Shape, **options: Any) -> None:
        super().__init__(shape, **options)
        self.log_scale = nn.Parameter(torch.zeros(1))

    @property
    def schedule_base(self) -> float:
        return self.base * math.exp(self.log_scale.item())

    def frequencies(self, device: torch.device | None = None) -> Tensor:
        inv_freq = super().frequencies(device)
        exponent = torch.arange(0, self.width, 2, dtype=torch.float64, device=device) / self.width
        return inv_freq * (-exponent * self.log_scale.double()).exp()


class Fope(Hope):
    """FoPE: rotate q and k by `cos'_t = sum_s A_st cos(p w_s)` and `sin'_t = sum_s B_st sin(p w_s)` at position p.

    Rotations whose cosines and sines are sums over several frequencies (Hua et al. 2024, arXiv 2412.17739).

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
        turning = int(self.frequencies().count_nonzero())  # pairs
        heads = shape.num_kv_heads
        # Glorot's deviation, as torch counts the fans of a tensor [Hkv, kept, kept].
        std = self.gain * (2 / max(1, turning * (turning + heads))) ** 0.5
        # NumPy's old generator gives the same numbers everywhere and in every seed, like the constants of a definition.
        # Fixed, because the authors and Intern-S1-Pro do not train them.
        drawn = std * np.random.RandomState(0).standard_normal((2, heads, turning, turning))
        for name, mix in zip(("cos_mix", "sin_mix"), drawn, strict=True):
            matrix = torch.eye(self.width // 2, dtype=torch.float64).repeat(heads, 1, 1)
            matrix[:, :turning, :turning] += torch.from_numpy(mix)
            self.register_buffer(name, matrix.float(), persistent=False)

    def prepare(self, pos: Tensor, length: int) -> Any:
        """Return the mixed cosines and sines, [Hkv, T, D/2] float64, or [B, Hkv, T, D/2] if `pos` is [B, 1, T]."""
        plain = super().prepare(pos, length)
        return plain._replace(cos=plain.cos @ self.cos_mix.double(), sin=plain.sin @ self.sin_mix.double())

    def q(self, x: Tensor, pos: Any) -> Tensor:
        queries_per_key = self.shape.num_heads // self.shape.num_kv_heads
        cos, sin = (part.repeat_interleave(queries_per_key, dim=-3) for part in (pos.cos, pos.sin))
        return super().q(x, pos._replace(cos=cos, sin=sin))
