"""Print results to standard output, for a person or as JSON, and progress to standard error."""

from __future__ import annotations

import errno
import io
import json
import math
import multiprocessing
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import cache
from typing import Any, Literal, NamedTuple

from rich.console import Console
from rich.table import Table

from posbench.config.units import duration, short_count

Say = Callable[[str], object]  # prints one line to the user

SECONDS_BETWEEN_LINES = 30.0  # between lines of progress if the output is not a terminal


def console(**options: Any) -> Console:
    """Return a rich console without markup and highlighting. Its `.out(line)` does not wrap lines."""
    return Console(markup=False, highlight=False, emoji=False, **options)


class _UnreadOutput(io.FileIO):
    """A file descriptor for output whose reader may go (`posbench train ... | head`): the rest is discarded."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            # EIO: the terminal is closed.
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            return len(data)


def write_unread_output() -> None:
    """Let this process work on after the reader of its output has gone, and replace what its encoding lacks."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        # A closed stream is None, and the streams of a notebook and of a test have no descriptor.
        try:
            descriptor = stream.fileno()
        except (AttributeError, OSError, ValueError):
            continue
        stream.flush()
        buffer = io.BufferedWriter(_UnreadOutput(descriptor, "w", closefd=False))
        # Each line at once: in a log, an hour of scoring would show nothing.
        text = io.TextIOWrapper(buffer, stream.encoding, "replace", line_buffering=True)
        setattr(sys, name, text)


def plain_table(*columns: str) -> Table:
    """Return an empty table without rules; column 1 is left-aligned, others right-aligned."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for n, column in enumerate(columns):
        side: Literal["left", "right"] = "right" if n else "left"
        table.add_column(column, justify=side, no_wrap=n > 0, overflow="fold")
    return table


def say(text: str) -> None:
    """Print a line to standard error."""
    console(stderr=True).out(text.rstrip())


def json_text(value: Any) -> str:
    """Return a value as JSON; NaN and infinity become null, paths become text."""
    return json.dumps(_plain(value), indent=2, allow_nan=False, default=str, ensure_ascii=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


@cache
def say_once(text: str) -> None:
    """Print a line to standard error, once per process."""
    say(text)


class SweepClock(NamedTuple):
    """The clock of a sweep, which estimates its time left during one of its runs, by tokens."""

    started: float  # when the sweep began, in seconds since 1970
    done: float  # tokens of the runs that finished before this group of parallel runs
    group: float  # work of this run and the runs in parallel with it
    total: float

    @classmethod
    def at(cls, number: int, work: Sequence[float], parallel: int, started: float) -> SweepClock:
        """Return the clock of run number `number` of a sweep in which `parallel` runs train at a time.

        Arguments: work, tokens of each run, 0 for runs already finished; started, the time at which the sweep began.
        """
        numbers = [n for n, tokens in enumerate(work) if tokens]  # runs that were not finished before the sweep
        # Runs begin in groups of `parallel`, and the time of a group is not known before it ends.
        first = sum(n < number for n in numbers) // parallel * parallel
        done, group = numbers[:first], numbers[first : first + parallel]
        return cls(started, sum(work[n] for n in done), sum(work[n] for n in group), sum(work))

    def left(self, fraction: float) -> str:
        """Return `, sweep 12 min left` when this run has done `fraction` of its work, or "" if unknown."""
        done = self.done + fraction * self.group
        if not done:
            return ""
        seconds = (time.time() - self.started) * (self.total - done) / done
        return f", sweep {duration(seconds)} left"


SWEEP_CLOCK: ContextVar[SweepClock | None] = ContextVar("SWEEP_CLOCK", default=None)


class RunBar:
    """Show loss, tokens/s and time left of one run: a bar on a terminal, lines in a log."""

    def __init__(self, console: Console, title: str, num_steps: int) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self.console, self.title, self.num_steps = console, title, num_steps
        self.clock = SWEEP_CLOCK.get()
        self.last_step, self.last_line = 0, time.monotonic()
        self.progress = Progress(
            TextColumn("{task.description:<18}", markup=False),
            BarColumn(bar_width=None),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            # Runs that train at the same time print lines too, because their bars would overwrite each other.
            disable=not console.is_terminal or multiprocessing.current_process().name != "MainProcess",
        )
        self.task = self.progress.add_task(title, total=num_steps, figures="")

    def __enter__(self) -> None:
        self.progress.start()

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def advance(self, step: int) -> None:
        """Move the bar to `step` finished steps."""
        self.progress.update(self.task, completed=step)

    def show(self, row: Mapping[str, Any]) -> None:
        """Show loss and speed from a training row of `metrics.jsonl`. Ignore other rows."""
        if row["kind"] != "train":
            return
        loss = "loss -" if row["loss"] is None else f"loss {row['loss']:.3f}"
        rate = row.get("tokens_per_second")
        speed = "first step" if rate is None else f"{short_count(rate)} tok/s"
        figures = f"{loss}  {speed}"
        step = row["step"]
        seconds = time.monotonic() - self.last_line
        sweep = self.clock.left(step / self.num_steps) if self.clock else ""
        self.progress.update(self.task, figures=figures + sweep)
        if self.progress.disable and seconds >= SECONDS_BETWEEN_LINES:
            remaining = (self.num_steps - step) * seconds / max(1, step - self.last_step)
            self.console.out(f"{self.title}: step {step}/{self.num_steps}  {figures}  {remaining:.0f} s left{sweep}")
            self.last_step, self.last_line = step, time.monotonic()
