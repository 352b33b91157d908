"""Where a key is set in the files of the user's own choices: for messages, which name the file and the line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import yaml

from posbench.composition.choices import GROUPS
from posbench.composition.words import Words


def place_of(key: str, words: Words) -> str:
    """` (my_conf/experiment/mine.yaml, line 7)`, to be added to a message; empty where no such file sets the key.

    Empty too where the words set it themselves, or where several files do and the words name none of them.
    """
    if words.folder is None or any(word.lstrip("+~").partition("=")[0] == key for word in words.overrides):
        return ""
    found = {file: line for file in _files(words.folder) if (line := _line(file, words.folder, key))}
    named = {file: line for file, line in found.items() if f"{file.parent.name}={file.stem}" in words.overrides}
    chosen = named or found
    return "".join(f" ({file}, line {line})" for file, line in chosen.items()) if len(chosen) == 1 else ""


def _files(folder: Path) -> Iterator[Path]:
    for group in GROUPS:
        yield from sorted((folder / group).glob("*.yaml"))


def _line(file: Path, folder: Path, key: str) -> int | None:
    """The line, from 1, on which `file` sets `key`, such as `train.lr`. None: it does not."""
    try:
        text = file.read_text(encoding="utf-8")
        node = yaml.compose(text, yaml.SafeLoader)
    except (OSError, ValueError, yaml.YAMLError):
        return None
    names = key.split(".")
    if not any(line.startswith("# @package _global_") for line in text.splitlines()[:3]):
        group = file.parent.relative_to(folder).parts
        if tuple(names[: len(group)]) != group:
            return None
        names = names[len(group) :]
    line = None
    for name in names:
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        pair = next((pair for pair in pairs if pair[0].value == name), None)
        if pair is None:
            return None
        line, node = pair[0].start_mark.line + 1, pair[1]
    return line
