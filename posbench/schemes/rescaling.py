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

YaRN also multiplies the scores by (0.1 ln s + 1) ** 2: `Rotary` multiplies q.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

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
    # The exponent goes from 0 to -1: the fastest pair is unchanged, the slowest is divided by s.
    return w * s ** (-pair / max(1, len(w) - 1))


def _yarn(trained: TrainedFrequencies, s: float, slow: float = _SLOW, fast: float = _FAST) -> Tensor:
    turns = trained.context_length * trained.inv_freq / (2 * math.pi)
    return _blend(trained.inv_freq, s, ((turns - slow) / (fast - slow)).clamp(0, 1))


def _yarn_code(
    trained: TrainedFrequencies, s: float, slow: float = _SLOW, fast: float = _FAST, rounds: bool = True
) -> Tensor:
    w, r = trained.inv_freq, 2 * len(trained.inv_freq)
    low, high = (
        r * math.log(trained.context_length / (turns * 2 * math.pi)) / (2 * math.log(trained.base))
        for turns in (fast, slow)
    )
    if rounds:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, r - 1)
    pair = torch.arange(len(w), dtype=w.dtype, device=w.device)
    return _blend(w, s, 1 - ((pair - low) / (high - low or 0.001)).clamp(0, 1))


def _blend(w: Tensor, s: float, g: Tensor) -> Tensor:
    return w * ((1 - g) / s + g)


RESCALINGS: dict[str, Callable[[TrainedFrequencies, float], Tensor]] = {
    "pi": lambda trained, s: trained.inv_freq / s,
    "ntk": _ntk,
    "dynamic_ntk": _ntk,
    "yarn": _yarn,
    "yarn_code": _yarn_code,
}
BY_WINDOW = ("dynamic_ntk",)  # the factor always follows the window
_TEMPERED = ("yarn", "yarn_code")  # these also multiply the scores


@dataclass(frozen=True)
class Rescaling:
    """A method from `RESCALINGS` and its factor s: the options `rescale` and `factor` of a rotary scheme.

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
        if self.name in BY_WINDOW:
            raise ConfigError(
                f"scheme.factor={self.factor} has no meaning for scheme.rescale={self.name}, whose factor is the "
                "length of each window / training length: leave scheme.factor out, or use scheme.rescale=ntk"
            )
        if isinstance(self.factor, bool) or not isinstance(self.factor, (int, float)) or not 1 <= self.factor < 1e6:
            raise ConfigError(
                f"scheme.factor={self.factor} must be between 1 and 1e6: evaluated length / training length is usual"
            )

    def factor_at(self, length: int, context_length: int) -> float:
        """Return the factor for inputs of `length` tokens, at least 1."""
        # Without a factor, the longest position comes into the trained range.
        return max(1.0, length / context_length) if self.factor is None else float(self.factor)

    def inv_freq(self, trained: TrainedFrequencies, length: int) -> Tensor:
        """Return the rescaled frequencies for an input of `length` tokens, [r/2] float64, radians per token."""
        return RESCALINGS[self.name](trained, self.factor_at(length, trained.context_length))

    def temperature(self, length: int, context_length: int) -> float:
        """Return the number that multiplies the scores: at least 1 for YaRN, 1 for the others."""
        if self.name not in _TEMPERED:
            return 1.0
        # The public code multiplies cosine and sine by its square root, which would scale values and outputs too.
        return float((0.1 * math.log(self.factor_at(length, context_length)) + 1) ** 2)

    @property
    def is_tempered(self) -> bool:
        """Return True for YaRN, unless the factor is fixed at 1."""
        return self.name in _TEMPERED and self.factor != 1

    @property
    def is_streaming(self) -> bool:
        """Return True if the frequencies do not depend on the length of the input."""
        return self.factor is not None


RescaleOption = str | Mapping[str, Any]  # a name in `RESCALINGS`, or transformers' `rope_parameters`
_LENGTH = "original_max_position_embeddings"  # L, tokens; dynamic uses `max_position_embeddings`
_OPTIONAL = ("beta_slow", "beta_fast", "truncate", "attention_factor", "mscale", "mscale_all_dim")
ROPE_TYPES: dict[str, tuple[str, ...]] = {  # rope_type -> its keys
    "linear": ("factor",),
    "dynamic": ("factor", _LENGTH),
    "llama3": ("factor", _LENGTH, "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", _LENGTH, *_OPTIONAL),
    "longrope": ("factor", _LENGTH, "short_factor", "long_factor", "attention_factor"),
}


@dataclass(frozen=True)
class RopeParameters:
    """Rescaled frequencies as transformers computes them: the option `rescale`, if it is a mapping.

    Its keys can be copied from `rope_parameters` (earlier `rope_scaling`) in a model's `config.json`, except
    `rope_theta` and `partial_rotary_factor`, which are options of the scheme. With L =
    `original_max_position_embeddings`, the values of `rope_type` are

        linear    pi
        dynamic   ntk with s = 1 + factor * (length / L - 1) in inputs longer than L
        llama3    yarn, with a ramp from `low_freq_factor` to `high_freq_factor` turns (Llama 3.1, arXiv 2407.21783)
        yarn      yarn_code, with a ramp from `beta_slow` to `beta_fast` turns, not rounded if `truncate` is false
        longrope  w / short_factor up to L tokens, and w / long_factor in longer inputs (arXiv 2402.13753)

    yarn and longrope also multiply the rotated channels of q and k by `attention_factor`.

    Raises: ConfigError for an unknown type or key, and for a missing key.
    """

    parameters: Mapping[str, Any]

    def __post_init__(self) -> None:
        keys = ROPE_TYPES.get(self.name)
        if keys is None:
            raise ConfigError(
                f"scheme.rescale has rope_type={self.name}, which is not known{nearest(self.name, ROPE_TYPES)} "
                f"(known: {', '.join(ROPE_TYPES)})"
            )
        wrong = [key for key in self.parameters if key not in ("rope_type", *keys)]
        wrong += [key for key in keys if key not in _OPTIONAL and self.parameters.get(key) is None]
        if wrong:
            raise ConfigError(
                f"scheme.rescale with rope_type={self.name} has or lacks {', '.join(wrong)}: give {', '.join(keys)}"
            )

    def check_lists(self, channels: int) -> None:
        """Raise ConfigError unless the factors of `longrope` are one for each pair of the rotated `channels`."""
        for key in ("short_factor", "long_factor"):
            factors = self.parameters.get(key)
            if factors is not None and len(factors) != channels // 2:
                raise ConfigError(
                    f"{key} has {len(factors)} entries, and {channels} channels a head are rotated: it needs "
                    f"{channels // 2}"
                )

    @property
    def name(self) -> str:
        """Return the value of `rope_type`."""
        return str(self.parameters.get("rope_type"))

    @property
    def factor(self) -> float:
        """Return the factor s."""
        return float(self.parameters["factor"])

    def factor_at(self, length: int, context_length: int) -> float:
        """Return the factor for inputs of `length` tokens, which changes with `dynamic` only."""
        if self.name != "dynamic":
            return self.factor
        return 1 + self.factor * (max(1.0, length / self.parameters[_LENGTH]) - 1)

    @property
    def is_streaming(self) -> bool:
        """Return True if the frequencies do not depend on the length of the input."""
        short, long = (self.parameters.get(f"{name}_factor") for name in ("short", "long"))
        return self.name != "dynamic" and short == long

    def inv_freq(self, trained: TrainedFrequencies, length: int) -> Tensor:
        """Return the rescaled frequencies for an input of `length` tokens, [r/2] float64, radians per token."""
        p, s, L = self.parameters, self.factor_at(length, 1), self.parameters.get(_LENGTH, 1)
        if self.name == "linear":
            return trained.inv_freq / s
        trained = TrainedFrequencies(trained.inv_freq, trained.base, L)
        if self.name == "dynamic":
            return _ntk(trained, s)
        if self.name == "llama3":
            return _yarn(trained, s, p["low_freq_factor"], p["high_freq_factor"])
        if self.name == "yarn":
            slow, fast = p.get("beta_slow") or _SLOW, p.get("beta_fast") or _FAST
            return _yarn_code(trained, s, slow, fast, p.get("truncate", True))
        return trained.inv_freq / trained.inv_freq.new_tensor(p["long_factor" if length > L else "short_factor"])

    @property
    def is_tempered(self) -> bool:
        """Return True if the scores are multiplied by a number other than 1."""
        return self._attention_factor != 1

    def temperature(self, length: int, context_length: int) -> float:
        """Return the number that multiplies the scores: `attention_factor` ** 2."""
        return self._attention_factor**2

    @property
    def _attention_factor(self) -> float:
        p, log_s = self.parameters, math.log(max(1.0, self.factor))
        if p.get("attention_factor") is not None:
            return float(p["attention_factor"])
        if self.name == "longrope":
            return math.sqrt(1 + log_s / math.log(p[_LENGTH]))
        if self.name != "yarn":
            return 1.0
        # DeepSeek's YaRN has two scales; without both of them transformers uses (1, 0).
        scale, scale_all = p.get("mscale"), p.get("mscale_all_dim")
        if not (scale and scale_all):
            scale, scale_all = 1, 0
        return float((0.1 * scale * log_s + 1) / (0.1 * scale_all * log_s + 1))
