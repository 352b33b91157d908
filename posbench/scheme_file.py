"""A scheme of one's own: a class in a Python file, named `my_scheme.py:Faded` where a scheme's name may stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple


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
