"""Where text comes from: a registry of sources, each a stream of documents per split through the `datasets` library.

A source tells two things: `identity`, cheap to make (file names, sizes, times; a pinned revision), by which the cache
recognises text it has tokenized before, and `streams`, the documents themselves, read one at a time. Adding a source is adding
a class here and its name to `SOURCES`.
"""

from __future__ import annotations

import os
import platform
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from posbench.config import DataConfig

_LEFT_OUT = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "__pycache__",
}  # folders of the standard library


class Source(ABC):
    """Text as lists of documents. `cut` names the splits that are taken out of the train stream by a hash of each document."""

    cut: tuple[str, ...] = ()

    def __init__(self, config: DataConfig) -> None:
        self.config = config

    @abstractmethod
    def identity(self) -> Any:
        """What the text is recognised by, as JSON; costs no reading of text and no network."""

    @abstractmethod
    def streams(self) -> dict[str, Iterable[str]]:
        """Documents by split, read when iterated. Raises: ConfigError where the text cannot be had."""


class StandardLibrary(Source):
    """The source files of the running Python's own standard library, without its tests: one file, one document."""

    cut = ("test", "validation")

    def __init__(self, config: DataConfig) -> None:
        super().__init__(config)
        self.root = Path(sysconfig.get_paths()["stdlib"])

    def _files(self) -> list[Path]:
        found = []
        for folder, inner, names in os.walk(self.root):
            inner[:] = [name for name in inner if name not in _LEFT_OUT and not name.startswith("config-")]
            found += [Path(folder, name) for name in names if name.endswith(".py")]
        return sorted(found, key=lambda path: path.relative_to(self.root).as_posix())

    def identity(self) -> Any:
        stats = [(path.relative_to(self.root).as_posix(), path.stat()) for path in self._files()]
        return [platform.python_version(), [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]]

    def streams(self) -> dict[str, Iterable[str]]:
        return {"train": stream(_decodable, paths=[str(path) for path in self._files()])}


def stream(read: Callable[..., Iterator[str]], **arguments: Any) -> Iterable[str]:
    """What `read(**arguments)` yields, as the texts of a streamed `datasets` data set."""
    from datasets import IterableDataset

    def rows(**arguments: Any) -> Iterator[dict[str, str]]:
        for text in read(**arguments):
            yield {"text": text}

    return (row["text"] for row in IterableDataset.from_generator(rows, gen_kwargs=arguments))


def _decodable(paths: list[str]) -> Iterator[str]:
    for path in paths:
        try:
            yield Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue


SOURCES: dict[str, type[Source]] = {"stdlib": StandardLibrary}
