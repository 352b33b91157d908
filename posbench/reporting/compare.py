"""Runs side by side: what differs in their configurations, what came out, what it cost."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posbench.config import ConfigError
from posbench.reporting.frame import FINGERPRINTS, perplexity_columns, row
from posbench.reporting.joining import PER_SCHEME, PER_SEED, parts_agree
from posbench.reporting.tables import DASH, Table, flops_text, number, perplexity_text, print_notes, print_table, whole
from posbench.runs import Run, load_run

if TYPE_CHECKING:
    from rich.console import Console


def compare(paths: Sequence[str | Path], console: Console | None = None) -> None:
    """Print two or more runs side by side, one column each, finished or not.

    Raises: ConfigError for fewer than two runs, or a folder that holds none.
    """
    from posbench.console import console as new_console

    runs = [load_run(path) for path in dict.fromkeys(map(Path, paths))]
    if len(runs) < 2:
        raise ConfigError(
            "one run cannot be compared: name two or more, such as runs/demo/qk_rope/seed=0 runs/demo/vo_rope/seed=0"
        )
    console = console or new_console()
    names = _names(runs)
    rows = [row(run) for run in runs]
    settings = [_flat(run.config.to_mapping()) for run in runs]
    costs = _costs(rows)
    shared = [f"{line[0]} {line[1]}" for line in costs if len(set(line[1:])) == 1 and line[1] != DASH]
    for title, lines in (
        ("Configuration: what differs", _differing(settings)),
        ("What came out", _outcome(rows)),
        ("Costs", [line for line in costs if len(set(line[1:])) > 1]),
    ):
        if lines:
            print_table(
                Table(
                    title,
                    ["", *names],
                    lines,
                    left=frozenset(range(len(names) + 1)) if title.startswith("Config") else frozenset({0}),
                ),
                console,
            )
    alike = [f"Costs that are the same in all: {'; '.join(shared)}."] if shared else []
    print_notes([*alike, *_remarks(rows, names)], console)


def _names(runs: list[Run]) -> list[str]:
    """As short as they can be while all differ: `vo_rope seed=0`, with the experiment where there are several."""
    parts = [run.path.resolve().parts[-3:] for run in runs]
    levels = [n for n in range(3) if len({p[n] for p in parts}) > 1] or [2]
    short = ["\n".join(p[n] for n in levels) for p in parts]
    return short if len(set(short)) == len(short) else [str(run.path) for run in runs]


def _flat(mapping: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _differing(settings: list[dict[str, Any]]) -> list[list[str]]:
    keys = dict.fromkeys(key for each in settings for key in each)
    return [
        [key, *(_plain(each.get(key)) for each in settings)]
        for key in keys
        if len({repr(each.get(key)) for each in settings}) > 1
    ]


def _plain(value: Any) -> str:
    return DASH if value is None else ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _outcome(rows: list[dict[str, Any]]) -> list[list[str]]:
    lines = [["status", *(str(r["status"]) for r in rows)]]
    for key, title in (("loss", "loss, nats/token"), ("bits_per_byte", "bits per byte")):
        lines.append([title, *(number(r[key]) for r in rows)])
    of_seed = _first_by_seed(rows)
    title = "loss minus the first" if len({r["seed"] for r in rows}) == 1 else "loss minus the first, same seed"
    less = [number(r["loss"] - of_seed[r["seed"]]["loss"], sign=True) if r["seed"] in of_seed else DASH for r in rows]
    lines.append([title, *("0" if r is of_seed.get(r["seed"]) else text for r, text in zip(rows, less, strict=True))])
    lines.append(["perplexity", *(perplexity_text(r["perplexity"]) for r in rows)])
    measured = dict.fromkeys(key for r in rows for key in r if key.startswith("perplexity@"))
    for key in perplexity_columns(measured):
        values = (perplexity_text(r[key]) if key in r else DASH for r in rows)
        lines.append([key.replace("@", " at ").replace("/", ", "), *values])
    return lines


def _kind(row: dict[str, Any]) -> tuple[str, str]:
    """What runs of several seeds have in common."""
    return row["experiment"], row["scheme"]


def _first_by_seed(rows: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Seed -> the run of the first one's scheme and experiment that others of the seed are compared with."""
    return {r["seed"]: r for r in reversed(rows) if _kind(r) == _kind(rows[0])}


def _costs(rows: list[dict[str, Any]]) -> list[list[str]]:
    return [
        ["tokens/s", *(whole(r["tokens_per_second"]) for r in rows)],
        ["training, s", *(whole(r["train_seconds"]) for r in rows)],
        ["peak memory, MiB", *(whole(r["peak_memory_bytes"] / 2**20) for r in rows)],
        ["tokens trained on", *(whole(r["tokens"]) for r in rows)],
        ["parameters", *(whole(math.nan if r["parameters"] is None else r["parameters"]) for r in rows)],
        ["training FLOPs", *(flops_text(r["training_flops"]) for r in rows)],
        ["skipped steps", *(whole(r["skipped_steps"]) for r in rows)],
        ["device", *(f"{r['device']} ({r['dtype']})" for r in rows)],
    ]


def _differ(name: str, one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two runs that should agree in a fingerprint do not."""
    if (name in PER_SEED and one["seed"] != other["seed"]) or (name == PER_SCHEME and _kind(one) != _kind(other)):
        return False
    ours, theirs = one[f"fingerprint.{name}"], other[f"fingerprint.{name}"]
    if name == "initial_weights" and isinstance(ours, str) and isinstance(theirs, str):
        return not parts_agree(json.loads(ours), json.loads(theirs))
    return bool(ours != theirs)


def _remarks(rows: list[dict[str, Any]], names: list[str]) -> list[str]:
    """What makes the comparison unfair, if anything."""
    seeds = {r["seed"] for r in rows}
    differ = [name for name in FINGERPRINTS if any(_differ(name, one, other) for one, other in combinations(rows, 2))]
    said = [
        f"{n.replace(chr(10), ' ')} {r['status']}: {r['reason']}"
        for n, r in zip(names, rows, strict=True)
        if r["reason"]
    ]
    said += [
        f"{n.replace(chr(10), ' ')} diverged: {r['diverged']}."
        for n, r in zip(names, rows, strict=True)
        if r["diverged"] and not r["reason"]
    ]
    said += [f"{n.replace(chr(10), ' ')}: {r['damaged']}" for n, r in zip(names, rows, strict=True) if r["damaged"]]
    if differ:
        said.append(f"Not a fair comparison: these runs differ in {', '.join(differ)} (fingerprints).")
    if len(seeds) > 1:
        said.append(
            "The runs have different seeds, so initial weights and batches differ between them: a loss is compared "
            f"with the first scheme's of the same seed ({DASH}: it has none)."
        )
    of_seed = _first_by_seed(rows)
    most = max(
        Counter(_kind(r) for r in rows if r["seed"] in of_seed and _kind(r) != _kind(rows[0])).values(), default=0
    )
    if most > 1:
        said.append("`posbench report` tests these differences over paired seeds.")
    elif most == 1:
        said.append("This is one seed, and another may differ: `posbench report` tests differences over paired seeds.")
    return said
