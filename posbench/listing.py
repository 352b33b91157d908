"""`posbench ls`: what has become of every run, and what there is of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posbench.config import ConfigError
from posbench.machine.lock import holder_of
from posbench.runs import DIED, FINISHED, INTERRUPTED, RUNNING, STOPPED, UNREADABLE, Run, state_of
from posbench.runs.pack import PackedRun
from posbench.runs.results import ResultKey
from posbench.units import duration, short_bytes, short_count, short_length

if TYPE_CHECKING:
    from rich.console import Console

FAILED = (DIED, UNREADABLE)
ALL_FINISHED, SOME_FAILED, SOME_UNFINISHED = 0, 1, 3  # exit statuses
_COUNTED = {STOPPED: "cut off", INTERRUPTED: "cut off", DIED: "failed"}
_VALIDATION = "validation"  # on its own text that of training, which every finished run has


@dataclass(frozen=True)
class Evaluated:
    """One result."""

    length: int  # tokens
    under: tuple[str, ...] = ()  # words that held at evaluation alone; `data=<name>`: on that text


@dataclass(frozen=True)
class Listed:
    """One run. None: not known."""

    path: str
    experiment: str
    scheme: str
    seed: int | None
    state: str  # finished | running | interrupted | stopped | died | unreadable
    reason: str | None = None  # why it stopped or died, or cannot be read
    process: str | None = None  # that trains it: `1234 on host`
    step: int | None = None  # of the last line of its metrics
    num_steps: int | None = None
    tokens: int | None = None  # trained on so far
    loss: float | None = None  # nats/token, of the last validation
    evaluated: dict[str, list[Evaluated]] = field(default_factory=dict)  # by protocol
    num_bytes: int | None = None  # on disk; None: packed with others
    changed: str | None = None  # when it ended or was last written to, ISO 8601


def unpacked(runs: Sequence[Run]) -> Sequence[Run]:
    """The runs that are folders of their own; all of them where none is."""
    return [run for run in runs if not isinstance(run, PackedRun)] or runs


def list_runs(runs: Sequence[Run]) -> list[Listed]:
    """What the folders say, without checking weights or results."""
    return [_listed(run) for run in runs]


def exit_status(rows: Sequence[Listed]) -> int:
    """0 if all runs are finished, 1 if one failed or cannot be read, 3 if some are running or were interrupted."""
    states = {row.state for row in rows}
    return SOME_FAILED if states & {*FAILED} else ALL_FINISHED if states <= {FINISHED} else SOME_UNFINISHED


def as_json(rows: Sequence[Listed]) -> str:
    """A list of objects, one a run, with the names of `Listed`."""
    return json.dumps([asdict(row) for row in rows], indent=2)


def show(rows: Sequence[Listed], console: Console) -> None:
    """A table for each experiment."""
    for experiment, group in groupby(rows, key=lambda row: row.experiment):
        members = list(group)
        title = f"{experiment}, {_counts(members)}"
        console.out(title, style="bold")
        console.print(_table(members))
        for row in members:
            if row.state in FAILED:
                why = row.reason or "run.json does not say why"
                why = why if row.path in why else f"{row.path}: {why}"
                console.out(why, style="red")


def _listed(run: Run) -> Listed:
    experiment, scheme = str(run.path.parent.parent), run.path.parent.name
    state = state_of(run)
    try:
        manifest = run.manifest
        last, loss = _progress(run, manifest.loss)
        evaluated = _evaluated(run)
    except (ConfigError, OSError) as error:
        number = run.path.name.removeprefix("seed=")
        seed = int(number) if number.isdecimal() else None
        return Listed(str(run.path), experiment, scheme, seed, UNREADABLE, reason=str(error))
    finished = state == FINISHED
    return Listed(
        path=str(run.path),
        experiment=experiment,
        scheme=manifest.scheme,
        seed=manifest.seed,
        state=state,
        reason=manifest.reason,
        process=_process(run) if state == RUNNING else None,
        step=manifest.num_steps if finished else last.get("step", 0),
        num_steps=manifest.num_steps,
        tokens=manifest.tokens if finished else last.get("tokens", 0),
        loss=loss,
        evaluated=evaluated,
        num_bytes=_num_bytes(run.path),
        changed=manifest.ended if finished and manifest.ended else _last_written(run.path),
    )


def _progress(run: Run, final_loss: float | None) -> tuple[dict[str, Any], float | None]:
    """The last line of the metrics, and the last loss of a validation."""
    if final_loss is not None:
        return {}, final_loss
    rows = run.logged
    losses = [row.get("loss") for row in rows if row.get("kind") == "validation"]
    return (rows[-1] if rows else {}), (losses[-1] if losses else None)


def _process(run: Run) -> str | None:
    holder = holder_of(run.path)
    return f"{holder.get('process', '?')} on {holder.get('host', '?')}" if holder else None


def _evaluated(run: Run) -> dict[str, list[Evaluated]]:
    keys = [key for key in run.evaluated() if key.under or key.protocol != _VALIDATION]
    groups = groupby(keys, key=lambda each: each.protocol)
    return {name: [Evaluated(each.length, each.under) for each in group] for name, group in groups}


def _num_bytes(folder: Path) -> int | None:
    """Of the files below it. A trainer may take one away meanwhile."""
    if not folder.is_dir():
        return None
    total = 0
    for file in folder.rglob("*"):
        with suppress(OSError):
            total += file.lstat().st_size if file.is_file() else 0
    return total


def _last_written(folder: Path) -> str | None:
    times = [file.stat().st_mtime for name in ("metrics.jsonl", "run.json") if (file := folder / name).is_file()]
    return datetime.fromtimestamp(max(times), UTC).isoformat(timespec="seconds") if times else None


def _counts(rows: Sequence[Listed]) -> str:
    states = [_COUNTED.get(row.state, row.state) for row in rows]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    return f"{len(rows)} run{'s' * (len(rows) != 1)}: {counts}"


def _table(rows: Sequence[Listed]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="", expand=True)
    for name in ("scheme", "seed", "state", "tokens", "loss", "size", "age"):
        table.add_column(name, justify="left" if name in ("scheme", "state") else "right", no_wrap=True)
    table.add_column("evaluated", ratio=1, no_wrap=True, overflow="ellipsis")
    for row in rows:
        cells = (
            row.scheme,
            _or_dash(row.seed, str),
            _state(row),
            _or_dash(row.tokens, short_count),
            _or_dash(row.loss, "{:.3f}".format),
            _or_dash(row.num_bytes, short_bytes),
            _or_dash(row.changed, _age),
            _lengths(row.evaluated),
        )
        style = "red" if row.state in FAILED else "yellow" if row.state != FINISHED else ""
        table.add_row(*(Text(cell) for cell in cells), style=style)
    return table


def _or_dash(value: Any, shown: Callable[[Any], str]) -> str:
    return "-" if value is None else shown(value)


def _state(row: Listed) -> str:
    """`running 40%`."""
    done = f" {row.step / row.num_steps:.0%}" if row.step is not None and row.num_steps else ""
    return row.state if row.state in (FINISHED, UNREADABLE) else _COUNTED.get(row.state, row.state) + done


def _lengths(evaluated: dict[str, list[Evaluated]]) -> str:
    """`fixed 64-2k (9), validation 128 on pg19`: the shortest and the longest length, and how many results."""
    lengths: dict[tuple[str, str], list[int]] = {}
    for protocol, results in evaluated.items():
        for each in results:
            text = ResultKey(protocol, each.length, each.under).data
            lengths.setdefault((protocol, f" on {text}" if text else ""), []).append(each.length)
    parts = []
    for (protocol, text), here in lengths.items():
        ends = "-".join(map(short_length, sorted({min(here), max(here)})))
        parts.append(f"{protocol} {ends}{text}" + (f" ({len(here)})" if len(here) > 1 else ""))
    return ", ".join(parts) or "-"


def _age(changed: str) -> str:
    when = datetime.fromisoformat(changed)
    return duration(max(0.0, (datetime.now(UTC) - when.replace(tzinfo=when.tzinfo or UTC)).total_seconds()))
