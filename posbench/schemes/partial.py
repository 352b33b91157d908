"""Four rotations that give position to only a part of each head: fewer channels, or zero frequencies."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from posbench.config import ConfigError
from posbench.schemes.base import Shape, require_number
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
