"""Read text that every machine has: the source of Python's standard library."""

from __future__ import annotations

import os
import platform
import re
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from posbench.config import DataConfig
from posbench.data.text.overlap import gram_hashes, near_duplicates
from posbench.data.text.sources import Source, split_groups

# Folders that are not part of the library, or were generated: `encodings` is 122 files from one template, most of them
# tables of code points, and `pydoc_data` is the language reference as one table of strings.
_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data"}
_MOST_ROWS = 0.5  # a file is a table if at least this share of its text is rows of literals
_ROW_BEGINS = frozenset("'\"([{-0123456789bBuUrRfFNT")
_LITERAL = re.compile(
    r"""[rRbBuUfF]{0,2}(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|\b\d\w*|\b(?:None|True|False)\b|#.*""", re.ASCII
)
_NAME = re.compile(r"[A-Za-z_]")


class StandardLibrary(Source):
    """Source files of the running Python's standard library and its tests, one document each.

    Tables are left out. Files that share text go to the same split.
    """

    by_document = False

    def __init__(self, config: DataConfig) -> None:
        super().__init__(config)
        self.root = Path(sysconfig.get_paths()["stdlib"])

    def files(self) -> list[Path]:
        """Return the paths of the library's Python files, in the order of their names."""
        files = []
        for folder, inner, names in os.walk(self.root):
            inner[:] = [name for name in inner if name not in _LEFT_OUT and not name.startswith("config-")]
            # `_sysconfigdata` and `config-*` differ between builds.
            files += [
                Path(folder, name) for name in names if name.endswith(".py") and not name.startswith("_sysconfigdata")
            ]
        return sorted(files, key=self._name)

    def identity(self) -> Any:
        stats = [(self._name(path), path.stat()) for path in self.files()]
        return [platform.python_version(), [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]]

    def streams(self) -> dict[str, Iterable[str]]:
        paths, grams = [], []
        for path in self.files():
            text = _text(path)
            if text and not text.isspace() and not is_table(text):
                paths.append(path)
                grams.append(gram_hashes(text))
        # A hash of a family's first file name: the same splits on every machine with the same files.
        families = (self._name(paths[first]).encode() for first in near_duplicates(grams))
        splits = split_groups(self.config, zip(families, paths, strict=True))
        return {split: map(_text, members) for split, members in splits.items()}

    def _name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()


def is_table(text: str) -> bool:
    """Return whether at least half of the text is lines of only literals, brackets and comments.

    Example: `    0x0081: None,  # not defined` is such a line; `    def test(self):` and prose are not.
    """
    lines = [line for line in map(str.strip, text.splitlines()) if line]
    rows = sum(len(line) for line in lines if line[0] in _ROW_BEGINS and not _NAME.search(_LITERAL.sub("", line)))
    return rows >= _MOST_ROWS * sum(map(len, lines))


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8").replace("\r\n", "\n")
    except (UnicodeDecodeError, OSError):
        return ""
