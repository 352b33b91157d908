"""Load a class from a Python file of the user, such as `my_scheme.py:Faded` or `my_task.py:Sums`.

The words of a command may name any file. A file that is recorded in a run or a pack is imported only if it was named on
the command line, if a run folder in `runs` of the working directory recorded it (its training named it), or if it is
below the working directory. A file in a run folder is imported only if it was named.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import traceback
from collections.abc import Iterable, Mapping
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml

from posbench.config import ConfigError, nearest

T = TypeVar("T")

_MODULE = "posbench_scheme_"  # prefix of the names of modules that are made from such files
_NAMING = ("kind", "task", "optimizer")  # keys of a mapping that may name a class in a file
_EXAMPLES = {"scheme": "my_scheme.py:Faded", "data": "my_task.py:Sums"}
_WITH_OPTIONS = re.compile(r"(.+\.py:\w+)((?::\w+=[^:]*)*)")  # a class in a file, and its options
_OTHER_DTYPE = re.compile(r"dtype|scalar type|BFloat16")  # in torch's errors about numbers of two formats
_trusted: set[Path] = set()  # files that may be imported, because the words of this process named them
_stand_ins: set[Path] = set()  # files given by --scheme-file


class SchemeFile(NamedTuple):
    """A Python file, with its path as it was typed, and the name of a class in it."""

    path: Path
    class_name: str


def parse_class_path(kind: str) -> SchemeFile | None:
    """Return the file and the class of `my_scheme.py:Faded`, or None for a registered kind."""
    path, _, class_name = kind.rpartition(":")
    if not path.endswith(".py"):
        return None
    return SchemeFile(Path(path).expanduser(), class_name)


def with_options(word: str) -> tuple[str, dict[str, Any]] | None:
    """Return the class and the options of `my_protocol.py:Edges:width=8:steps=2`, or None if it names no file."""
    match = _WITH_OPTIONS.fullmatch(word)
    if match is None:
        return None
    pairs = [option.partition("=") for option in match[2].split(":")[1:]]
    return match[1], {key: yaml.safe_load(value) for key, _, value in pairs}


def as_recorded(kind: Any) -> Any:
    """Return a kind with its file's path as runs record it; other kinds stay as they are."""
    file = parse_class_path(kind) if isinstance(kind, str) else None
    # A registered kind has no file.
    if file is None:
        return kind
    path = Path(os.path.abspath(file.path))  # noqa: PTH100 (links are kept as they were typed)
    # Relative to the working directory if the file is in it.
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return f"{path.as_posix()}:{file.class_name}"


def snake_case(class_name: str) -> str:
    """Return the name of a scheme for its class: `WindowedNope` -> `windowed_nope`, `CARoPE` -> `carope`."""
    # Two small letters make a word, so that the field's acronyms stay whole.
    return re.sub(
        r"(?<=[A-Za-z0-9])(?=[A-Z][a-z]{2})|(?<=[a-z]{2})(?=[A-Z])|(?<=[0-9])(?=[A-Z])", "_", class_name
    ).lower()


def is_class_path(kind: object) -> bool:
    """Return whether a kind names a file: `my_scheme.py:Faded`, or `my_scheme.py` without a class."""
    return isinstance(kind, str) and (kind.endswith(".py") or parse_class_path(kind) is not None)


def row_of_file(kind: str, group: str = "scheme") -> dict[str, str]:
    """Return the mapping for `my_scheme.py:Faded`, without reading it: `{name: faded, kind: my_scheme.py:Faded}`.

    Arguments: group, `scheme` or `data`, which gives `{name: sums, source: task, task: my_task.py:Sums}`. Raises:
    ConfigError if the file does not exist, or if no class is named.
    """
    # Without a class there is no colon, or nothing after it.
    file = parse_class_path(kind) or SchemeFile(Path(kind.rstrip(":")).expanduser(), "")
    if not file.path.is_file():
        raise ConfigError(
            f"{group}={kind}: there is no file {file.path} (from {Path.cwd()}): "
            f"give the path of a Python file and a class in it, such as {group}={_EXAMPLES[group]}"
        )
    if not file.class_name:
        raise ConfigError(f"{group}={kind} names no class: give {group}={file.path}:Name")
    name, place = snake_case(file.class_name), f"{file.path}:{file.class_name}"
    if group == "scheme":
        return {"name": name, "kind": place}
    return {"name": name, "source": "task", "task": place}


def kinds_in(row: Any) -> list[str]:
    """Return the classes `FILE.py:Name` that a scheme or task names, also in its lists."""
    kinds: list[str] = []
    # A list or a mapping may hold further schemes, at any depth.
    if isinstance(row, Mapping):
        class_paths = [row[key] for key in _NAMING if isinstance(row.get(key), str)]
        kinds = [kind for kind in class_paths if parse_class_path(kind) is not None]
        row = list(row.values())
    if isinstance(row, list):
        for value in row:
            kinds += kinds_in(value)
    return kinds


def _files_in(row: Any) -> list[Path]:
    parsed = map(parse_class_path, kinds_in(row))
    return [file.path for file in parsed if file]


def trust_files(row: Any) -> None:
    """Allow the import of the files that a scheme or task names. Call this only for words that the user typed."""
    _trusted.update(path.resolve() for path in _files_in(row))


def trust_file(path: Path) -> None:
    """Allow the import of `path`, and of a file of this name that a run recorded and that no longer exists.

    Raises: ConfigError if the file cannot be read.
    """
    # A missing file is refused here, and not when it is imported.
    digest(path)
    _trusted.add(path.expanduser().resolve())
    _stand_ins.add(path.expanduser().resolve())


def trust_recorded(recorded: Iterable[str]) -> None:
    """Allow the import of files that a run of the user recorded, except files in run folders."""
    places = [Path(name).expanduser().resolve() for name in recorded]
    _trusted.update(place for place in places if place.is_file() and not _is_in_run_folder(place))


def recorded_files(row: Any) -> dict[str, str]:
    """Return {path: SHA-256} of the Python files that a scheme or task names.

    Raises: ConfigError if a file is missing or not trusted.
    """
    return {str(path): digest(_place(path)) for path in _files_in(row)}


def changed_files(recorded: Mapping[str, str]) -> list[str]:
    """Return the paths in `recorded` ({path: SHA-256}) whose files have changed, or of the files in their place.

    Raises: ConfigError if a file is missing or not trusted.
    """
    changed = []
    for name, sha in recorded.items():
        place = _place(Path(name))
        if digest(place) != sha:
            changed.append(name if place == Path(name).expanduser().resolve() else str(place))
    return changed


def source(path: Path) -> str:
    """Return the text of a Python file that a run recorded. Raises: ConfigError if it is not trusted."""
    return _place(path).read_text(encoding="utf-8")


def load(kind: str, base: type[T]) -> type[T]:
    """Import and return the class that `my_scheme.py:Faded` names, from the file as it is now.

    Raises: ConfigError with file and line if there is no such file or class, if it fails to be imported, or is not
    trusted.
    """
    file = parse_class_path(kind)
    assert file is not None
    path = _place(file.path)
    # The digest is part of the name, so a file that has changed is imported again.
    name = f"{_MODULE}{path.stem}_{digest(path)[:16]}"
    if name not in sys.modules:
        _execute(path, name)
    cls = getattr(sys.modules[name], file.class_name, None)
    if not (isinstance(cls, type) and issubclass(cls, base)):
        values = vars(sys.modules[name]).items()
        defined = [n for n, v in values if isinstance(v, type) and issubclass(v, base) and v.__module__ == name]
        known = f"it has no class that extends {base.__name__}"
        if defined:
            known = f"it has {', '.join(defined)}"
        raise ConfigError(
            f"{path} has no {base.__name__} {file.class_name!r}{nearest(file.class_name, defined)} ({known})"
        )
    return cls


def _execute(path: Path, name: str) -> None:
    """Run a file as the module `name`. Raises: ConfigError, with the line, if that fails."""
    spec = spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    # Registered before it runs, as dataclasses need.
    module = sys.modules[name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        text = explained(error)
        if isinstance(error, SyntaxError):
            text = f"{path}, line {error.lineno}: {text}"
        # A module that failed must not be found by the next import.
        del sys.modules[name]
        raise ConfigError(text) from error


def _place(path: Path) -> Path:
    """Return the resolved path of a file that a run recorded, or of the file that the user named in its place.

    A missing file is not refused here. Raises: ConfigError if the file is not trusted.
    """
    # Only files that the user named, or that are below the working directory and not in a run folder, may run.
    place = path.expanduser().resolve()
    if place in _trusted:
        return place
    # The run was trained elsewhere: a file of the same name that the user named for it stands in.
    if not place.exists():
        for file in sorted(_stand_ins & _trusted):
            if file.name == path.name:
                return file
    in_run_folder = _is_in_run_folder(place)
    if not place.exists() or (place.is_relative_to(Path.cwd().resolve()) and not in_run_folder):
        return place  # a missing file is refused when it is read
    reason = "is part of a run folder" if in_run_folder else "is outside the working directory"
    raise ConfigError(
        f"the run's {path.stem} is in {path}, which {reason}: if you trust that file, name it with --scheme-file {path}"
    )


def _is_in_run_folder(place: Path) -> bool:
    return any((parent / "run.json").exists() for parent in place.parents)


def place_of(error: BaseException) -> str:
    """Return `my_scheme.py, line 7: ` if the error arose in a file of the user, else ""."""
    # Only frames in the user's files tell the user something.
    files = {getattr(module, "__file__", None) for name, module in sys.modules.items() if name.startswith(_MODULE)}
    places = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    if not places:
        return ""
    return f"{places[-1].filename}, line {places[-1].lineno}: "


def explained(error: BaseException) -> str:
    """Return the kind and the text of an error, after its place in a file of the user, if it arose there."""
    text = f"{place_of(error)}{type(error).__name__}: {error}"
    # The commonest one: a parameter in float32 meets hidden states in bfloat16.
    if place_of(error) and _OTHER_DTYPE.search(str(error)):
        text += " (inputs may be bfloat16 or float64: convert them, such as x.to(self.w.dtype), with a parameter w)"
    return text


def digest(path: Path) -> str:
    """Return the SHA-256 of a file. Raises: ConfigError if it cannot be read."""
    try:
        return hashlib.sha256(path.expanduser().read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}): give its path from the working directory; for a run that "
            "was trained elsewhere, name it with --scheme-file FILE"
        ) from error
