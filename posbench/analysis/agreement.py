"""Say which runs may share a table: they differ in nothing but scheme and seed."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from posbench.analysis.table import settings_of
from posbench.config import ConfigError, nearest
from posbench.runs import UNREADABLE


def is_of_tasks(summary: pd.DataFrame) -> bool:
    """Return whether these runs learn tasks, not text. Raises: ConfigError if only some of them do."""
    # An unreadable run does not say what it learnt.
    readable = summary[summary["status"] != UNREADABLE]
    # Without a readable run there may be no column `data.source`; the default only gives a mask of the right length.
    on_task = readable.get("data.source", readable["scheme"]) == "task"
    if on_task.any() and not on_task.all():
        raise ConfigError("some of these runs learn a task and others read text: report each kind separately")
    return bool(on_task.any())


def is_of_subjects(summary: pd.DataFrame) -> bool:
    """Return whether these runs are models that were not trained here. Raises: ConfigError if only some are."""
    if "num_steps" not in summary:  # no run can be read
        return False
    are_subjects = summary["num_steps"] == 0  # a model that was not trained here has taken no step
    if are_subjects.any() and not are_subjects.all():
        raise ConfigError("some of these runs were trained here and others only scored: report each kind separately")
    return bool(are_subjects.any())


def choose(summary: pd.DataFrame, schemes: Sequence[str] = (), seeds: Collection[int] = ()) -> pd.DataFrame:
    """Return the summary's runs of these schemes and seeds; an empty argument means all.

    Raises: ConfigError for a scheme without runs, or if no run has one of the seeds.
    """
    known = sorted(set(summary["scheme"]))
    for scheme in schemes:
        if scheme not in known:
            raise ConfigError(f"--schemes: {scheme!r} has no runs here{nearest(scheme, known)} ({', '.join(known)})")
    chosen = summary[summary["scheme"].isin(list(schemes) or known)]
    chosen = chosen[chosen["seed"].isin(list(seeds) or set(summary["seed"]))]
    if chosen.empty and len(summary):
        listed = ", ".join(map(str, sorted(set(summary["seed"]))))
        raise ConfigError(f"--seeds: no such seed has a run here (seeds with runs: {listed})")
    return chosen


def finished_runs(summary: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Return the finished runs that have a loss, and a line per other run that says why it is left out.

    Raises: ConfigError if no finished run has a loss.
    """
    is_finished = (summary["status"] == "finished") & np.isfinite(summary["loss"].astype(float))
    left_out = []
    for run in summary[~is_finished].itertuples():
        left_out.append(f"{run.scheme} seed {run.seed}: {_why_left_out(run)}")
    if not is_finished.any():
        reasons = "".join(f"\n  {line}" for line in left_out[:5])
        raise ConfigError(f"no run is finished here: train some, such as `posbench train -m experiment=demo`{reasons}")
    return summary[is_finished], left_out


def _why_left_out(run: Any) -> str:
    # `damaged`, `diverged` and `reason` are text, or None or NaN if there is nothing to say.
    if run.status == "finished":
        if isinstance(run.damaged, str):
            return run.damaged
        return str(run.diverged or "it has no loss")
    reason = getattr(run, "reason", None)
    if isinstance(reason, str):
        return f"{run.status}: {reason}"
    return str(run.status)


def check_agreement(runs: pd.DataFrame, group_by: str = "") -> None:
    """Raise ConfigError, with the settings and a remedy, if the runs differ in more than scheme and seed.

    Arguments: group_by, the columns that these runs are already grouped by.
    """
    differing = list(disagreements(runs))
    if differing:
        # Runs can be grouped only by columns. Other names, such as `the tokenizer`, are descriptions.
        settings = [name for name, _ in differing if name in runs.columns]
        remedy = ""
        if settings:
            columns = [settings[0]]
            if group_by:
                columns = [group_by, settings[0]]
            remedy = f", or group them with --by {','.join(columns)}"
        raise ConfigError(f"{disagreement('share a table', differing)}\nChoose runs with --schemes or --seeds{remedy}")


def disagreement(purpose: str, differing: Sequence[tuple[str, str]]) -> str:
    """Return the start of an error message: `these runs cannot <purpose>, because they differ in` these settings."""
    lines = "".join(f"\n  {name}: {values}" for name, values in differing[:6])
    return f"these runs cannot {purpose}, because they differ in{lines}"


def disagreements(runs: pd.DataFrame) -> Iterator[tuple[str, str]]:
    """Yield (setting, text) for each setting that keeps these runs out of one table; the text has its values by run."""
    # If a scheme and seed occur in several runs, only these are reported, with the settings in which they differ.
    repeated = runs[runs.duplicated(["scheme", "seed"], keep=False)]
    if len(repeated):
        example = repeated.sort_values(["scheme", "seed"]).iloc[:2]
        yield "runs of one scheme and seed", " and ".join(example["path"])
        for column in settings_of(runs):
            if column.startswith(("model.", "train.")) and repeated[column].astype(str).nunique() > 1:
                yield column, counts(runs, column)
    else:
        yield from differences(runs)


def differences(runs: pd.DataFrame) -> Iterator[tuple[str, str]]:
    """Yield (setting, text) for what differs besides scheme and seed; the text has the values by run."""
    for name, description in (("data", "the text or its splits"), ("tokenizer", "the tokenizer")):
        if runs[f"fingerprint.{name}"].nunique() > 1:
            yield description, counts(runs, f"fingerprint.{name}")
    if runs["fingerprint.config"].nunique() > 1:
        yield from _differing_settings(runs)
    # Batches and initial weights depend on the seed, and are the same for all schemes.
    for seed, of_seed in runs.groupby("seed"):
        if of_seed["fingerprint.batches"].nunique() > 1:
            yield f"the batches of seed {seed}", counts(of_seed, "fingerprint.batches")
        unlike = _unlike_weights(of_seed)
        if unlike:
            yield f"the initial weights of seed {seed}", ", ".join(unlike)
    yield from _differing_options(runs)


def _differing_settings(runs: pd.DataFrame) -> Iterator[tuple[str, str]]:
    # A scheme with a learning rate of its own may differ in it from the others.
    with_own_rates = bool(runs["own_rate"].any())
    ignored = {"device.compiled", "device.stacked"}  # the fingerprint leaves them out too
    if with_own_rates:
        ignored.add("train.lr")
    shared = [name for name in settings_of(runs) if name not in ignored and not name.startswith("scheme.")]
    differing = [column for column in shared if runs[column].astype(str).nunique() > 1]
    if "model.name" in differing:  # the model's name says enough: its sizes need not be listed too
        differing = [column for column in differing if column == "model.name" or not column.startswith("model.")]
    for column in differing:
        yield column, counts(runs, column)
    # The fingerprints differ, but no setting that is a column does.
    if not differing and not with_own_rates:
        yield "the configuration", counts(runs, "fingerprint.config")


def _unlike_weights(runs: pd.DataFrame) -> list[str]:
    # A tensor is compared among the runs that have it.
    digests: dict[str, set[str]] = {}
    for text in runs["fingerprint.initial_weights"].unique():
        for name, digest in json.loads(text).items():
            digests.setdefault(name, set()).add(digest)
    return [name for name, different in digests.items() if len(different) > 1]


def _differing_options(runs: pd.DataFrame) -> Iterator[tuple[str, str]]:
    # All runs of one scheme must agree in these, also in the learning rate, which may differ between schemes.
    columns = [column for column in settings_of(runs) if column.startswith("scheme.") or column == "train.lr"]
    for scheme, of_scheme in runs.groupby("scheme"):
        for column in columns:
            if of_scheme[column].astype(str).nunique() > 1:
                yield f"{column} of {scheme}", counts(of_scheme, column)


def counts(runs: pd.DataFrame, column: str) -> str:
    """Return how many runs have each value of a column, as text: `0.005 (33 runs), 0.001 (alibi seed 0)`."""
    texts = []
    # The commonest value first: the others are the exceptions.
    for value, of_value in sorted(runs.groupby(runs[column].astype(str)), key=lambda item: -len(item[1])):
        first = of_value.iloc[0]
        owner = f"{first['scheme']} seed {first['seed']}"
        if len(of_value) > 1:
            owner = f"{len(of_value)} runs"
        # Long values are cut, so that a line stays readable.
        texts.append(f"{value[:16]} ({owner})")
    return ", ".join(texts)
