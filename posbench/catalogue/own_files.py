"""A class of one's own in a Python file: a scheme, named `my_scheme.py:Faded`, or a task, `my_task.py:Sums`.

It is named where the name of one of ours may stand: `kind` of a scheme's mapping, `task` of a task's.

The words of a command may name any file. What a run folder or a pack of somebody else names is imported only where it
lies below the working directory, outside of run folders, or was named on the command line.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import traceback
from collections.abc import Mapping
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from posbench.config import ConfigError, nearest

T = TypeVar("T")

_MODULE = "posbench_scheme_"  # what the modules of such files are called, before the file's own name
_NAMING = ("kind", "task")  # the keys of a mapping that may name a class in a file
_EXAMPLES = {"scheme": "my_scheme.py:Faded", "data": "my_task.py:Sums"}
_named: set[Path] = set()  # files that the words of this process named


class SchemeFile(NamedTuple):
    """A file, as it was named, and the class in it."""

    path: Path
    class_name: str


def parse_class_path(kind: str) -> SchemeFile | None:
    """The file and the class of `my_scheme.py:Faded`; None for the name of a registered kind."""
    path, _, class_name = kind.rpartition(":")
    if not path.endswith(".py"):
        return None
    return SchemeFile(Path(path).expanduser(), class_name)


def tidy(row: Any) -> Any:
    """A mapping with files as runs record them: relative to the working directory below it, else absolute."""
    if isinstance(row, Mapping):
        own = {key: _tidy(row[key]) for key in _NAMING if isinstance(row.get(key), str)}
        return {key: tidy(value) for key, value in row.items()} | own
    return [tidy(each) for each in row] if isinstance(row, list) else row


def _tidy(kind: str) -> str:
    if (file := parse_class_path(kind)) is None:
        return kind
    path = Path(os.path.abspath(file.path))  # noqa: PTH100 (links stay as they were named)
    here = Path.cwd()
    return f"{(path.relative_to(here) if path.is_relative_to(here) else path).as_posix()}:{file.class_name}"


def snake_case(class_name: str) -> str:
    """`WindowedNope` -> `windowed_nope`, `TransformerXL` -> `transformer_xl`: a class's name as that of a row."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", class_name).lower()


def names_file(kind: object) -> bool:
    """Whether a kind means a file of one's own: `my_scheme.py:Faded`, or `my_scheme.py` without its class."""
    return isinstance(kind, str) and (kind.endswith(".py") or parse_class_path(kind) is not None)


def row_of_file(kind: str, group: str = "scheme") -> dict[str, str]:
    """The row that `my_scheme.py:Faded` stands for: `{name: faded, kind: my_scheme.py:Faded}`, with `~` expanded.

    Arguments: group, of conf/: of `data` it is `{name: sums, source: task, task: my_task.py:Sums}`.

    The file is not read. Raises: ConfigError where there is no such file, or no class is named.
    """
    file = parse_class_path(kind) or SchemeFile(Path(kind.rstrip(":")).expanduser(), "")
    if not file.path.is_file():
        raise ConfigError(
            f"{group}={kind}: there is no file {file.path} (from {Path.cwd()}): "
            f"give the path of a Python file and a class in it, such as {group}={_EXAMPLES[group]}"
        )
    if not file.class_name:
        raise ConfigError(f"{group}={kind} names no class: give {group}={file.path}:Name")
    name, place = snake_case(file.class_name), f"{file.path}:{file.class_name}"
    return {"name": name, "kind": place} if group == "scheme" else {"name": name, "source": "task", "task": place}


def kinds_in(row: Any) -> list[str]:
    """What a mapping names as classes of files: a scheme's kind and its members', a task."""
    if isinstance(row, Mapping):
        named = [row[key] for key in _NAMING if isinstance(row.get(key), str)]
        own = [kind for kind in named if parse_class_path(kind) is not None]
        return own + [each for value in row.values() for each in kinds_in(value)]
    return [each for value in row for each in kinds_in(value)] if isinstance(row, list) else []


def name_files(row: Any) -> None:
    """Let the files be imported that a mapping names: it was composed of the user's own words."""
    _named.update(Path(file.path).resolve() for kind in kinds_in(row) if (file := parse_class_path(kind)))


def name_file(path: Path) -> None:
    """Let a file be imported, in place of one of that name that a run records. Raises: ConfigError for no such file."""
    digest(path)
    _named.add(path.expanduser().resolve())


def recorded_files(row: Any) -> dict[str, str]:
    """The files that a mapping names, with their SHA-256: what a run records. Raises: ConfigError."""
    return {str(file.path): digest(_place(file.path)) for kind in kinds_in(row) if (file := parse_class_path(kind))}


def changed_files(recorded: Mapping[str, str]) -> list[str]:
    """The files that are not what a run recorded. Raises: ConfigError for one that is missing or out of bounds."""
    return [name for name, sha in recorded.items() if digest(_place(Path(name))) != sha]


def source(path: Path) -> str:
    """What stands in the file that a run records."""
    return _place(path).read_text(encoding="utf-8")


def load(kind: str, base: type[T]) -> type[T]:
    """The class that `my_scheme.py:Faded` names, from the file as it is now.

    Raises: ConfigError, with the file and line, where there is no such file or class, where importing it fails, or
    where a run folder named it that is not to be trusted with that.
    """
    file = parse_class_path(kind)
    assert file is not None
    path = _place(file.path)
    name = f"{_MODULE}{path.stem}_{digest(path)[:16]}"
    if name not in sys.modules:
        _execute(path, name)
    cls = getattr(sys.modules[name], file.class_name, None)
    if not (isinstance(cls, type) and issubclass(cls, base)):
        own = vars(sys.modules[name]).items()
        defined = [n for n, v in own if isinstance(v, type) and issubclass(v, base) and v.__module__ == name]
        known = f"it has {', '.join(defined)}" if defined else f"it has no class that extends {base.__name__}"
        raise ConfigError(
            f"{path} has no {base.__name__} {file.class_name!r}{nearest(file.class_name, defined)} ({known})"
        )
    return cls


def _execute(path: Path, name: str) -> None:
    spec = spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        line = f"{path}, line {error.lineno}: " if isinstance(error, SyntaxError) else place_of(error)
        del sys.modules[name]
        raise ConfigError(f"{line}{type(error).__name__}: {error}") from error


def _place(path: Path) -> Path:
    """Where a file that a configuration names is to be imported from. Raises: ConfigError where it may not be."""
    place = path.expanduser().resolve()
    if place in _named:
        return place
    if other := next((each for each in _named if each.name == path.name and not place.exists()), None):
        return other
    in_run_folder = any((parent / "run.json").exists() for parent in place.parents)
    if not place.exists() or (place.is_relative_to(Path.cwd().resolve()) and not in_run_folder):
        return place  # whoever reads it will say that there is none
    where = "is part of a run folder" if in_run_folder else "lies outside of the working directory"
    raise ConfigError(
        f"the run's {path.stem} is in {path}, which {where}: if you trust that file, name it with --scheme-file {path}"
    )


def place_of(error: BaseException) -> str:
    """`my_scheme.py, line 7: `, where an error arose in a scheme's file; empty where it did not."""
    files = {getattr(module, "__file__", None) for name, module in sys.modules.items() if name.startswith(_MODULE)}
    places = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    return f"{places[-1].filename}, line {places[-1].lineno}: " if places else ""


def digest(path: Path) -> str:
    """The SHA-256 of the file. Raises: ConfigError where there is none."""
    try:
        return hashlib.sha256(path.expanduser().read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}): give the path of the file as seen from here; "
            "that of a run that was trained elsewhere, with --scheme-file FILE"
        ) from error
