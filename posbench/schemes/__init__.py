"""Position schemes by name. This package knows tensors, not models.

A new one is a short class here (or in a package of your own that names it under the entry-point group
`posbench.schemes`), a YAML file in `conf/scheme/`, its definition in `posbench/reference/`, and a golden value in the
tests: see `docs/adding-a-scheme.md`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from posbench.config import SchemeConfig
from posbench.machine.plugins import Registry, check_options, option_names
from posbench.schemes.alibi import Alibi
from posbench.schemes.base import At, Bias, Scheme, Shape, check_hooks
from posbench.schemes.composite import Combined, Interleaved
from posbench.schemes.fire import Fire
from posbench.schemes.fox import Fox
from posbench.schemes.kerple import Kerple
from posbench.schemes.learned import Learned
from posbench.schemes.learned_rotary import LearnedBase, LearnedFrequencies
from posbench.schemes.partial import Hope, PartialRotary, ProportionalRotary
from posbench.schemes.pope import Pope
from posbench.schemes.rotary import Rotary, Turn, rotate, turn
from posbench.schemes.shaw import Shaw
from posbench.schemes.sinusoidal import Sinusoidal
from posbench.schemes.ssmax import Ssmax
from posbench.schemes.t5 import T5
from posbench.schemes.transformer_xl import TransformerXL
from posbench.schemes.xpos import XPos

__all__ = [
    "SCHEMES",
    "At",
    "Bias",
    "Scheme",
    "Shape",
    "Turn",
    "build_scheme",
    "rotate",
    "takes_option",
    "turn",
    "with_option",
]

_OURS: dict[str, type[Scheme]] = {
    "nope": Scheme,
    "rotary": Rotary,
    "learned_frequencies": LearnedFrequencies,
    "learned_base": LearnedBase,
    "partial_rotary": PartialRotary,
    "p_rope": ProportionalRotary,
    "hope": Hope,
    "xpos": XPos,
    "pope": Pope,
    "alibi": Alibi,
    "t5": T5,
    "kerple": Kerple,
    "fire": Fire,
    "shaw": Shaw,
    "transformer_xl": TransformerXL,
    "fox": Fox,
    "ssmax": Ssmax,
    "sinusoidal": Sinusoidal,
    "learned": Learned,
    "interleaved": Interleaved,
    "combined": Combined,
}
SCHEMES: Registry[Scheme] = Registry("position scheme kind", "posbench.schemes", Scheme, _OURS, check_hooks)


def build_scheme(config: SchemeConfig, shape: Shape) -> Scheme:
    """The scheme that `config` names, for a decoder of `shape`.

    Options that are lists of schemes (mappings with a name and a kind) are built first; equal ones are one scheme.
    Raises: ConfigError for an unknown kind, an unknown or missing option, or a value the scheme refuses.
    """
    scheme = SCHEMES.named("scheme.kind", config.kind)
    check_options("scheme", config.kind, scheme, config.options)
    return scheme(shape, **{name: _with_members(value, shape) for name, value in config.options.items()})


def takes_option(row: Mapping[str, Any], option: str) -> bool:
    """Whether a scheme, in the flat form of its YAML, has the option, or one of those that it is made of has."""
    return _has(row, option) or any(takes_option(member, option) for value in row.values() for member in _rows(value))


def with_option(row: Mapping[str, Any], option: str, value: Any) -> dict[str, Any]:
    """The row with its option set; where it has none such, those that it is made of have theirs set."""
    if _has(row, option) or not takes_option(row, option):
        return {**row, option: value}

    def changed(member: Mapping[str, Any]) -> Mapping[str, Any]:
        return with_option(member, option, value) if takes_option(member, option) else member

    return {name: list(map(changed, _rows(part))) if _rows(part) else part for name, part in row.items()}


def _has(row: Mapping[str, Any], option: str) -> bool:
    kind = str(row.get("kind"))
    return kind in SCHEMES and option in option_names(SCHEMES[kind])


def _rows(option: Any) -> list[Mapping[str, Any]]:
    """The option where it is a list of schemes, none otherwise."""
    are_rows = isinstance(option, list) and all(isinstance(each, Mapping) and "kind" in each for each in option)
    return option if are_rows else []


def _with_members(option: Any, shape: Shape) -> Any:
    """The option, with schemes in place of a list of their mappings."""
    if not _rows(option):
        return option
    members: dict[str, Scheme] = {}
    keys = [json.dumps(member, sort_keys=True, default=str) for member in option]
    for key, member in zip(keys, option, strict=True):
        if key not in members:
            members[key] = build_scheme(SchemeConfig.from_mapping(dict(member)), shape)
    return [members[key] for key in keys]
