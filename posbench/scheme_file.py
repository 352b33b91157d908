"""A scheme of one's own: a class in a Python file, named `my_scheme.py:Faded` where a scheme's name may stand."""

from __future__ import annotations

import hashlib
import re
import sys
import traceback
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import NamedTuple, TypeVar

from posbench.config import ConfigError, nearest

T = TypeVar("T")


class SchemeFile(NamedTuple):
    """The file of a scheme, as it was named, and the class in it."""

    path: Path
    class_name: str


def split(kind: str) -> SchemeFile | None:
    """The file and the class of `my_scheme.py:Faded`; None for the name of a registered kind."""
    path, _, class_name = kind.rpartition(":")
    if not path.endswith(".py"):
        return None
    return SchemeFile(Path(path).expanduser(), class_name)


def snake_case(class_name: str) -> str:
    """`WindowedNope` -> `windowed_nope`, `TransformerXL` -> `transformer_xl`: a class's name as that of a row."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", class_name).lower()


@cache
def load(kind: str, base: type[T]) -> type[T]:
    """The class that `my_scheme.py:Faded` names, from the file as it is now.

    Raises: ConfigError, with the file and line, where there is no such file or class, or where importing it fails.
    """
    file = split(kind)
    assert file is not None
    path, class_name = file
    name = f"posbench_scheme_{path.stem}_{digest(path)}"
    spec = spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"{path}, line {_line_in(path, error)}: {type(error).__name__}: {error}") from error
    cls = getattr(module, class_name, None)
    if not (isinstance(cls, type) and issubclass(cls, base)):
        defined = [n for n, v in vars(module).items() if isinstance(v, type) and issubclass(v, base) and v is not base]
        known = f"it has {', '.join(defined)}" if defined else f"it has no class that extends {base.__name__}"
        raise ConfigError(f"{path} has no position scheme {class_name!r}{nearest(class_name, defined)} ({known})")
    return cls


def _line_in(path: Path, error: BaseException) -> int:
    """The line of the file at which an error arose."""
    if isinstance(error, SyntaxError) and error.lineno:
        return error.lineno
    places = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path]
    return (places[-1] if places else 0) or 1


def digest(path: Path) -> str:
    """The SHA-256 of the file. Raises: ConfigError where there is none."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): give the path of the scheme's file") from error
