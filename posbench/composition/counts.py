"""Numbers of tokens as people write them: `20M`, `200k`, `2.5B`, `1e6`; lengths of windows as `8k`, which is 8192.

They may stand on the command line and in YAML files. A `Config`, and so a run's config.yaml, has whole numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import field, fields, make_dataclass
from decimal import Decimal
from typing import Any, get_type_hints

from posbench.config import Config, ConfigError

COUNTS = {  # tokens of a text or a batch: k is a thousand
    "train": ("tokens", "branch_tokens", "trunk_tokens", "validation_tokens"),
    "data": ("token_budget",),
    "evaluation": ("max_tokens", "ngram_tokens", "batch_tokens"),
}
LENGTHS = {"train": ("context_length",), "evaluation": ("lengths", "piece")}  # tokens of a window: k is 1024
_WORD = re.compile(r"(\d[\d_]*(?:\.\d+)?(?:[eE]\+?\d{1,2})?)([kKmMbBgGtT]?)")
_THOUSANDS = {"": 0, "k": 1, "m": 2, "b": 3, "g": 3, "t": 4}


def count(what: str, value: Any) -> Any:
    """`value` as a whole number of tokens, where it is a word or a number with a point; another as it is.

    Arguments: what, the beginning of a message, such as `train.tokens=`.
    Raises: ConfigError for text that is no number, and for parts of a token.
    """
    return _read(what, value, 1000, "a number of tokens: give a whole number, or 200k, 20M, 2.5B, 1e6")


def length(what: str, value: Any) -> Any:
    """`count` of a window's length: `8k` is 8192, `1m` 1048576."""
    return _read(what, value, 1024, "a length: give tokens from 2 to 16m, such as 4096 or 8k (8192)")


def _read(what: str, value: Any, thousand: int, wanted: str) -> Any:
    if isinstance(value, list):
        return [_read(what, each, thousand, wanted) for each in value]
    if isinstance(value, bool) or not isinstance(value, (str, float)):
        return value
    match = _WORD.fullmatch(str(value).strip())
    number = Decimal(match[1].replace("_", "")) * thousand ** _THOUSANDS[match[2].lower()] if match else None
    if number is None or number != number.to_integral_value():
        raise ConfigError(f"{what}{value!r} is not {wanted}")
    return int(number)


def whole_counts(mapping: dict[str, Any]) -> dict[str, Any]:
    """The mapping of a configuration with whole numbers in place of words. Raises: ConfigError."""
    readers: list[tuple[dict[str, tuple[str, ...]], Callable[[str, Any], Any]]] = [(COUNTS, count), (LENGTHS, length)]
    mapping = dict(mapping)
    for names_of, read in readers:
        for group, names in names_of.items():
            values = mapping.get(group)
            if isinstance(values, dict):
                read_ones = {name: read(f"{group}.{name}=", values[name]) for name in names if name in values}
                mapping[group] = values | read_ones
    return mapping


def wordy(config: type[Config]) -> type:
    """The dataclass that Hydra checks YAML files and words against: `Config`, with anything where words may stand."""
    types, groups = get_type_hints(config), []
    for each in fields(config):
        names = {*COUNTS.get(each.name, ()), *LENGTHS.get(each.name, ())}
        if names:
            groups.append((each.name, _with_any(types[each.name], names), field(default=each.default)))
    return _importable(make_dataclass(config.__name__, groups, bases=(config,)))


def _with_any(group: type, names: set[str]) -> type:
    changed: list[tuple[str, Any, Any]] = []
    for each in fields(group):
        if each.name in names:
            own: Any = field(default=each.default, default_factory=each.default_factory)
            changed.append((each.name, Any, own))
    return _importable(make_dataclass(group.__name__, changed, bases=(group,)))


def _importable(cls: type) -> type:
    """The class as a name of this module, which is what a pickle holds of it: joblib's workers import it.

    They would have a copy else, and in that copy the mark of fields without a default is another object.
    """
    cls.__module__, cls.__qualname__ = __name__, f"Wordy{cls.__name__}"
    globals()[cls.__qualname__] = cls
    return cls


SCHEMA = wordy(Config)
