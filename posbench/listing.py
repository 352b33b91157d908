"""`posbench ls`: what has become of every run, and what there is of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from posbench.config import ConfigError
from posbench.runs import DIED, FINISHED, INTERRUPTED, STOPPED, UNREADABLE, Run, state_of
from posbench.runs.pack import PackedRun
from posbench.runs.results import ResultKey
from posbench.units import count_of, duration, short_bytes, short_count, short_length

FAILED = (DIED, UNREADABLE)
ALL_FINISHED, SOME_FAILED, SOME_UNFINISHED = 0, 1, 3  # exit statuses
_COUNTED = {STOPPED: "cut off", INTERRUPTED: "cut off", DIED: "failed"}
_VALIDATION = "validation"  # on its own text that of training, which every finished run has


@dataclass(frozen=True)
class Listed:
    """One run. None: not known."""

    path: str
    experiment: str
    scheme: str
    state: str  # finished | running | interrupted | stopped | died | unreadable
    seed: int | None = None
    reason: str | None = None  # why it stopped or died, or cannot be read
    share: float = 0.0  # of its steps that are done
    tokens: int | None = None  # trained on so far
    loss: float | None = None  # nats/token, of the last validation
    evaluated: Sequence[ResultKey] = ()
    num_bytes: int | None = None  # on disk; None: packed with others
    changed: float | None = None  # when it was last written to, seconds since 1970


def unpacked(runs: Sequence[Run]) -> Sequence[Run]:
    """The runs that are folders of their own; all of them where none is."""
    return [run for run in runs if not isinstance(run, PackedRun)] or runs


def exit_status(rows: Sequence[Listed]) -> int:
    """0 if all runs are finished, 1 if one failed or cannot be read, 3 if some are running or were interrupted."""
    states = {row.state for row in rows}
    return SOME_FAILED if states & {*FAILED} else ALL_FINISHED if states <= {FINISHED} else SOME_UNFINISHED


def show(rows: Sequence[Listed], console: Console) -> None:
    """A table for each experiment."""
    for experiment, group in groupby(rows, key=lambda row: row.experiment):
        members = list(group)
        states = [_COUNTED.get(row.state, row.state) for row in members]
        counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
        console.out(f"{experiment}, {count_of(len(members), 'run')}: {counts}", style="bold")
        console.print(_table(members))
        for row in members:
            if row.state in FAILED:
                why = row.reason or "run.json does not say why"
                why = why if row.path in why else f"{row.path}: {why}"
                console.out(why, style="red")


def listed(run: Run) -> Listed:
    """What the run's folder says, without checking weights or results."""
    experiment, scheme = str(run.path.parent.parent), run.path.parent.name
    try:
        manifest = run.manifest
        rows = [] if manifest.loss is not None else run.logged
        evaluated = [key for key in run.evaluated() if key.under or key.protocol != _VALIDATION]
    except (ConfigError, OSError) as error:
        return Listed(str(run.path), experiment, scheme, UNREADABLE, reason=str(error))
    last = rows[-1] if rows else {"step": 0, "tokens": 0}
    losses = [row["loss"] for row in rows if row["kind"] == "validation"]
    state = state_of(run)
    times = [file.stat().st_mtime for name in ("metrics.jsonl", "run.json") if (file := run.path / name).is_file()]
    return Listed(
        path=str(run.path),
        experiment=experiment,
        scheme=manifest.scheme,
        state=state,
        seed=manifest.seed,
        reason=manifest.reason,
        share=last["step"] / manifest.num_steps,
        tokens=manifest.tokens if state == FINISHED else last["tokens"],
        loss=manifest.loss if manifest.loss is not None or not losses else losses[-1],
        evaluated=evaluated,
        num_bytes=_num_bytes(run.path),
        changed=max(times, default=None),
    )


def _num_bytes(folder: Path) -> int | None:
    """Of the files below it. A trainer may take one away meanwhile."""
    if not folder.is_dir():
        return None
    total = 0
    for file in folder.rglob("*"):
        with suppress(OSError):
            total += file.lstat().st_size if file.is_file() else 0
    return total


def _table(rows: Sequence[Listed]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="", expand=True)
    for name in ("scheme", "seed", "state", "tokens", "loss", "size", "age"):
        table.add_column(name, justify="left" if name in ("scheme", "state") else "right", no_wrap=True)
    table.add_column("evaluated", ratio=1, no_wrap=True, overflow="ellipsis")
    for row in rows:
        cells = (
            row.scheme,
            "-" if row.seed is None else str(row.seed),
            row.state
            if row.state in (FINISHED, UNREADABLE)
            else f"{_COUNTED.get(row.state, row.state)} {row.share:.0%}",
            "-" if row.tokens is None else short_count(row.tokens),
            "-" if row.loss is None else f"{row.loss:.3f}",
            "-" if row.num_bytes is None else short_bytes(row.num_bytes),
            "-" if row.changed is None else duration(max(0.0, time.time() - row.changed)),
            _lengths(row.evaluated),
        )
        style = "red" if row.state in FAILED else "yellow" if row.state != FINISHED else ""
        table.add_row(*(Text(cell) for cell in cells), style=style)
    return table


def _lengths(evaluated: Sequence[ResultKey]) -> str:
    """`fixed 64-2k (9), validation 128 on pg19`: the shortest and the longest length, and how many results."""
    lengths: dict[str, list[int]] = {}
    for key in evaluated:
        lengths.setdefault(f"{key.protocol} {{}}" + (f" on {key.data}" if key.data else ""), []).append(key.length)
    parts = []
    for text, here in lengths.items():
        ends = "-".join(map(short_length, sorted({min(here), max(here)})))
        parts.append(text.format(ends) + (f" ({len(here)})" if len(here) > 1 else ""))
    return ", ".join(parts) or "-"
