"""Rotations that leave part of each head without position, four ways: they agree at position 0 and part with distance.

PartialRotary       the first r channels are rotated, with r in the schedule; the rest never is (GPT-NeoX)
PRope  the schedule of all D channels with its slowest frequencies set to 0 (p-RoPE)
Hope                ... with those set to 0 whose period exceeds the training length (HoPE)
Clipped             ... with those reduced to 0 along a cosine (clipped RoPE)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from posbench.config import ConfigError
from posbench.schemes.base import Shape, number
from posbench.schemes.rotary import Rotary


class PartialRotary(Rotary):
    """The first `r = fraction * D` channels with `inv_freq = base ** (-2t / r)`, in pairs (t, t + r/2).

    "rotary_pct" of GPT-NeoX (arXiv 2204.06745), "partial_rotary_factor" of Qwen3-Next. Options: those of `Rotary`, and
    `fraction`.
    Raises: ConfigError where r is not an even number of channels, 2 at least.
    """

    def __init__(
        self,
        shape: Shape,
        sites: Sequence[str],
        fraction: float,
        base: float | str = 10000.0,
        rescale: str | None = None,
        factor: float | None = None,
    ) -> None:
        super().__init__(shape, sites, base, rescale, factor)
        number("fraction", fraction, 0, 1, "0.25 is usual")
        self._width = int(fraction * shape.head_dim)
        if self._width < 2 or self._width % 2 or self._width != fraction * shape.head_dim:
            raise ConfigError(
                f"scheme.fraction={fraction} of model.head_dim={shape.head_dim} is {fraction * shape.head_dim:g} "
                "channels, and pairs of them are rotated: take a fraction that gives an even number, 2 or more"
            )

    @property
    def width(self) -> int:
        return self._width


class PRope(Rotary):
    """`inv_freq = base ** (-2t / D)` for the first `floor(fraction * D / 2)` pairs (t, t + D/2), 0 for the others.

    p-RoPE (Barbero et al. 2024, arXiv 2410.06205); Gemma 4. Options: those of `Rotary`, and `fraction`. Rescaled, D is
    the width that counts: it is the schedule's.
    """

    def __init__(
        self,
        shape: Shape,
        sites: Sequence[str],
        fraction: float,
        base: float | str = 10000.0,
        rescale: str | None = None,
        factor: float | None = None,
    ) -> None:
        super().__init__(shape, sites, base, rescale, factor)
        number("fraction", fraction, 0, 1, "0.25 is usual")
        self.kept = math.floor(fraction * shape.head_dim / 2)  # pairs

    def frequencies(self, device: torch.device | None = None) -> Tensor:
        inv_freq = super().frequencies(device)
        return inv_freq * (torch.arange(len(inv_freq), device=device) < self.kept)


class Hope(Rotary):
    """Frequencies are 0 whose period, 2 pi / inv_freq tokens, exceeds the training length (arXiv 2410.21216)."""

    def frequencies(self, device: torch.device | None = None) -> Tensor:
        inv_freq = super().frequencies(device)
        return inv_freq * (2 * math.pi / inv_freq <= self.shape.context_length)


class Clipped(Rotary):
    """The n slowest frequencies times `(1 + cos(pi m / (n - 1))) / 2`, m = 0 .. n - 1: they fall to 0 along a cosine.

    "CoPE", soft clipping (Li et al. 2026, arXiv 2602.05258). n counts the pairs whose period, 2 pi / inv_freq tokens,
    exceeds the training length (one such pair stays as it is). The authors' code takes 20 of Llama 3's 64; here 29.
    """

    def frequencies(self, device: torch.device | None = None) -> Tensor:
        inv_freq = super().frequencies(device)
        slow = 2 * math.pi / inv_freq > self.shape.context_length
        m = (slow.cumsum(0) - 1).clamp(min=0).double()  # 0 up to the fastest of them
        return inv_freq * (1 + torch.cos(math.pi * m / (slow.sum() - 1).clamp(min=1))) / 2
