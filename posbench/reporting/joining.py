"""Which runs may stand in one table: those that differ in their scheme and seed and in nothing else.

Nothing is left out silently: every run that does not take part is named with the reason, and so is every seed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from posbench.config import ConfigError, nearest
from posbench.reporting.frame import FINGERPRINTS, records
from posbench.runs import FINISHED, Run

if TYPE_CHECKING:
    import pandas as pd

SHARED = ("data", "tokenizer", "config", "code")  # the same for every run
PER_SEED = ("initial_weights", "batches")  # the same for every scheme of one seed
_MEANING = {
    "data": "the text or its splits",
    "tokenizer": "the tokenizer",
    "config": "the configuration",
    "code": "the code",
    "initial_weights": "the shared initial weights",
    "batches": "the batches",
}


@dataclass(frozen=True)
class LeftOut:
    """A run that takes no part in the comparison."""

    scheme: str
    seed: int
    why: str
    path: str


@dataclass(frozen=True)
class Joined:
    """The runs that are compared, and what was left out.

    `runs` holds one row a (scheme, seed) for every scheme in `schemes` and every seed in `seeds`, no more and no fewer.
    """

    runs: pd.DataFrame
    schemes: list[str]
    seeds: list[int]
    baseline: str | None  # None where it has no run among them
    left_out: list[LeftOut] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def join(frame: pd.DataFrame, baseline: str) -> Joined:
    """The largest set of finished runs whose fingerprints agree, cut down to the seeds that its schemes share.

    data, tokenizer, configuration (the number format is in it) and code must agree between all runs; initial weights
    and batches between the schemes of one seed; a scheme's options between its seeds. Where sets are equally large,
    the one with the baseline is taken, then the latest.

    Raises: ConfigError where no run is finished, or the baseline is not among the schemes that ran.
    """
    left: list[LeftOut] = []
    notes: list[str] = []

    def leave(rows: pd.DataFrame, why: list[str]) -> None:
        left.extend(LeftOut(r["scheme"], r["seed"], w, r["path"]) for r, w in zip(records(rows), why, strict=True))

    finished = frame[frame["status"] == FINISHED]
    others = frame[frame["status"] != FINISHED]
    leave(others, [_status(run) for run in records(others)])
    if finished.empty:
        raise ConfigError(
            "no run is finished here: train some with `posbench train` (or `make reproduce-table`), then report again"
        )

    broken = ~np.isfinite(finished["loss"].astype(float))
    leave(finished[broken], ["it has no finite validation loss"] * int(broken.sum()))
    finished = finished[~broken]
    for name in FINGERPRINTS:
        lacking = finished[f"fingerprint.{name}"].isna()
        leave(finished[lacking], [f"it records no fingerprint of {_MEANING[name]}"] * int(lacking.sum()))
        finished = finished[~lacking]
    if finished.empty:
        raise ConfigError("no finished run here can be compared: " + "; ".join(f"{r.path}: {r.why}" for r in left))

    shared = [f"fingerprint.{name}" for name in SHARED]
    finished, apart = _largest(finished, shared, baseline)
    leave(apart, [_differs(row, finished, shared) for _, row in apart.iterrows()])
    per_seed = [f"fingerprint.{name}" for name in PER_SEED]
    kept = []
    for _, group in finished.groupby("seed"):
        same, apart = _largest(group, per_seed, baseline)
        leave(apart, [_differs(row, same, per_seed) for _, row in apart.iterrows()])
        kept.append(same)
    finished = _concat(kept)

    options = "scheme's options"
    finished = finished.assign(**{options: [_options(path) for path in finished["path"]]})
    kept = []
    for _, group in finished.groupby("scheme"):
        same, apart = _largest(group, [options], baseline)
        here = json.loads(same[options].iloc[0])
        leave(apart, [f"has other options{_values(json.loads(row), here, 'most have')}" for row in apart[options]])
        kept.append(same)
    finished = _concat(kept).drop(columns=options)

    twice = finished.duplicated(["scheme", "seed"])
    leave(finished[twice], ["another run of the same scheme and seed is already in"] * int(twice.sum()))
    finished = finished[~twice]

    schemes, seeds = common_seeds({str(s): set(g["seed"]) for s, g in finished.groupby("scheme")}, baseline)
    away = ~finished["scheme"].isin(schemes) | ~finished["seed"].isin(seeds)
    leave(finished[away], [_unshared(row, finished, schemes, seeds) for _, row in finished[away].iterrows()])
    if away.any():
        notes.append(f"Compared over the seeds that all compared schemes have: {', '.join(map(str, seeds))}.")
    runs = finished[~away].sort_values(["scheme", "seed"], ignore_index=True)

    if baseline not in schemes:
        notes.append(
            f"The baseline {baseline} has no run among these, so no gaps are given{nearest(baseline, schemes)}."
        )
    for column in [c for c in map(str, runs.columns) if c.startswith("version.")] + ["device"]:
        values = runs[column].fillna("unknown").value_counts()
        if len(values) > 1:
            what = column.removeprefix("version.")
            notes.append(
                f"Joined although {what} differs: " + ", ".join(f"{v} ({n} runs)" for v, n in values.items()) + "."
            )
    return Joined(runs, schemes, seeds, baseline if baseline in schemes else None, left, notes)


def common_seeds(seeds: dict[str, set[int]], baseline: str) -> tuple[list[str], list[int]]:
    """The schemes to compare and the seeds they share: all schemes, where they share two seeds.

    Where they do not, those with the fewest seeds go first (the baseline last, and never more than half of them) if
    that leaves two shared seeds: one scheme tried with one seed shall not take the other seeds' evidence away.
    Failing that, as few go as leave one seed to share. Whatever has all the seeds that are shared then stays.
    """
    order = sorted(seeds, key=lambda name: (name == baseline, len(seeds[name]), name))
    for wanted, fewest in ((2, (len(order) + 1) // 2), (1, 1)):
        for dropped in range(len(order) - fewest + 1):
            shared = set.intersection(*(seeds[name] for name in order[dropped:]))
            if len(shared) >= wanted:
                return sorted(name for name in order if shared <= seeds[name]), sorted(shared)
    return [], []


def _largest(runs: pd.DataFrame, columns: list[str], baseline: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The largest group of runs that agree in `columns`, and the rest."""
    groups = [group for _, group in runs.groupby(columns, dropna=False)]
    best = max(groups, key=lambda g: (len(g), baseline in set(g["scheme"]), str(g["ended"].max())))
    return best, runs.drop(best.index)


def _status(run: dict[str, Any]) -> str:
    return f"{run['status']}: {run['reason']}" if isinstance(run["reason"], str) else run["status"]


def _differs(row: pd.Series, kept: pd.DataFrame, columns: list[str]) -> str:
    names = [c.removeprefix("fingerprint.") for c in columns if row[c] != kept[c].iloc[0]]
    words = [_MEANING[name] for name in names]
    if "config" in names:
        words[names.index("config")] += _values(_common(row["path"]), _common(kept["path"].iloc[0]))
    return "differs from the others in " + " and ".join(words)


def _identity(path: str) -> dict[str, Any]:
    """What the manifest says of the configuration: flat `group.field` -> value."""
    return Run(Path(path)).manifest.identity


def _common(path: str) -> dict[str, Any]:
    """What of it is in the configuration's fingerprint."""
    return {
        key: value
        for key, value in _identity(path).items()
        if not key.startswith("scheme.") and key not in ("seed", "device.compiled")
    }


def _options(path: str) -> str:
    """The options of a run's scheme, as JSON: runs of one name must agree in them."""
    identity = _identity(path)
    return json.dumps({key: identity[key] for key in sorted(identity) if key.startswith("scheme.")})


def _values(here: dict[str, Any], there: dict[str, Any], others: str = "others") -> str:
    """` (train.lr: 0.001, others 0.003)`, the first three differences that tell."""
    keys = [k for k in {**here, **there} if here.get(k) != there.get(k)]
    told = [f"{k}: {here.get(k)}, {others} {there.get(k)}" for k in keys[:3]] + ["..."] * (len(keys) > 3)
    return f" ({'; '.join(told)})" if told else ""


def _unshared(row: pd.Series, finished: pd.DataFrame, schemes: list[str], seeds: list[int]) -> str:
    if row["scheme"] in schemes:
        return f"seed {row['seed']} is not finished for every compared scheme"
    there = set(finished.loc[finished["scheme"] == row["scheme"], "seed"])
    has, lacks = [n for n in seeds if n in there], [n for n in seeds if n not in there]
    return f"its scheme has {_seeds(has)} of {', '.join(map(str, seeds))}: train {_seeds(lacks)} of it"


def _seeds(seeds: list[int]) -> str:
    """`seed 0`, `seeds 1, 2`, `none`."""
    return f"seed{'s' if seeds[1:] else ''} {', '.join(map(str, seeds))}" if seeds else "none"


def _concat(frames: list[pd.DataFrame]) -> pd.DataFrame:
    import pandas as pd

    return pd.concat(frames)
