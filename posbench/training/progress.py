"""What a person sees while a run trains: a bar on a terminal, plain lines in a log."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

SECONDS_BETWEEN_LINES = 10.0


class TrainingProgress:
    """Loss, tokens/s and time left of one run. `show` takes the rows of `metrics.jsonl`."""

    def __init__(self, console: Console, title: str, num_steps: int, done: int) -> None:
        self.console, self.title, self.num_steps = console, title, num_steps
        self.bar: Progress | None = None
        self.last_line = time.monotonic()
        self.began, self.done = time.monotonic(), done
        self.loss = self.speed = ""
        if console.is_terminal:
            self.bar = Progress(
                TextColumn("{task.description:<12}"),
                BarColumn(bar_width=None),
                TextColumn("{task.completed}/{task.total}"),
                TextColumn("{task.fields[loss]}"),
                TextColumn("{task.fields[speed]}"),
                TimeRemainingColumn(),
                console=console,
                transient=True,
            )
            self.task = self.bar.add_task(title, total=num_steps, completed=done, loss="", speed="")

    def __enter__(self) -> TrainingProgress:
        if self.bar:
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar:
            self.bar.stop()

    def advance(self, step: int) -> None:
        """`step` steps are done."""
        if self.bar:
            self.bar.update(self.task, completed=step)

    def show(self, row: dict[str, Any]) -> None:
        """A row was logged."""
        if row["kind"] == "train":
            self.loss = "loss -" if row["loss"] is None else f"loss {row['loss']:.3f}"
            self.speed = f"{_short(row['tokens_per_second'])} tok/s"
            if self.bar:
                self.bar.update(self.task, loss=self.loss, speed=self.speed)
            elif time.monotonic() - self.last_line >= SECONDS_BETWEEN_LINES:
                self.last_line = time.monotonic()
                rate = (row["step"] - self.done) / (self.last_line - self.began)
                left = (self.num_steps - row["step"]) / rate if rate > 0 else float("nan")
                self.console.print(
                    f"{self.title}: step {row['step']}/{self.num_steps}  {self.loss}  {self.speed}  {left:.0f} s left",
                    highlight=False,
                    markup=False,
                )


def _short(number: float) -> str:
    return f"{number / 1000:.1f}k" if number >= 1000 else f"{number:.0f}"
