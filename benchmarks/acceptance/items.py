"""What there is to do, and what came of it: items, and the file of results, a line each.

Standard library alone: the process that runs items imports no torch and takes nothing of the device.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DONE, FAILED, CUT_OFF = "done", "failed", "cut off"  # cut off: by the end of the time, and begun again the next time
PATIENCE, PATIENCE_ALONE = 4.0, 2.0  # times what an item is expected to take, and half a minute: then it is killed


@dataclass(frozen=True)
class Item:
    """One thing to do, in a process of its own: `python -m MODULE WORDS`, which prints its result as lines of JSON.

    A nonzero exit status is a failure. What was printed before it, or before the process was killed, is kept.
    """

    name: str  # unique in its stage
    kind: str  # items of one kind take as long as their `seconds` say, times a factor that they share
    module: str
    words: tuple[str, ...] = ()
    seconds: float = 30.0  # that it is expected to take, before any of its kind was measured
    cores: int = 1  # of those that items share: so many run side by side
    alone: bool = False  # it measures speed: nothing may run beside it
    after: tuple[str, ...] = ()  # items that must have ended before, whatever came of them
    is_of_machine: bool = False  # it prepares a machine: done once on each, for all stages

    @property
    def limit(self) -> float:
        """Seconds after which it is killed."""
        return 30 + (PATIENCE_ALONE if self.alone else PATIENCE) * self.seconds


class Results:
    """The results of one stage, the newest of each item."""

    def __init__(self, file: Path) -> None:
        """A last line that was cut off is passed over."""
        self.file = file
        self.rows: dict[str, dict[str, Any]] = {row["item"]: row for row in _lines(file)}

    def add(self, item: Item, status: str, seconds: float, code: str, **more: Any) -> dict[str, Any]:
        """Append a result, on the disk before this returns. Arguments: code, a digest of the code that it is of."""
        row = {"item": item.name, "kind": item.kind, "status": status, "seconds": round(seconds, 1)}
        row |= {"expected": item.seconds, "code": code, **more}
        self.rows[item.name] = row
        cut_off = self.file.exists() and not self.file.read_bytes().endswith(b"\n")
        with self.file.open("a", encoding="utf-8") as opened:
            opened.write("\n" * cut_off + json.dumps(row) + "\n")
            opened.flush()
            os.fsync(opened.fileno())
        return row

    def is_due(self, item: Item, code: str) -> bool:
        """Whether it has no result yet, was cut off, or failed under other code."""
        status, of = (self.rows.get(item.name, {}).get(key) for key in ("status", "code"))
        return status in (None, CUT_OFF) or (status == FAILED and of != code)

    def expected(self, item: Item) -> float:
        """Seconds that an item will take, by those of its kind that are done, and longer than when it was cut off."""
        done = [row for row in self.rows.values() if row["kind"] == item.kind and row["status"] == DONE]
        seconds = item.seconds
        if done:
            seconds *= statistics.median(row["seconds"] / row["expected"] for row in done)
        before = self.rows.get(item.name)
        return max(seconds, 1.5 * before["seconds"]) if before and before["status"] == CUT_OFF else seconds

    def result(self, name: str) -> dict[str, Any]:
        """What an item printed; nothing where it has no result."""
        return dict(self.rows.get(name, {}).get("result", {}))


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    if file.exists():
        for line in file.read_text(encoding="utf-8").splitlines():
            try:
                yield dict(json.loads(line))
            except ValueError:
                continue


def run_part(parts: Mapping[str, Callable[..., None]]) -> None:
    """What the process of an item does: the part of a stage that its first word names, with the others."""
    parts[sys.argv[1]](*sys.argv[2:])


def emit(**figures: Any) -> None:
    """Print a part of an item's result, from its process."""
    print(json.dumps(figures), flush=True)
