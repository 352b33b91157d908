"""Other frequencies at evaluation than in training, so that longer windows turn by angles that training has seen.

With `s` the factor, `L` the training length and `r` the channels that are rotated:

    pi           w / s: every position is squeezed (Chen et al. 2023, arXiv 2306.15595)
    ntk          the base becomes base * s ** (r / (r - 2)): the fastest pair stays, the slowest is squeezed by s
                 ("NTK-aware", bloc97 2023)
    dynamic_ntk  the same with s = length / L of each window (emozilla 2023; transformers' "dynamic" at its factor 1)
    yarn         w ((1 - g) / s + g), g a ramp of the turns L w / 2 pi from 0 at 1 turn to 1 at 32, linear in the turns
                 (Peng et al. 2023, arXiv 2309.00071)
    yarn_code    the same with the ramp of the authors' public code, linear in the number of the pair between the pairs
                 (rounded outwards) of 32 turns and of 1 turn; transformers' "yarn"

YaRN also multiplies the scores by (0.1 ln s + 1) ** 2: see `Rotary`, which multiplies q by it and nothing else. (The
public code puts its root into cosine and sine; there it would scale values and outputs too.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from posbench.config import ConfigError, nearest

_FAST, _SLOW = 32, 1  # YaRN: turns over the training length that keep their frequency, and that are squeezed whole


@dataclass(frozen=True)
class Trained:
    """Frequencies as trained."""

    inv_freq: Tensor  # w, [r/2] float64, radians a token
    base: float  # of the geometric schedule
    context_length: int  # L, tokens


def _ntk(trained: Trained, s: float) -> Tensor:
    w = trained.inv_freq
    pair = torch.arange(len(w), dtype=w.dtype, device=w.device)
    # (base s ** (r / (r - 2))) ** (-2t / r) is base ** (-2t / r) times this, whatever the schedule makes of it.
    return w * s ** (-pair / max(1, len(w) - 1))


def _yarn(trained: Trained, s: float) -> Tensor:
    turns = trained.context_length * trained.inv_freq / (2 * math.pi)
    return _blend(trained.inv_freq, s, ((turns - _SLOW) / (_FAST - _SLOW)).clamp(0, 1))


def _yarn_code(trained: Trained, s: float) -> Tensor:
    w, r = trained.inv_freq, 2 * len(trained.inv_freq)

    def pair_of(turns: int) -> float:
        return r * math.log(trained.context_length / (turns * 2 * math.pi)) / (2 * math.log(trained.base))

    low, high = max(math.floor(pair_of(_FAST)), 0), min(math.ceil(pair_of(_SLOW)), r - 1)
    pair = torch.arange(len(w), dtype=w.dtype, device=w.device)
    return _blend(w, s, 1 - ((pair - low) / (high - low or 0.001)).clamp(0, 1))


def _blend(w: Tensor, s: float, kept: Tensor) -> Tensor:
    """`kept` is g: 1 where a frequency stays, 0 where it is squeezed by `s`."""
    return w * ((1 - kept) / s + kept)


RESCALINGS: dict[str, Callable[[Trained, float], Tensor]] = {
    "pi": lambda trained, s: trained.inv_freq / s,
    "ntk": _ntk,
    "dynamic_ntk": _ntk,
    "yarn": _yarn,
    "yarn_code": _yarn_code,
}
_BY_WINDOW = ("dynamic_ntk",)  # takes no other factor
_TEMPERED = ("yarn", "yarn_code")


@dataclass(frozen=True)
class Rescaling:
    """One of `RESCALINGS`, by the scheme's options `rescale` and `factor`.

    Without a factor it is the length of the window / training length, where that is above 1: the longest position then
    falls inside the trained range.

    Raises: ConfigError for an unknown name, a factor below 1, or a factor where none is taken.
    """

    name: str
    factor: float | None = None

    def __post_init__(self) -> None:
        if self.name not in RESCALINGS:
            raise ConfigError(
                f"scheme.rescale={self.name!r} is not known{nearest(str(self.name), RESCALINGS)} (known: "
                f"{', '.join(RESCALINGS)})"
            )
        if self.factor is None:
            return
        if self.name in _BY_WINDOW:
            raise ConfigError(
                f"scheme.factor={self.factor} has no meaning for scheme.rescale={self.name}, whose factor is the "
                "length of each window / training length: leave scheme.factor out, or take scheme.rescale=ntk"
            )
        if isinstance(self.factor, bool) or not isinstance(self.factor, (int, float)) or not 1 <= self.factor < 1e6:
            raise ConfigError(
                f"scheme.factor={self.factor} must lie between 1 and 1e6: evaluated length / training length is usual"
            )

    def factor_at(self, length: int, context_length: int) -> float:
        """`s` for a window of `length` tokens."""
        return max(1.0, length / context_length) if self.factor is None else float(self.factor)

    def inv_freq(self, trained: Trained, length: int) -> Tensor:
        """The frequencies for a window of `length` tokens, [r/2] float64."""
        return RESCALINGS[self.name](trained, self.factor_at(length, trained.context_length))

    def temperature(self, length: int, context_length: int) -> float:
        """What the scores are multiplied by."""
        if self.name not in _TEMPERED:
            return 1.0
        return float((0.1 * math.log(self.factor_at(length, context_length)) + 1) ** 2)

    @property
    def is_tempered(self) -> bool:
        """Whether the scores are multiplied by more than 1 where the factor is."""
        return self.name in _TEMPERED and self.factor != 1
