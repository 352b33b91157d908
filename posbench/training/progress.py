"""What a person sees while a run trains: a bar on a terminal, plain lines in a log or where runs train side by side."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from posbench.units import short_count

SECONDS_BETWEEN_LINES = 30.0


class TrainingProgress:
    """Loss, tokens/s and time left of one run. `show` takes the rows of `metrics.jsonl`."""

    def __init__(self, console: Console, title: str, num_steps: int) -> None:
        self.console, self.title, self.num_steps = console, title, num_steps
        self.bar = Progress(
            TextColumn("{task.description:<18}", markup=False),
            BarColumn(bar_width=None),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[loss]}"),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal or _is_worker(),
        )
        self.done, self.began, self.last_line = 0, time.monotonic(), time.monotonic()

    @contextmanager
    def shown(self, done: int) -> Iterator[None]:
        """Show it, from `done` steps on, until the block ends."""
        self.done, self.began, self.last_line = done, time.monotonic(), time.monotonic()
        self.task = self.bar.add_task(self.title, total=self.num_steps, completed=done, loss="", speed="")
        with self.bar:
            yield

    def advance(self, step: int) -> None:
        """`step` steps are done."""
        if not self.bar.disable:
            self.bar.update(self.task, completed=step)

    def show(self, row: dict[str, Any]) -> None:
        """A row was logged."""
        if row["kind"] != "train":
            return
        loss = "loss -" if row["loss"] is None else f"loss {row['loss']:.3f}"
        rate = row.get("tokens_per_second")
        speed = "first step" if rate is None else f"{short_count(rate)} tok/s"
        if not self.bar.disable:
            self.bar.update(self.task, loss=loss, speed=speed)
        elif time.monotonic() - self.last_line >= SECONDS_BETWEEN_LINES:
            self.last_line = time.monotonic()
            rate = (row["step"] - self.done) / (self.last_line - self.began)
            left = (self.num_steps - row["step"]) / rate if rate > 0 else float("nan")
            line = f"{self.title}: step {row['step']}/{self.num_steps}  {loss}  {speed}  {left:.0f} s left"
            self.console.out(line)


def _is_worker() -> bool:
    """Whether this process is one of several of a sweep, whose bars would overwrite each other."""
    return multiprocessing.current_process().name != "MainProcess"
