"""Define `ConfigError`, an error that a user can fix, and rules that check single values of a configuration."""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import field
from pathlib import Path
from typing import Any

from posbench.config.units import short_count, whole_number

# omegaconf.MISSING marks a value that must be given. Spelled out so that `posbench --help` starts without OmegaConf.
MISSING: Any = "???"


class ConfigError(ValueError):
    """An error that a user can fix: its message names the cause, the value and the remedy."""


def nearest(word: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """Return `"; did you mean 'qk_rope'?"` with the word of `known` closest to `word`, or "" if none is close.

    Arguments: cutoff, how similar it must be, from 0 to 1.
    """
    by_lower_case = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), list(by_lower_case), n=1, cutoff=cutoff)
    return f"; did you mean {by_lower_case[close[0]]!r}?" if close else ""


def check_name(key: str, name: str) -> str:
    """Return `name` if it can name a folder: letters of any script, digits and `._=+-`, at most 240 bytes.

    Raises: ConfigError for any other name.
    """
    # So no run is outside the runs folder or hidden in it.
    if not re.fullmatch(r"[^\W_][\w.=+-]*", str(name)) or len(name.encode()) > 240:  # file systems take 255 bytes
        raise ConfigError(
            f"{key}={name!r} cannot name a folder: use letters, digits and . _ = + - (at most 240 bytes), beginning "
            "with a letter or digit"
        )
    return name


def keys_of(words: Iterable[str]) -> set[str]:
    """Return the keys of overrides such as `+train.lr=1e-3`."""
    return {word.lstrip("+").partition("=")[0] for word in words}


def branch_name(trunk: str, tokens: int) -> str:
    """Return the name of a run of `tokens` tokens that branches off the experiment `trunk`: `ladder_s-2M`."""
    return f"{trunk}-{short_count(tokens)}"


def require(condition: bool, message: str) -> None:
    """Raise ConfigError with `message` unless `condition` is true."""
    if not condition:
        raise ConfigError(message)


# ---------------------------------------------------------------- rules about single values

Rule = Callable[[str, Any], Any]  # (name of a field, value) -> the value to store; raises ConfigError


def ruled(rule: Rule, default: Any = MISSING) -> Any:
    """Return a dataclass field whose values are checked by `rule`; None is accepted if it is the default."""
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata={"rule": rule, "type": list})
    return field(default=default, metadata={"rule": rule})


def between(low: float, high: float = math.inf) -> Rule:
    """Return a rule that accepts finite numbers from `low` to `high`."""

    def rule(key: str, value: Any) -> Any:
        is_valid = isinstance(value, (int, float)) and low <= value <= high and math.isfinite(value)  # excludes NaN
        limits = f"be {low} or more"
        if math.isfinite(high):
            limits = f"lie between {low} and {high}"
        require(is_valid, f"{key}={value} is out of range: it must {limits}")
        return value

    return rule


def at_least(low: float) -> Rule:
    """Return a rule that accepts finite numbers of `low` or more."""
    return between(low)


def one_of(*known: str) -> Rule:
    """Return a rule that accepts the words in `known`."""

    def rule(key: str, value: Any) -> Any:
        hint = nearest(str(value), known)
        require(value in known, f"{key}={value!r} is not known{hint} (known: {', '.join(known)})")
        return value

    return rule


def list_of(rule: Rule) -> Rule:
    """Return a rule that applies `rule` to each member of a list."""

    def list_rule(key: str, values: Any) -> list[Any]:
        require(isinstance(values, list), f"{key}={values!r} is not a list: give {key}=[...]")
        return [rule(key, value) for value in values]

    return list_rule


def token_count(key: str, value: Any, unit: str = "tokens") -> int:
    """Return `value`, a number or text such as `200k` or `1e6` (k is 1,000), as a whole number."""
    count = whole_number(value)
    if count is None:
        raise ConfigError(f"{key}={value!r} is not a number of {unit}: give a whole number, or 200k, 20M, 2.5B, 1e6")
    return count


def step_count(key: str, value: Any) -> int:
    """Return `value`, such as 50 or `2k` (2,000), as a number of steps, 1 or more."""
    return int(at_least(1)(key, token_count(key, value, "steps")))


def parse_length(key: str, value: Any, least: int = 2) -> int:
    """Return `value`, such as 512 or `8k` (8,192), as a length from `least` to 2^24."""
    count = whole_number(value, 1024)
    if count is None or not least <= count <= 1 << 24:
        raise ConfigError(
            f"{key}={value!r} is not a length: give a number from {least} to 16m, such as 4096 or 8k (8192)"
        )
    return count


def stack_size(key: str, value: Any) -> Any:
    """Return `value`, which says how many runs train as one: auto, off, or a number of 1 or more."""
    if value in ("auto", "off"):
        return value
    if value is False:  # YAML reads `off` so
        return "off"
    return step_count(key, value)


def scored_length(key: str, value: Any) -> int:
    """Return `value`, such as 512 or `8k` (8,192), as a length to score, in tokens or items of a task."""
    return parse_length(key, value, least=1)


def trained_lengths(key: str, value: Any) -> list[int]:
    """Return `value` if it is [shortest, longest], lengths to train on, in items of a task."""
    # type, because isinstance counts true and false as integers.
    is_valid = isinstance(value, list) and len(value) == 2 and all(type(length) is int for length in value)
    require(
        is_valid and 1 <= value[0] <= value[1],
        f"{key}={value!r} is not two lengths in items, the shortest and the longest, such as [2,16]",
    )
    return list(value)


LEARNING_RATE = between(1e-12, 10)


def learning_rates(key: str, value: Any) -> dict[str, float]:
    """Return `value` if it maps names of schemes to learning rates."""
    require(isinstance(value, dict), f"{key}={value!r} is not a mapping: give {{scheme: rate}}")
    return {scheme: LEARNING_RATE(f"{key}.{scheme}", rate) for scheme, rate in value.items()}


def schemes_of_a_group(key: str, value: Any) -> str:
    """Return `value` if it is a text that names two or more schemes, separated by spaces."""
    is_valid = isinstance(value, str) and len(value.split()) > 1
    require(is_valid, f"{key}={value!r} names no pair: give names of schemes, such as ['qk_rope alibi nope']")
    return str(value)


def user_path(key: str, value: Any) -> Any:
    """Return `value`, a path or a list of paths, with `~` expanded."""
    if isinstance(value, list):
        return [user_path(key, path) for path in value]
    require(isinstance(value, (str, Path)), f"{key}={value!r} is not a path or a list of paths")
    return os.path.expanduser(value)  # noqa: PTH111 (pathlib raises an error for the `~` of an unknown user)
