"""Read the entries of the test vectors, and the mistakes that ports make, from `entries.yaml`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from posbench.tools.vectors.conventions import Alibi, AlibiSlopes, Entry, Rotation, T5Buckets, Xpos

_FILE = Path(__file__).with_suffix(".yaml")
_CONTENT: dict[str, Any] = yaml.safe_load(_FILE.read_text(encoding="utf-8"))
_KINDS = {kind.__name__: kind for kind in (Rotation, Xpos, Alibi, AlibiSlopes, T5Buckets)}


class Mistake(NamedTuple):
    """A way to get an entry wrong."""

    name: str
    summary: str  # what a port that makes it does
    changes: dict[str, Any]  # fields of an entry, and their wrong values


MISTAKES = [Mistake(name, **content) for name, content in _CONTENT["mistakes"].items()]


def with_mistakes(entry: Entry) -> Iterator[tuple[Mistake, Entry]]:
    """Yield each mistake that can be made in an entry, and the entry with it."""
    names = {field.name for field in fields(entry)}
    for mistake in MISTAKES:
        if mistake.changes.keys() <= names:
            wrong = replace(entry, **mistake.changes)
            if wrong != entry:
                yield mistake, wrong


def in_float32(entry: Entry) -> Entry:
    """Return an entry whose angles are computed in float32, as most code does; other entries do not change."""
    if not isinstance(entry, Rotation):
        return entry
    return replace(entry, frequency_format="float32", position_format="float32", angle_format="float32")


def entries(head_dim: int) -> list[Entry]:
    """Return all entries. Arguments: head_dim, D, for the lists of longrope."""
    pairs = range(head_dim // 2)
    lists = {"short_factor": [1 + t / 64 for t in pairs], "long_factor": [1.0 + t for t in pairs]}
    entries: list[Entry] = []
    for name, content in _CONTENT["entries"].items():
        settings = {"kind": "Rotation", **content}
        if name == "longrope":
            settings["rescale"] = settings["rescale"] | lists
        kind = _KINDS[settings.pop("kind")]
        entries.append(kind(name=name, **settings))
    return entries
