"""Read and change a scheme as the mapping in its YAML file, whose lists `layers` and `of` hold other schemes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from posbench.config import ConfigError
from posbench.schemes.rescaling import BY_WINDOW

Entry = Mapping[str, Any]


@dataclass(frozen=True)
class Positions:
    """The position scheme of a trained model, and the lengths it may be used at."""

    row: dict[str, Any] | None  # the scheme as in conf/scheme/*.yaml; None: posbench has no such scheme
    described: str  # the scheme in one line
    length: int | None = None  # longest input in the model's own training, tokens; None: not known

    @property
    def trained_length(self) -> int | None:
        """Return L of the formulas for positions, tokens: `length`, or less if the model continued another."""
        return (self.row or {}).get("trained_length") or self.length

    def checked_row(self, from_run: str) -> dict[str, Any]:
        """Return the scheme's settings, as in a YAML file. Raises: ConfigError if posbench has no such scheme."""
        if self.row is not None:
            return self.row
        raise ConfigError(
            f"train.from_run={from_run} has positions {self.described}, which posbench lacks: name the scheme to train "
            "it with, such as scheme=nope, or scheme=qk_rope scheme.base=..."
        )


def described(entry: Entry) -> str:
    """Return a scheme's settings as one line of JSON, without name and learning rate."""
    return json.dumps({key: value for key, value in entry.items() if key not in ("name", "lr", "lr_factor")})


def schemes_in(option: Any) -> list[Entry]:
    """Return the option if it is a list of schemes (mappings with a kind), otherwise an empty list."""
    is_list = isinstance(option, list) and all(isinstance(item, Mapping) and "kind" in item for item in option)
    return option if is_list else []


def members_of(entry: Entry) -> list[Entry]:
    """Return the schemes in the lists of a scheme."""
    members: list[Entry] = []
    for value in entry.values():
        members += schemes_in(value)
    return members


def parts_of(entry: Entry) -> Iterator[Entry]:
    """Yield the schemes in the lists of a scheme, each followed by those in its own lists."""
    for member in members_of(entry):
        yield member
        yield from parts_of(member)


def with_members(entry: Entry, change: Callable[[Entry], Entry]) -> dict[str, Any]:
    """Return a copy of a scheme with `change` applied to each scheme in its lists."""
    changed = {}
    for name, value in entry.items():
        members = [change(member) for member in schemes_in(value)]
        changed[name] = members or value
    return changed


def with_factor(entry: Entry, factor: float) -> dict[str, Any]:
    """Return a copy of a scheme in which rescaled rotations without a factor get a fixed `factor`."""
    changed = with_members(entry, lambda member: with_factor(member, factor))
    method = entry.get("rescale")
    # `BY_WINDOW` takes no factor, and a mapping (transformers' parameters) holds its own.
    takes_factor = isinstance(method, str) and method != BY_WINDOW
    if takes_factor and entry.get("factor") is None:
        changed["factor"] = factor
    return changed
