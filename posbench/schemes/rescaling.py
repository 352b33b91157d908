"""Change rotation frequencies at evaluation, so that angles in longer inputs stay in the range seen in training.

With frequencies `w`, factor `s`, training length `L` and `r` rotated channels:

    pi           w / s: all positions are divided by s (Chen et al. 2023, arXiv 2306.15595)
    ntk          base * s ** (r / (r - 2)) as the base: the fastest pair is unchanged, the slowest is divided by s
                 ("NTK-aware", bloc97 2023)
    dynamic_ntk  ntk with s = length / L of each input (emozilla 2023; transformers' "dynamic" with factor 1)
    yarn         w ((1 - g) / s + g), with g a ramp that is linear in the turns L w / 2 pi: 0 at 1 turn, 1 at 32 turns
                 (Peng et al. 2023, arXiv 2309.00071)
    yarn_code    yarn with the ramp of the authors' public code, linear in the pair number between the pairs with 32
                 turns and 1 turn (rounded outwards); transformers' "yarn"

YaRN also multiplies the scores by (0.1 ln s + 1) ** 2. `Rotary` multiplies q by this factor. (The public code instead
multiplies cosine and sine by its square root, which would scale values and outputs too.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from posbench.config import ConfigError, nearest

_FAST, _SLOW = 32, 1  # YaRN: pairs with 32 turns in the training length are unchanged, with 1 turn divided by s


@dataclass(frozen=True)
class TrainedFrequencies:
    """Rotary frequencies as trained, with the base and the context length that they were computed from."""

    inv_freq: Tensor  # w, [r/2] float64, radians a token
    base: float  # base of the geometric series
    context_length: int  # L, tokens


def _ntk(trained: TrainedFrequencies, s: float) -> Tensor:
    w = trained.inv_freq
    pair = torch.arange(len(w), dtype=w.dtype, device=w.device)
    # Changing the base multiplies each frequency by this factor, so it also works for learned or clipped frequencies.
    return w * s ** (-pair / max(1, len(w) - 1))


def _yarn(trained: TrainedFrequencies, s: float) -> Tensor:
    turns = trained.context_length * trained.inv_freq / (2 * math.pi)
    return _blend(trained.inv_freq, s, ((turns - _SLOW) / (_FAST - _SLOW)).clamp(0, 1))


def _yarn_code(trained: TrainedFrequencies, s: float) -> Tensor:
    w, r = trained.inv_freq, 2 * len(trained.inv_freq)

    def pair_of(turns: int) -> float:
        return r * math.log(trained.context_length / (turns * 2 * math.pi)) / (2 * math.log(trained.base))

    low, high = max(math.floor(pair_of(_FAST)), 0), min(math.ceil(pair_of(_SLOW)), r - 1)
    pair = torch.arange(len(w), dtype=w.dtype, device=w.device)
    return _blend(w, s, 1 - ((pair - low) / (high - low or 0.001)).clamp(0, 1))


def _blend(w: Tensor, s: float, g: Tensor) -> Tensor:
    """Return a mix of rotation frequencies, [r/2]: `w / s` with weight 1 - g, and `w` with weight g."""
    return w * ((1 - g) / s + g)


RESCALINGS: dict[str, Callable[[TrainedFrequencies, float], Tensor]] = {
    "pi": lambda trained, s: trained.inv_freq / s,
    "ntk": _ntk,
    "dynamic_ntk": _ntk,
    "yarn": _yarn,
    "yarn_code": _yarn_code,
}
_BY_WINDOW = ("dynamic_ntk",)  # the factor always follows the window
_TEMPERED = ("yarn", "yarn_code")  # these also multiply the scores


@dataclass(frozen=True)
class Rescaling:
    """A method from `RESCALINGS` and its factor s: the options `rescale` and `factor` of a rotary scheme.

    Without a factor, length of the input / training length is used (at least 1), which brings the longest position
    into the trained range.
    Raises: ConfigError for an unknown name, a factor below 1, or any factor for `dynamic_ntk`.
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
                "length of each window / training length: leave scheme.factor out, or use scheme.rescale=ntk"
            )
        if isinstance(self.factor, bool) or not isinstance(self.factor, (int, float)) or not 1 <= self.factor < 1e6:
            raise ConfigError(
                f"scheme.factor={self.factor} must be between 1 and 1e6: evaluated length / training length is usual"
            )

    def factor_at(self, length: int, context_length: int) -> float:
        """Return the rescaling factor for inputs of `length` tokens: `factor` if set, else `length` / `context_length`.

        It is at least 1. Arguments: context_length, the training length in tokens.
        """
        return max(1.0, length / context_length) if self.factor is None else float(self.factor)

    def inv_freq(self, trained: TrainedFrequencies, length: int) -> Tensor:
        """Return the rescaled frequencies for an input of `length` tokens, [r/2] float64, radians per token.

        Arguments: trained, the frequencies in training, with their base and context length.
        """
        return RESCALINGS[self.name](trained, self.factor_at(length, trained.context_length))

    def temperature(self, length: int, context_length: int) -> float:
        """Return the number that multiplies the scores at `length` tokens: at least 1 for YaRN, 1 for the others.

        Arguments: context_length, the training length in tokens.
        """
        if self.name not in _TEMPERED:
            return 1.0
        return float((0.1 * math.log(self.factor_at(length, context_length)) + 1) ** 2)

    @property
    def is_tempered(self) -> bool:
        """Return True if the method is YaRN, which also multiplies the scores, and the factor is not fixed at 1."""
        return self.name in _TEMPERED and self.factor != 1
