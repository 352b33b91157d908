"""Text that every machine has: the Python standard library's source."""

from __future__ import annotations

import os
import platform
import re
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from posbench.config import DataConfig
from posbench.data.corpus import SPLITS
from posbench.data.overlap import gram_hashes, near_duplicates
from posbench.data.sources import Source, split_of, tuning_split

# Not the library's own, or made by a program: `encodings` is 122 files from one template, most of them tables of code
# points, and `pydoc_data` is the language reference as one table of strings.
_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data"}
_MOST_ROWS = 0.5  # a file with at least this part of its text in rows of literals is a table
_SHARED = 0.02  # two files that share more than this part of the smaller one's 13-grams go to one split
_ROW_BEGINS = frozenset("'\"([{-0123456789bBuUrRfFNT")
_LITERAL = re.compile(
    r"""[rRbBuUfF]{0,2}(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|\b\d\w*|\b(?:None|True|False)\b|#.*""", re.ASCII
)
_NAME = re.compile(r"[A-Za-z_]")


class StandardLibrary(Source):
    """The source files of the running Python's own standard library with its tests: one file, one document.

    Tables are left out (`is_table`, and the folders named above). Files that share text with each other go to one split
    (`posbench.data.overlap.near_duplicates`), by a hash of the name of the first of them. So the splits are the same on
    every machine with the same files.
    """

    by_document = False

    def __init__(self, config: DataConfig) -> None:
        super().__init__(config)
        self.root = Path(sysconfig.get_paths()["stdlib"])

    def files(self) -> list[Path]:
        """In the order of their names."""
        found = []
        for folder, inner, names in os.walk(self.root):
            inner[:] = [name for name in inner if name not in _LEFT_OUT and not name.startswith("config-")]
            found += [
                Path(folder, name) for name in names if name.endswith(".py") and not name.startswith("_sysconfigdata")
            ]
        return sorted(found, key=self._name)

    def identity(self) -> Any:
        stats = [(self._name(path), path.stat()) for path in self.files()]
        return [platform.python_version(), [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]]

    def streams(self) -> dict[str, Iterable[str]]:
        fractions = {name: getattr(self.config, f"{name}_fraction") for name in ("test", "validation")}
        paths, grams = [], []
        for path in self.files():
            text = _text(path)
            if text and not text.isspace() and not is_table(text):
                paths.append(path)
                grams.append(gram_hashes(text))
        files: dict[str, list[Path]] = {name: [] for name in SPLITS if fractions.get(name, 1)}
        for path, first in zip(paths, near_duplicates(grams, _SHARED), strict=True):
            name = self._name(paths[first]).encode()
            split = tuning_split(split_of(name, fractions), name, self.config.tuning_fraction)
            if split is not None:
                files.setdefault(split, []).append(path)
        is_tuned = self.config.tuning_fraction > 0
        return {split: map(_text, found) for split, found in files.items() if found or not is_tuned}

    def _name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()


def is_table(text: str) -> bool:
    """Whether half of the text or more, by characters, is lines of nothing but literals, brackets and comments.

    Example: `    0x0081: None,  # not defined` is such a line; `    def test(self):` and prose are not.
    """
    lines = [line for line in map(str.strip, text.splitlines()) if line]
    rows = sum(len(line) for line in lines if line[0] in _ROW_BEGINS and not _NAME.search(_LITERAL.sub("", line)))
    return rows >= _MOST_ROWS * sum(map(len, lines))


def _text(path: Path) -> str:
    """The text of a file, empty where it is not UTF-8."""
    try:
        return path.read_bytes().decode("utf-8").replace("\r\n", "\n")
    except (UnicodeDecodeError, OSError):
        return ""
