"""Add the user's runs to the tables of a reference trained elsewhere: `posbench report mine --beside demo_cpu`."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import pandas as pd

from posbench.analysis.agreement import differences, disagreement, finished_runs, is_of_tasks
from posbench.catalogue.own_files import is_class_path
from posbench.config import ConfigError
from posbench.data import dataset_of
from posbench.model.architecture import checked_architecture
from posbench.model.decoder import build_model
from posbench.runs import DIED, Run, find_runs
from posbench.system.console import Console
from posbench.system.device import choose_device
from posbench.training.step import TrainingStep

TOLERANCE = 1e-5  # nats per token between the recorded mean of the first losses and the mean computed now
OF_ONE_RUN = (
    "scheme",
    "seed",
    "experiment_name",
    "runs_dir",
    "tracking",
)  # overrides in the reference's training command that a comparable run does not copy


def join_reference(summary: pd.DataFrame, reference: Path, console: Console) -> pd.DataFrame:
    """Return the runs of the reference and of the user, if one table can hold the finished ones.

    Raises: ConfigError if the runs differ in other settings (the message has the command that trains a comparable run),
    or if no run of the user is left.
    """
    runs, left_out = finished_runs(summary)
    for line in left_out:
        console.out(f"left out: {line}")
    is_reference = runs["path"].map(lambda path: Path(path).is_relative_to(reference))
    identity = ["scheme", "seed"]  # columns that two runs share if one repeats the other
    tables = [runs]
    if is_of_tasks(runs):
        identity.append("data.name")
        tables = [table for _, table in runs.groupby("data.name")]
    # A user's run with the scheme and seed of a reference run is left out, and both losses are printed. In `repeated`,
    # columns of the user's run end in `_x`, the reference run's in `_y`.
    repeated = runs[~is_reference].merge(runs[is_reference], on=identity)
    own_runs = runs[~is_reference & ~runs["path"].isin(repeated["path_x"])]
    differing = list(chain.from_iterable(map(differences, tables)))
    if differing:
        schemes = own_runs[["scheme", "scheme.kind"]].drop_duplicates().itertuples(index=False)
        names = [str(kind if is_class_path(kind) else name) for name, kind in schemes]
        message = disagreement(f"share a table with {reference.name}", differing)
        raise ConfigError(f"{message}\n{how_to_train(reference, names)}")
    for run in repeated.itertuples():
        theirs = f"{reference.name} has a run of this scheme and seed (loss {run.loss_y:.4f})"
        console.out(f"left out: {run.path_x} (loss {run.loss_x:.4f}), because {theirs}")
    if own_runs.empty and not (summary["status"] == DIED).any():
        raise ConfigError(
            f"no run is left to put beside {reference.name}: it already has the schemes and seeds of your finished "
            "runs, so train another scheme or seed"
        )
    # The reference's runs, the user's other finished runs, and all unfinished ones.
    return summary.drop(index=runs.index[~is_reference].difference(own_runs.index))


def check_same_losses(reference: Path, console: Console) -> None:
    """Train the reference's baseline for a few steps, check that the mean loss is as recorded, and print both means.

    Raises: ConfigError if text or mean loss differ; it says which Python, data or release to use.
    """
    # The weights from which other runs went on are not in the reference.
    runs = find_runs(reference)
    if runs and all(run.manifest.continued for run in runs):
        console.out(
            f"{reference.name}: its runs went on from other runs, so that its first losses cannot be computed again "
            "here; only the settings are compared"
        )
        return
    run = baseline_of(reference, may_continue=False)
    manifest, config = run.manifest, run.config
    # Code changes between releases: the first training losses show whether this release computes the same. The recorded
    # mean is the first one logged, by default over ten steps (`train.log_every`).
    row = next(row for row in run.logged if row["kind"] == "train")
    corpus = dataset_of(config, console.out)
    versions = manifest.versions
    if corpus.fingerprint != manifest.fingerprints.data:
        text = f"data={config.data.name}, as it was at the time"
        if config.data.source == "stdlib":
            text = f"the standard library of Python {versions['python']}: use that Python"
        raise ConfigError(
            f"{reference.name} was trained on a different text, so no run made here is comparable with it. Its text is "
            f"{text}"
        )
    device = choose_device(config.train)
    model = build_model(config, corpus.vocab_size, checked_architecture(config), corpus.bos_id)
    step = TrainingStep(config, model, device)
    batches = corpus.batches(config.train, config.seed)
    losses = []
    for n in range(row["step"]):
        loss, _ = step(n, batches.batch(n).each(device.send))
        losses.append(float(loss))
    mean, recorded = math.fsum(losses) / len(losses), row["loss"]
    figure = f"mean of the first {len(losses)} losses of {manifest.scheme} seed {manifest.seed}"
    # Written with `not`, so that a mean that is NaN counts as different.
    if not abs(mean - recorded) <= TOLERANCE:
        commit = f", commit {versions['commit']}" if "commit" in versions else ""
        raise ConfigError(
            f"this posbench does not compute what {reference.name} recorded: the {figure} is {mean:.6f} here and "
            f"{recorded:.6f} there. Use the release that trained it: posbench {versions['posbench']}{commit}, torch "
            f"{versions['torch']}"
        )
    device_name, recorded_on = device.describe()["name"], manifest.device.get("name")
    agreement = "close enough"
    if f"{mean:.6f}" == f"{recorded:.6f}":
        agreement = "the same"
    console.out(
        f"{figure}: {mean:.6f} on {device_name}; recorded in {reference.name}: {recorded:.6f} on {recorded_on} "
        f"({agreement})"
    )
    if device_name != recorded_on:
        console.out("On a different processor, losses agree to about six digits at first and to fewer later in a run.")


def baseline_of(reference: Path, may_continue: bool = True) -> Run:
    """Return the baseline scheme's run with the lowest seed, or any scheme's. Raises: ConfigError without runs.

    Arguments: may_continue, whether it may be a run that went on from another one.
    """
    runs = [run for run in find_runs(reference) if may_continue or not run.manifest.continued]
    if not runs:
        raise ConfigError(f"--beside {reference} contains no runs: give the folder or the pack of an experiment")
    baseline = runs[0].config.experiment.baseline
    return min(runs, key=lambda run: (run.manifest.scheme != baseline, run.manifest.seed))


def how_to_train(reference: Path, schemes: Sequence[str] = ()) -> str:
    """Return text with the commands that train and score schemes comparably to the reference, with the same seeds.

    Arguments: schemes, names or class paths; by default `my_scheme.py:MyScheme`, which the user has yet to write.
    """
    run = baseline_of(reference)
    if run.manifest.command is None:
        return (
            f"{reference.name} does not record the command that trained it; its settings are in {run.path}/config.yaml"
        )
    seeds = sorted({run.manifest.seed for run in find_runs(reference)})
    # The reference's own command, with the user's schemes and all its seeds.
    words = [f"scheme={','.join(schemes) or 'my_scheme.py:MyScheme'}"]
    for word in run.manifest.command:
        group = re.split("[=.]", word)[0]  # scheme, for scheme=rope and for scheme.base=1e4
        if group not in OF_ONE_RUN:
            words.append(word)
    words += [f"seed={','.join(map(str, seeds))}", "experiment_name=mine"]
    train = f"train -m {shlex.join(words)}"
    if "scheme.own_lr" in run.manifest.identity:  # each scheme of the reference has its own learning rate
        train = f"tune {shlex.join(words)}   # ends with the command that trains at the best rate"
    return f"To train a comparable row:\n  posbench {train}\n  posbench eval mine"
