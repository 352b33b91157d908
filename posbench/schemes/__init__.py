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
from posbench.machine.plugins import Registry, check_options
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

__all__ = ["SCHEMES", "At", "Bias", "Scheme", "Shape", "Turn", "build_scheme", "rotate", "turn"]

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


def _with_members(option: Any, shape: Shape) -> Any:
    """The option, with schemes in place of a list of their mappings."""
    if not (isinstance(option, list) and option and all(isinstance(m, Mapping) and "kind" in m for m in option)):
        return option
    members: dict[str, Scheme] = {}
    keys = [json.dumps(member, sort_keys=True, default=str) for member in option]
    for key, member in zip(keys, option, strict=True):
        if key not in members:
            members[key] = build_scheme(SchemeConfig.from_mapping(dict(member)), shape)
    return [members[key] for key in keys]
