"""Schemes made of other schemes: each name of a row in `scheme.layers` and `scheme.of` becomes that row's own mapping.

So `layers: [qk_rope, nope]` is written to a run folder as `layers: [{name: qk_rope, kind: rotary, ...}, {name: nope,
...}]`, which needs no other file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from posbench.composition.choices import check_choice, choices
from posbench.composition.explain import explained
from posbench.composition.session import composed
from posbench.composition.words import Words
from posbench.config import ConfigError, nearest

LISTS = ("layers", "of")  # the options that name rows of conf/scheme


def expand(scheme: Any, folder: Path | None, within: tuple[str, ...] = ()) -> Any:
    """A scheme's mapping with rows in place of their names; mappings in those lists stay, with theirs expanded.

    Arguments: folder, of the user's own choices; within, the names of the rows that this one is part of.
    Raises: ConfigError for an unknown row, and for a row that contains itself.
    """
    if not isinstance(scheme, dict):
        return scheme
    rows: dict[str, Any] = {}  # a row that is named twice is read once

    def part(value: Any, option: str) -> Any:
        if not isinstance(value, str):
            return expand(value, folder, within)
        if value not in rows:
            rows[value] = expand(_row(value, option, folder, within), folder, (*within, value))
        return rows[value]

    return {
        option: [part(value, option) for value in values] if option in LISTS and isinstance(values, list) else values
        for option, values in scheme.items()
    }


def _row(name: str, option: str, folder: Path | None, within: tuple[str, ...]) -> Any:
    """The mapping of `conf/scheme/NAME.yaml` as Hydra composes it, references to other fields left as they are."""
    if name in within:
        raise ConfigError(f"the scheme {name!r} contains itself: {' -> '.join((*within, name))}; break that circle")
    check_choice("scheme", name)
    known = choices("scheme", *([folder] if folder is not None else []))
    if name not in known:
        raise ConfigError(
            f"scheme.{option} names {name!r}, which is not a scheme{nearest(name, known)} (conf/scheme contains "
            f"{', '.join(known)})"
        )
    words = Words((f"scheme={name}",), folder)
    with explained(words):
        return OmegaConf.to_container(composed(words), resolve=False)["scheme"]  # type: ignore[call-overload,index]
