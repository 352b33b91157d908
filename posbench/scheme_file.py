"""A scheme of one's own: a class in a Python file, named `my_scheme.py:Faded` where a scheme's name may stand."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

from posbench.config import ConfigError, nearest


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


def names_file(kind: object) -> bool:
    """Whether a kind means a file of one's own: `my_scheme.py:Faded`, or `my_scheme.py` without its class."""
    return isinstance(kind, str) and (kind.endswith(".py") or split(kind) is not None)


def row_of_file(kind: str) -> dict[str, str]:
    """The row that `my_scheme.py:Faded` stands for: `{name: faded, kind: my_scheme.py:Faded}`, with `~` expanded.

    The file is read and not imported. Raises: ConfigError where there is no such file, or no such class in it.
    """
    file = split(kind) or SchemeFile(Path(kind.rstrip(":")).expanduser(), "")
    if not file.path.is_file():
        beside = [path.name for path in file.path.parent.glob("*.py")]
        raise ConfigError(
            f"scheme={kind}: there is no file {file.path}{nearest(file.path.name, beside)} (seen from {Path.cwd()}): "
            "give the path of a Python file and a class in it, such as scheme=my_scheme.py:Faded"
        )
    try:
        tree = ast.parse(file.path.read_bytes())
    except (SyntaxError, ValueError) as error:  # ValueError: a null byte
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise ConfigError(f"{file.path}{line}: {getattr(error, 'msg', error)}; fix that line") from error
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    imported = [
        name.asname or name.name for node in tree.body if isinstance(node, ast.ImportFrom) for name in node.names
    ]
    if file.class_name not in [*classes, *imported]:
        lacks = f"has no class {file.class_name!r}" if file.class_name else "has no class named"
        raise ConfigError(
            f"scheme={kind} {lacks}{nearest(file.class_name, classes)} (it defines {', '.join(classes) or 'none'}): "
            f"give scheme={file.path}:Name"
        )
    return {"name": snake_case(file.class_name), "kind": f"{file.path}:{file.class_name}"}
