"""What is compiled: a scheme in a model, a number format and a length; and the file of results, a line each."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TOKENS = 16384  # a step, shared out over windows


@dataclass(frozen=True)
class Cell:
    """One thing to compile."""

    scheme: str
    model: str
    dtype: str  # bfloat16 | float32
    length: int  # tokens of a window

    @property
    def batch(self) -> int:
        """Windows a step."""
        return max(1, TOKENS // self.length)

    def __str__(self) -> str:
        return f"{self.scheme} {self.model} {self.dtype} {self.length}"


def cells(schemes: Iterable[str], models: Iterable[str], dtypes: Iterable[str], lengths: Iterable[int]) -> list[Cell]:
    """All combinations; schemes change fastest, so that a table that was cut off has every scheme of some columns."""
    schemes = list(schemes)
    return [
        Cell(scheme, model, dtype, length)
        for length in lengths
        for dtype in dtypes
        for model in models
        for scheme in schemes
    ]


def results(file: Path) -> dict[Cell, dict[str, Any]]:
    """Cell -> its newest result. A last line that was cut off is passed over."""
    return dict(_lines(file))


def _lines(file: Path) -> Iterator[tuple[Cell, dict[str, Any]]]:
    if not file.exists():
        return
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        yield Cell(**row["cell"]), row


def add(file: Path, cell: Cell, row: dict[str, Any]) -> None:
    """Append a result."""
    line = json.dumps({"cell": asdict(cell), **row}) + "\n"
    cut_off = file.exists() and not file.read_bytes().endswith(b"\n")
    with file.open("a", encoding="utf-8") as opened:
        opened.write("\n" * cut_off + line)
