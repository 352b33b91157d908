"""List the state of every run, its loss, and its evaluated lengths (`posbench ls`)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from posbench.config import ConfigError
from posbench.config.units import count_of, duration, short_count, short_length
from posbench.runs import DIED, FINISHED, INTERRUPTED, STOPPED, UNREADABLE, Run, state_of
from posbench.runs.pack import PackedRun
from posbench.runs.results import ResultKey
from posbench.system.console import plain_table

FAILED = (DIED, UNREADABLE)
_STATE_WORDS = {STOPPED: "cut off", INTERRUPTED: "cut off", DIED: "failed"}
_VALIDATION = "validation"  # not listed for the run's own text, because every finished run has it


class RunSummary(NamedTuple):
    """The state of a run, for `posbench ls`. A field is None if its value is not known."""

    run: Run
    state: str  # finished | running | interrupted | stopped | died | unreadable
    reason: str | None = None  # why it stopped or died, or cannot be read
    share: float = 0.0  # share of its steps that are done
    tokens: int | None = None  # tokens trained on so far
    loss: float | None = None  # nats/token, of the last validation
    evaluated: Sequence[ResultKey] = ()
    changed: float | None = None  # when it was last written to, seconds since 1970


def without_packed(runs: Sequence[Run]) -> Sequence[Run]:
    """Return the runs that are in a run folder, or all runs if every one is in a pack (zip)."""
    # Only packed runs: then there is nothing else to show.
    return [run for run in runs if not isinstance(run, PackedRun)] or runs


def exit_status(rows: Sequence[RunSummary]) -> int:
    """Return 0 if all runs are finished, 1 if one died or is unreadable, else 3 (running, stopped or interrupted)."""
    # A failed run decides, even if another run is not finished.
    states = {row.state for row in rows}
    if states & {*FAILED}:
        return 1
    return 0 if states <= {FINISHED} else 3


def as_data(rows: Sequence[RunSummary]) -> list[dict[str, Any]]:
    """Return what the table of `show` says but the evaluated lengths, a dict per run; times are seconds since 1970."""
    data = []
    for row in rows:
        path = row.run.path
        # A run is in <experiment>/<scheme>/seed=<number>.
        experiment, scheme, folder = path.absolute().parts[-3:]
        number = folder.removeprefix("seed=")
        seed = int(number) if number.isdecimal() else None  # of a copy with another name
        columns = {"experiment": experiment, "scheme": scheme, "seed": seed, "path": path}
        figures = {name: getattr(row, name) for name in ("state", "reason", "share", "tokens", "loss", "changed")}
        data.append({**columns, **figures})
    return data


def show(rows: Sequence[RunSummary], console: Console) -> None:
    """Print a table for each experiment, and why runs failed. `rows` are sorted by experiment."""
    for experiment, group in groupby(rows, key=lambda row: row.run.experiment_folder):
        members = list(group)
        states = [_STATE_WORDS.get(row.state, row.state) for row in members]
        counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
        console.out(f"{experiment}, {count_of(len(members), 'run')}: {counts}", style="bold")
        console.print(_table(members))
        for row in members:
            if row.state in FAILED:
                console.out(f"{row.run.path}: {row.reason}", style="red")


def summarise(run: Run) -> RunSummary:
    """Return a run's state by manifest, metrics and file names, without checking weights or results."""
    try:
        manifest = run.manifest
        # The manifest of a finished run has the loss, so its log need not be read.
        rows = [] if manifest.loss is not None else run.logged
        evaluated = [key for key in run.evaluated() if key.under or key.protocol != _VALIDATION]
    except (ConfigError, OSError) as error:
        return RunSummary(run, UNREADABLE, str(error))
    state = state_of(run)
    if state == FINISHED:
        share, tokens = 1.0, manifest.tokens or None  # a subject has no steps, and its tokens are not known
    else:
        # A run without a line in its log has taken no step.
        last = rows[-1] if rows else {"step": 0, "tokens": 0}
        share, tokens = last["step"] / manifest.num_steps, last["tokens"]
    losses = [row["loss"] for row in rows if row["kind"] == "validation"]
    files = [run.path / "metrics.jsonl", run.path / "run.json"]
    times = [file.stat().st_mtime for file in files if file.is_file()]
    return RunSummary(
        run,
        state,
        manifest.reason,
        share=share,
        tokens=tokens,
        loss=losses[-1] if losses else manifest.loss,
        evaluated=evaluated,
        changed=max(times, default=None),
    )


def _table(rows: Sequence[RunSummary]) -> Table:
    table = plain_table("scheme", "seed", "state", "tokens", "loss", "age")
    table.add_column("evaluated", ratio=1, no_wrap=True, overflow="ellipsis")
    table.expand = True
    for row in rows:
        state, tokens, loss, age = row.state, "-", "-", "-"
        if state not in (FINISHED, UNREADABLE):
            state = f"{_STATE_WORDS.get(state, state)} {row.share:.0%}"
        if row.tokens is not None:
            tokens = short_count(row.tokens)
        if row.loss is not None:
            loss = f"{row.loss:.3f}"
        if row.changed is not None:
            age = duration(max(0.0, time.time() - row.changed))
        scheme, seed = row.run.path.parent.name, row.run.path.name.removeprefix("seed=")
        cells = (scheme, seed, state, tokens, loss, age, _lengths(row.evaluated))
        style = "" if row.state == FINISHED else "yellow"
        if row.state in FAILED:
            style = "red"
        table.add_row(*map(Text, cells), style=style)
    return table


def _lengths(evaluated: Sequence[ResultKey]) -> str:
    lengths: dict[tuple[str, str | None], list[int]] = {}
    for key in evaluated:
        lengths.setdefault((key.protocol, key.data), []).append(key.length)
    parts = []
    for (protocol, data), of_protocol in lengths.items():
        # One length is its own shortest and longest.
        ends = sorted({min(of_protocol), max(of_protocol)})
        part = f"{protocol} {'-'.join(map(short_length, ends))}"
        if data:
            part += f" on {data}"
        if len(of_protocol) > 1:
            part += f" ({len(of_protocol)})"
        parts.append(part)
    return ", ".join(parts) or "-"
