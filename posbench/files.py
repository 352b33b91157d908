"""Reading files that somebody else may have put there: ordinary ones alone, and no deeper than a program's stack."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

import yaml


def open_regular(path: Path, flags: int, mode: int = 0o644) -> int:
    """`os.open` that waits for nobody. Raises: OSError, also where `path` is a pipe, a device or a folder."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no ordinary file", str(path))
    return descriptor


def read_bytes(path: Path) -> bytes:
    """All of an ordinary file. Raises: OSError."""
    with os.fdopen(open_regular(path, os.O_RDONLY), "rb") as file:
        return file.read()


def parse_json(text: bytes) -> Any:
    """What JSON holds. Raises: ValueError, also where it is nested too deep."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def read_json(path: Path) -> Any:
    """`parse_json` of an ordinary file. Raises: OSError; ValueError."""
    return parse_json(read_bytes(path))


def read_yaml(path: Path) -> Any:
    """Plain data from YAML without aliases, which could stand for more than fits into memory, or for themselves.

    Raises: OSError; ValueError with the first line of what is wrong.
    """
    content = read_bytes(path)
    try:
        return _PlainLoader(content).get_single_data()
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError((str(error) or "it is no YAML").splitlines()[0]) from error


class _PlainLoader(yaml.SafeLoader):
    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise ValueError(f"an alias, *{self.peek_event().anchor}, is not taken")
        return super().compose_node(parent, index)
