"""Text that every machine has: the Python standard library's source."""

from __future__ import annotations

import os
import platform
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from posbench.config import DataConfig
from posbench.data.sources.base import Source, stream

_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


class StandardLibrary(Source):
    """The source files of the running Python's own standard library, without its tests: one file, one document."""

    cut = ("test", "validation")

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
        return {"train": stream(_decodable, self.files())}

    def _name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()


def _decodable(path: Path) -> Iterator[str]:
    try:
        yield path.read_bytes().decode("utf-8").replace("\r\n", "\n")
    except (UnicodeDecodeError, OSError):
        return
