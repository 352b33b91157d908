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
    """Return the runs that are in a run folder and not in a pack (zip), or all runs if every one is in a pack."""
    return [run for run in runs if not isinstance(run, PackedRun)] or runs


def exit_status(rows: Sequence[RunSummary]) -> int:
    """Return 0 if all runs are finished, 1 if one died or is unreadable, else 3 (running, stopped or interrupted).

    Arguments: rows, the states of the runs.
    """
    states = {row.state for row in rows}
    if states & {*FAILED}:
        return 1
    return 0 if states <= {FINISHED} else 3


def as_data(rows: Sequence[RunSummary]) -> list[dict[str, Any]]:
    """Return what the table of `show` says, a dict per run, for scripts; times are seconds since 1970."""
    data = []
    for row in rows:
        path = row.run.path
        experiment, scheme, seed = path.parts[-3:]
        named = {"experiment": experiment, "scheme": scheme, "seed": int(seed.removeprefix("seed=")), "path": path}
        figures = {name: getattr(row, name) for name in ("state", "reason", "share", "tokens", "loss", "changed")}
        evaluated = []
        for key in row.evaluated:
            result = {"protocol": key.protocol, "length": key.length, "options": list(key.options), "data": key.data}
            evaluated.append(result)
        data.append({**named, **figures, "evaluated": evaluated})
    return data


def show(rows: Sequence[RunSummary], console: Console) -> None:
    """Print a table for each experiment, and why runs failed.

    Arguments: rows, the states of the runs, sorted by experiment.
    """
    for experiment, group in groupby(rows, key=lambda row: row.run.path.parents[1]):
        members = list(group)
        states = [_STATE_WORDS.get(row.state, row.state) for row in members]
        counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
        console.out(f"{experiment}, {count_of(len(members), 'run')}: {counts}", style="bold")
        console.print(_table(members))
        for row in members:
            if row.state in FAILED:
                console.out(f"{row.run.path}: {row.reason}", style="red")


def summarise(run: Run) -> RunSummary:
    """Return a run's state, found from its manifest, metrics and file names, without checking weights or results."""
    try:
        manifest = run.manifest
        rows = [] if manifest.loss is not None else run.logged
        evaluated = [key for key in run.evaluated() if key.under or key.protocol != _VALIDATION]
    except (ConfigError, OSError) as error:
        return RunSummary(run, UNREADABLE, str(error))
    state, last = state_of(run), rows[-1] if rows else {"step": 0, "tokens": 0}
    losses = [row["loss"] for row in rows if row["kind"] == "validation"]
    times = [file.stat().st_mtime for name in ("metrics.jsonl", "run.json") if (file := run.path / name).is_file()]
    return RunSummary(
        run,
        state,
        manifest.reason,
        share=1.0 if state == FINISHED else last["step"] / manifest.num_steps,  # a subject has no steps
        tokens=(manifest.tokens or None) if state == FINISHED else last["tokens"],  # a subject's are not known
        loss=losses[-1] if losses else manifest.loss,
        evaluated=evaluated,
        changed=max(times, default=None),
    )


def _table(rows: Sequence[RunSummary]) -> Table:
    table = plain_table("scheme", "seed", "state", "tokens", "loss", "age")
    table.add_column("evaluated", ratio=1, no_wrap=True, overflow="ellipsis")
    table.expand = True
    for row in rows:
        is_whole = row.state in (FINISHED, UNREADABLE)
        cells = (
            row.run.path.parent.name,
            row.run.path.name.removeprefix("seed="),
            row.state if is_whole else f"{_STATE_WORDS.get(row.state, row.state)} {row.share:.0%}",
            "-" if row.tokens is None else short_count(row.tokens),
            "-" if row.loss is None else f"{row.loss:.3f}",
            "-" if row.changed is None else duration(max(0.0, time.time() - row.changed)),
            _lengths(row.evaluated),
        )
        style = "" if row.state == FINISHED else "yellow"
        if row.state in FAILED:
            style = "red"
        table.add_row(*map(Text, cells), style=style)
    return table


def _lengths(evaluated: Sequence[ResultKey]) -> str:
    """Return each evaluation protocol's shortest and longest length and their number, as text.

    For example `fixed 64-2k (9), validation 128 on pg19`. Arguments: evaluated, the keys of a run's stored results.
    """
    lengths: dict[str, list[int]] = {}
    for key in evaluated:
        template = f"{key.protocol} {{}} on {key.data}" if key.data else f"{key.protocol} {{}}"
        lengths.setdefault(template, []).append(key.length)
    parts = []
    for template, evaluated_lengths in lengths.items():
        span = "-".join(map(short_length, sorted({min(evaluated_lengths), max(evaluated_lengths)})))
        part = template.format(span)
        parts.append(f"{part} ({len(evaluated_lengths)})" if len(evaluated_lengths) > 1 else part)
    return ", ".join(parts) or "-"
