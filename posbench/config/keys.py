"""The keys of a configuration: their types, and the sentence that refuses an unknown one."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from posbench.config.fields import Config, DataConfig, SchemeConfig, TaskConfig
from posbench.config.rules import nearest, user_path

_ALIASES = {"learning_rate": "lr", "hidden_size": "d_model", "n_embd": "d_model", "block_size": "context_length"}
_TYPES = {
    list: "a list",
    int: "a whole number, such as 8",
    float: "a number, such as 0.001",
    bool: "true or false",
    str: "text",
}


@cache
def settings() -> dict[str, Any]:
    """Return the type of each key of a configuration, such as `train` and `train.lr`. Paths have the type `Path`."""
    groups = [("", Config), *get_type_hints(Config).items()]
    groups += [("scheme", SchemeConfig), ("data", TaskConfig), ("data", DataConfig)]
    types: dict[str, Any] = {}
    for group, cls in groups:
        hints = get_type_hints(cls) if is_dataclass(cls) else {}
        for each in fields(cls) if hints else ():
            hint = Path if each.metadata.get("rule") is user_path else hints[each.name]
            types[f"{group}.{each.name}".lstrip(".")] = each.metadata.get("type", hint)
    return types


def is_text(key: str) -> bool:
    """Return whether a key's value is a text, a path, or a list of texts, so that `1e3` is no number there."""
    hint = settings().get(key)
    return hint is Path or (get_origin(hint) is not dict and str in (hint, *get_args(hint)))


def type_words(key: str) -> str:
    """Return what a key's value must be: `true or false`; the empty string if its own rule says."""
    hint = settings().get(key)
    kinds = (hint, get_origin(hint), *get_args(hint))
    words = next((words for kind, words in _TYPES.items() if kind in kinds), "")
    return f"{words}, or null" if words and NoneType in kinds else words


def no_setting(key: str) -> str:
    """Return the sentence that refuses an unknown key, with the nearest known ones."""
    group, _, name = key.rpartition(".")
    name = _ALIASES.get(name, name)
    same = [known for known in settings() if known == f"{group}.{name}" or (not group and known.endswith(f".{name}"))]
    hint = f"; did you mean {' or '.join(map(repr, same))}?" if 0 < len(same) < 3 else nearest(key, settings())
    if group.partition(".")[0] == "experiment" and key.split(".")[1] in settings():
        hint = "; begin the experiment's file with '# @package _global_'"
    return f"there is no setting {key!r}{hint} (posbench train --cfg job shows them all)"
