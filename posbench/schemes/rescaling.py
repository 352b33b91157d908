"""Change rotation frequencies, so that angles in longer inputs stay in the range seen in training.

The notation is transformers': the keys of `rope_parameters` (earlier `rope_scaling`) in a model's `config.json`. With
frequencies `w`, factor `s`, training length `L` and `r` rotated channels, the values of `rope_type` are

    linear    w / s: all positions are divided by s (Chen et al. 2023, arXiv 2306.15595)
    dynamic   base * s ** (r / (r - 2)) as the base, with s = factor * length / L - (factor - 1) in inputs longer than L
    llama3    w ((1 - g) / s + g), with g a ramp that is linear in the turns L w / 2 pi: 0 at `low_freq_factor` turns
              and 1 at `high_freq_factor` (Llama 3.1, arXiv 2407.21783)
    yarn      the same, with a ramp that is linear in the number of the pair, between the pairs with `beta_fast` and
              `beta_slow` turns; its ends are rounded outwards unless `truncate` is false
    longrope  w / short_factor up to L tokens, and w / long_factor in longer inputs (arXiv 2402.13753)

A name is short for one of them, with the model's own training length, and with length of the input / L as the factor
if none is given:

    pi           linear
    dynamic_ntk  dynamic with factor 1 (emozilla 2023)
    yarn_code    yarn, as in the public code of YaRN's authors, from 32 turns to 1
    ntk          dynamic's base with a factor that does not follow the input ("NTK-aware", bloc97 2023)
    yarn         llama3's ramp from 1 to 32 turns, and the scores multiplied (Peng et al. 2023, arXiv 2309.00071)

transformers has no types for the last two; here they are `ntk` and `yarn_by_turns`. YaRN and longrope also multiply the
rotated channels of q and k by `attention_factor` (YaRN's is 0.1 ln s + 1). `Rotary` multiplies q by its square.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor

from posbench.config import ConfigError, nearest

RESCALINGS = {  # name -> the rope_type it is short for
    "pi": "linear",
    "ntk": "ntk",
    "dynamic_ntk": "dynamic",
    "yarn": "yarn_by_turns",
    "yarn_code": "yarn",
}
BY_WINDOW = "dynamic_ntk"  # its factor always follows the window
LENGTH = "original_max_position_embeddings"  # L, tokens; transformers takes max_position_embeddings for dynamic
_OPTIONAL = ("beta_slow", "beta_fast", "truncate", "attention_factor", "mscale", "mscale_all_dim")
ROPE_TYPES: dict[str, tuple[str, ...]] = {  # transformers' rope_type -> its keys
    "linear": ("factor",),
    "dynamic": ("factor", LENGTH),
    "llama3": ("factor", LENGTH, "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", LENGTH, *_OPTIONAL),
    "longrope": ("factor", LENGTH, "short_factor", "long_factor", "attention_factor"),
}
_FAST, _SLOW = 32, 1  # turns in the training length at which YaRN's ramp ends
_LEAST: dict[str, float] = {  # key -> the least number it can be
    "factor": 1,
    LENGTH: 2,  # its logarithm is a divisor
    "mscale": 0,
    "mscale_all_dim": 0,
}
_LISTS = ("short_factor", "long_factor")
_ROTATION = ("rope_theta", "partial_rotary_factor")  # keys of every type
_POSITIVE = ("low_freq_factor", "high_freq_factor", "beta_slow", "beta_fast", "attention_factor", *_ROTATION)

RescaleOption = str | Mapping[str, Any]  # a name in `RESCALINGS`, or `rope_parameters`


@dataclass(frozen=True)
class Rescaling:
    """Rescaled rotation frequencies: the option `rescale` of a rotary scheme, with its `factor`."""

    name: str  # a name in `RESCALINGS`, or the `rope_type` of a mapping
    parameters: Mapping[str, Any]  # transformers' `rope_parameters`; without a factor it follows the input's length

    @classmethod
    def of(cls, option: RescaleOption, factor: float | None, context_length: int) -> Rescaling:
        """Return the rescaling that the options `rescale` and `factor` mean.

        Arguments: context_length, the training length that a name stands for.
        Raises: ConfigError for an unknown name, type or key, a missing key, a value that its key cannot have, a factor
        that is not between 1 and 1e6, or any factor for `dynamic_ntk`.
        """
        if isinstance(option, Mapping):
            parameters = dict(option)
            if factor is not None:
                parameters["factor"] = factor
            _check_keys(parameters)
            check_values(parameters)
            return cls(parameters["rope_type"], parameters)
        if not isinstance(option, str) or option not in RESCALINGS:
            raise ConfigError(
                f"scheme.rescale={option!r} is not known{nearest(str(option), RESCALINGS)} (known: "
                f"{', '.join(RESCALINGS)})"
            )
        if factor is not None:
            _check_factor(option, factor)
        if option == BY_WINDOW:
            factor = 1
        # Without a factor, it follows the input's length, which brings the longest position into the trained range.
        return cls(option, {"rope_type": RESCALINGS[option], "factor": factor, LENGTH: context_length})

    @property
    def rope_type(self) -> str:
        """Return transformers' type, or `ntk` or `yarn_by_turns`."""
        return str(self.parameters["rope_type"])

    @property
    def factor(self) -> float | None:
        """Return the given factor s; None if it follows the length of the input."""
        factor = self.parameters["factor"]
        return None if factor is None else float(factor)

    @property
    def is_streaming(self) -> bool:
        """Return True if the frequencies do not depend on the length of the input."""
        # Also true without lists, which only `longrope` has.
        has_one_list = self.parameters.get("short_factor") == self.parameters.get("long_factor")
        return self.factor is not None and self.rope_type != "dynamic" and has_one_list

    @property
    def is_tempered(self) -> bool:
        """Return True if the scores of some input are multiplied by a number other than 1."""
        if self.factor is None:
            return self.rope_type in ("yarn", "yarn_by_turns")
        return self.temperature(1) != 1

    def factor_at(self, length: int) -> float:
        """Return the factor s for inputs of `length` tokens, at least 1 if it follows the length."""
        factor = self.factor
        if factor is not None and self.rope_type != "dynamic":
            return factor
        ratio = max(1.0, length / self.parameters[LENGTH])
        if factor is None:
            return ratio
        return factor * ratio - (factor - 1)

    def inv_freq(self, trained: Tensor, base: float, length: int) -> Tensor:
        """Return the rescaled frequencies for an input of `length` tokens, [r/2] float64, radians per token.

        Arguments: trained, the frequencies as trained; base, of their geometric series.
        """
        p = self.parameters
        s = self.factor_at(length)
        L = p.get(LENGTH, 1)  # `linear` has no L and does not read it
        if self.rope_type == "linear":
            return trained / s
        if self.rope_type in ("ntk", "dynamic"):
            return _with_larger_base(trained, s)
        if self.rope_type == "longrope":
            divisors = p["long_factor"] if length > L else p["short_factor"]
            return trained / trained.new_tensor(divisors)
        if self.rope_type == "yarn":
            slow, fast = p.get("beta_slow") or _SLOW, p.get("beta_fast") or _FAST
            unchanged = _ramp_by_pairs(trained, base, L, slow, fast, p.get("truncate", True))
        else:  # llama3, yarn_by_turns
            slow, fast = p.get("low_freq_factor", _SLOW), p.get("high_freq_factor", _FAST)
            turns = L * trained / (2 * math.pi)
            unchanged = ((turns - slow) / (fast - slow)).clamp(0, 1)
        return trained * ((1 - unchanged) / s + unchanged)

    def temperature(self, length: int) -> float:
        """Return the number that multiplies the scores at `length` tokens: the square of `attention_factor`."""
        return self._attention_factor(length) ** 2

    def _attention_factor(self, length: int) -> float:
        """Return the number that multiplies the rotated channels of both q and k at `length` tokens."""
        p = self.parameters
        log_s = math.log(max(1.0, self.factor_at(length)))
        if p.get("attention_factor") is not None:
            return float(p["attention_factor"])
        if self.rope_type == "longrope":
            return math.sqrt(1 + log_s / math.log(p[LENGTH]))
        if self.rope_type not in ("yarn", "yarn_by_turns"):
            return 1.0
        scale, scale_all = p.get("mscale"), p.get("mscale_all_dim")
        # As in transformers, the two count only together; otherwise the result is YaRN's 0.1 ln s + 1.
        if not (scale and scale_all):
            scale, scale_all = 1, 0
        return float((0.1 * scale * log_s + 1) / (0.1 * scale_all * log_s + 1))


def _with_larger_base(w: Tensor, s: float) -> Tensor:
    pair = torch.arange(len(w), dtype=w.dtype, device=w.device)
    # Changing the base multiplies each frequency by this factor, so it also works for learned or clipped frequencies.
    return w * s ** (-pair / max(1, len(w) - 1))


def _ramp_by_pairs(w: Tensor, base: float, L: int, slow: float, fast: float, rounds: bool) -> Tensor:
    """Return the share of each frequency that stays, [r/2]: 1 up to the pair with `fast` turns, 0 from `slow` on."""
    r = 2 * len(w)
    # The pairs t, as fractions, that make `turns` turns in L tokens: L base ** (-2t / r) / 2 pi = turns.
    low, high = (r * math.log(L / (turns * 2 * math.pi)) / (2 * math.log(base)) for turns in (fast, slow))
    if rounds:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, r - 1)
    pair = torch.arange(len(w), dtype=w.dtype, device=w.device)
    # The authors' code avoids a division by zero in this way.
    return 1 - ((pair - low) / (high - low or 0.001)).clamp(0, 1)


def _check_factor(name: str, factor: float) -> None:
    if name == BY_WINDOW:
        raise ConfigError(
            f"scheme.factor={factor} has no meaning for scheme.rescale={name}, whose factor is the length of each "
            "window / training length: leave scheme.factor out, or use scheme.rescale=ntk"
        )
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 1 <= factor < 1e6:
        raise ConfigError(
            f"scheme.factor={factor} must be between 1 and 1e6: evaluated length / training length is usual"
        )


def _check_keys(parameters: Mapping[str, Any]) -> None:
    kind = str(parameters.get("rope_type"))
    keys = ROPE_TYPES.get(kind)
    if keys is None:
        raise ConfigError(
            f"scheme.rescale has rope_type={kind}, which is not known{nearest(kind, ROPE_TYPES)} (known: "
            f"{', '.join(ROPE_TYPES)})"
        )
    wrong = [key for key in parameters if key not in ("rope_type", *keys)]
    # Keys that are missing or null.
    wrong += [key for key in keys if key not in _OPTIONAL and parameters.get(key) is None]
    if wrong:
        raise ConfigError(
            f"scheme.rescale with rope_type={kind} has or lacks {', '.join(wrong)}: give {', '.join(keys)}"
        )


def check_values(parameters: Mapping[str, Any], place: str = "scheme.rescale") -> None:
    """Raise ConfigError for a value in `rope_parameters` from which no sensible frequencies or scores follow.

    Keys that are missing or null are not read, except a base that is null. Arguments: place,
    the beginning of the message.
    """
    for key in (*_LEAST, *_POSITIVE, *_LISTS, "truncate"):
        value = parameters.get(key)
        is_null_base = key == "rope_theta" and key in parameters
        if value is None and not is_null_base:
            continue
        least = _LEAST.get(key, 0)
        # Its factor is only the ratio of two lengths in config.json: below 1, attention is not scaled.
        if key == "factor" and parameters.get("rope_type") == "longrope":
            least = 1e-6
        if key == "truncate":
            is_valid, expected = isinstance(value, bool), "true or false"
        elif key in _LISTS:
            is_valid = isinstance(value, Sequence) and all(_is_number(number) and number > 0 for number in value)
            expected = "a list of numbers above 0"
        elif key in _POSITIVE:
            is_valid, expected = _is_number(value) and value > 0, "a number above 0"
        else:
            is_valid, expected = _is_number(value) and value >= least, f"a number, {least} or more"
        if not is_valid:
            raise ConfigError(f"{place} has {key}={value!r}, which must be {expected}")
    # The other way round, slow pairs would stay and fast ones would be rescaled.
    kind = parameters.get("rope_type")
    ends = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_slow", "beta_fast")}
    if kind in ends:
        slow, fast = (parameters.get(key) or default for key, default in zip(ends[kind], (_SLOW, _FAST), strict=True))
        if slow >= fast:
            raise ConfigError(
                f"{place} with rope_type={kind} has {ends[kind][0]}={slow}, which must be below "
                f"{ends[kind][1]}={fast}: both are turns in the training length"
            )


def check_lists(parameters: Mapping[str, Any], channels: int, place: str = "") -> None:
    """Raise ConfigError unless the factors of `longrope` are one for each pair of the rotated `channels`.

    Arguments: place, the beginning of the message.
    """
    for key in _LISTS:
        factors = parameters.get(key)
        if factors is not None and len(factors) != channels // 2:
            raise ConfigError(
                f"{place}{key} has {len(factors)} entries, and {channels} channels a head are rotated: it needs "
                f"{channels // 2}"
            )


def _is_number(value: object) -> TypeGuard[float]:
    # A YAML `true` is an int in Python.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
