"""Which runs may stand in one table: those that differ in their scheme and seed and in nothing else.

Nothing is left out silently: every run that does not take part is named with the reason, and so is every seed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from posbench.config import ConfigError, nearest
from posbench.reporting.frame import FINGERPRINTS, records
from posbench.runs import FINISHED, run_at

if TYPE_CHECKING:
    import pandas as pd

SHARED = ("data", "tokenizer", "config", "code")  # the same for every run
PER_SEED = ("initial_weights", "batches")  # the same for every scheme of one seed, as far as they have parts in common
PER_SCHEME = "scheme_code"  # the same for every seed of one scheme
_MEANING = {
    "data": "the text or its splits",
    "tokenizer": "the tokenizer",
    "config": "the configuration",
    "code": "the code that all runs share",
    "scheme_code": "the code of its scheme",
    "initial_weights": "the shared initial weights",
    "batches": "the batches",
}
_PREFIX = "fingerprint."


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
    unshared: pd.DataFrame | None = None  # left out for their seeds alone: the others lack them, or they the others'


def join(frame: pd.DataFrame, baseline: str) -> Joined:
    """The largest set of finished runs whose fingerprints agree, cut down to the seeds that its schemes share.

    data, tokenizer, configuration (the number format is in it) and shared code must agree between all runs; batches,
    and those parts of the initial weights that both have, between the schemes of one seed; a scheme's options and its
    own code between its seeds. Where sets are equally large, the one with the baseline is taken, then the latest.

    Raises: ConfigError where no run is finished, or the baseline is not among the schemes that ran.
    """
    left: list[LeftOut] = []
    runs = _with_losses(frame, left)
    runs = _agreeing(runs, baseline, left)
    twice = runs.duplicated(["scheme", "seed"])
    _leave(left, runs[twice], ["another run of the same scheme and seed is already included"] * int(twice.sum()))
    runs = runs[~twice]

    schemes, seeds = common_seeds({str(s): set(g["seed"]) for s, g in runs.groupby("scheme")}, baseline)
    away = ~runs["scheme"].isin(schemes) | ~runs["seed"].isin(seeds)
    _leave(left, runs[away], [_unshared(row, runs, schemes, seeds) for _, row in runs[away].iterrows()])
    notes = []
    if away.any():
        notes.append(f"Compared over the seeds that all compared schemes have: {', '.join(map(str, seeds))}.")
    if baseline not in schemes:
        notes.append(
            f"The baseline {baseline} has no run among these, so no gaps are given{nearest(baseline, schemes)}."
        )
    unshared, runs = runs[away], runs[~away].sort_values(["scheme", "seed"], ignore_index=True)
    return Joined(
        runs,
        schemes,
        seeds,
        baseline if baseline in schemes else None,
        left,
        [*notes, *_different_machines(runs)],
        unshared,
    )


def _leave(left: list[LeftOut], runs: pd.DataFrame, why: Iterable[str]) -> None:
    left.extend(LeftOut(r["scheme"], r["seed"], w, r["path"]) for r, w in zip(records(runs), why, strict=True))


def _with_losses(frame: pd.DataFrame, left: list[LeftOut]) -> pd.DataFrame:
    """The finished runs that have a loss and every fingerprint. Raises: ConfigError where there is none."""
    finished = frame[frame["status"] == FINISHED]
    others = frame[frame["status"] != FINISHED]
    _leave(left, others, [_status(run) for run in records(others)])
    if finished.empty:
        raise ConfigError(
            "no run is finished here: train some with `posbench train` (or `make reproduce-table`), then report again"
        )
    broken = ~np.isfinite(finished["loss"].astype(float))
    _leave(left, finished[broken], [_without_loss(run) for run in records(finished[broken])])
    finished = finished[~broken]
    for name in FINGERPRINTS:
        lacking = finished[f"{_PREFIX}{name}"].isna()
        _leave(left, finished[lacking], [f"it records no fingerprint of {_MEANING[name]}"] * int(lacking.sum()))
        finished = finished[~lacking]
    if finished.empty:
        raise ConfigError("no finished run here can be compared: " + "; ".join(f"{r.path}: {r.why}" for r in left))
    return finished


def _without_loss(run: dict[str, Any]) -> str:
    damaged = run["damaged"]
    return "it has no finite validation loss" + (f": {damaged}" if isinstance(damaged, str) else "")


def _agreeing(runs: pd.DataFrame, baseline: str, left: list[LeftOut]) -> pd.DataFrame:
    """The largest set of runs that differ in their scheme and seed and in nothing else."""
    shared = [f"{_PREFIX}{name}" for name in SHARED]
    runs, apart = _largest(runs, shared, baseline)
    _leave(left, apart, [_differs(row, runs, shared) for _, row in apart.iterrows()])

    groups = []
    for _, group in runs.groupby("seed"):
        same, apart = _largest_of_seed(group, baseline)
        per_seed = [f"{_PREFIX}{name}" for name in PER_SEED]
        _leave(left, apart, [_differs(row, same, per_seed) for _, row in apart.iterrows()])
        groups.append(same)
    runs = _concat(groups)

    options = "scheme's options"
    runs = runs.assign(**{options: [_options(path) for path in runs["path"]]})
    groups = []
    for _, group in runs.groupby("scheme"):
        same, apart = _largest(group, [options, f"{_PREFIX}{PER_SCHEME}"], baseline)
        _leave(left, apart, [_other_scheme(row, same, options) for _, row in apart.iterrows()])
        groups.append(same)
    return _concat(groups).drop(columns=options)


def _different_machines(runs: pd.DataFrame) -> list[str]:
    """What the runs were joined in spite of."""
    notes = []
    for column in [c for c in map(str, runs.columns) if c.startswith("version.")] + ["device"]:
        values = runs[column].fillna("unknown").value_counts()
        if len(values) > 1:
            counts = ", ".join(f"{value} ({count} runs)" for value, count in values.items())
            notes.append(f"Joined although {column.removeprefix('version.')} differs: {counts}.")
    return notes


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
    best = max(groups, key=lambda group: _rank(group, baseline))
    return best, runs.drop(best.index)


def _rank(group: pd.DataFrame, baseline: str) -> tuple[int, bool, str]:
    return len(group), baseline in set(group["scheme"]), str(group["ended"].max())


def _largest_of_seed(runs: pd.DataFrame, baseline: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The largest group of runs with the same batches whose initial weights agree in the parts they share; the rest.

    Runs agree with a whole: all parts that a group has so far, of which a run must share at least one.
    """
    groups = []
    weights = f"{_PREFIX}initial_weights"
    for _, group in runs.groupby(f"{_PREFIX}batches", dropna=False):
        kinds = {text: json.loads(text) for text in group[weights].value_counts().index}
        for first in kinds:
            whole: dict[str, str] = dict(kinds[first])
            members = []
            for text in sorted(kinds, key=lambda text: text != first):  # by how many runs have it, the first in front
                if parts_agree(whole, kinds[text]):
                    whole |= kinds[text]
                    members.append(text)
            groups.append(group[group[weights].isin(members)])
    best = max(groups, key=lambda group: _rank(group, baseline))
    return best, runs.drop(best.index)


def parts_agree(one: dict[str, str], other: dict[str, str]) -> bool:
    """Whether two models began with the same weights, in the logical parts that both have: there must be one."""
    common = one.keys() & other.keys()
    return bool(common) and all(one[name] == other[name] for name in common)


def _status(run: dict[str, Any]) -> str:
    return f"{run['status']}: {run['reason']}" if isinstance(run["reason"], str) else run["status"]


def _differs(row: pd.Series, joined: pd.DataFrame, columns: list[str]) -> str:
    """What a run differs in from those that are joined."""
    names = [c.removeprefix(_PREFIX) for c in columns if row[c] != joined[c].iloc[0]]
    words = [_MEANING[name] for name in names]
    if "config" in names:
        words[names.index("config")] += _values(_common(row["path"]), _common(joined["path"].iloc[0]))
    if "initial_weights" in names:
        here, others = (json.loads(text) for text in (row[f"{_PREFIX}initial_weights"], _weights_of(joined)))
        parts = [name for name in here if name in others and here[name] != others[name]]
        words[names.index("initial_weights")] += f" ({', '.join(parts) or 'no part in common'})"
    return "differs from the others in " + " and ".join(words)


def _weights_of(joined: pd.DataFrame) -> str:
    """The parts that most of the runs have."""
    return str(joined[f"{_PREFIX}initial_weights"].value_counts().index[0])


def _other_scheme(row: pd.Series, joined: pd.DataFrame, options: str) -> str:
    """How a run's scheme is not that of the other runs of its name."""
    if row[options] == joined[options].iloc[0]:
        return f"differs from the other runs of its scheme in {_MEANING[PER_SCHEME]}"
    return f"has other options{_values(json.loads(row[options]), json.loads(joined[options].iloc[0]), 'most have')}"


def _common(path: str) -> dict[str, Any]:
    """What of the manifest's `identity` is in the configuration's fingerprint."""
    return {
        key: value
        for key, value in run_at(path).manifest.identity.items()
        if not key.startswith("scheme.") and key not in ("seed", "device.compiled")
    }


def _options(path: str) -> str:
    """The options of a run's scheme, as JSON: runs of one name must agree in them."""
    identity = run_at(path).manifest.identity
    return json.dumps({key: identity[key] for key in sorted(identity) if key.startswith("scheme.")})


def _values(here: dict[str, Any], there: dict[str, Any], others: str = "others") -> str:
    """` (train.lr: 0.001, others 0.003)`, the first three differences that tell."""
    keys = [k for k in {**here, **there} if here.get(k) != there.get(k)]
    values = [f"{k}: {here.get(k)}, {others} {there.get(k)}" for k in keys[:3]] + ["..."] * (len(keys) > 3)
    return f" ({'; '.join(values)})" if values else ""


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
