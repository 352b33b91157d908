"""`posbench report mine --beside demo_cpu`: one's own runs in the table of a reference that was trained elsewhere.

Code changes between releases, so it is shown, and not assumed, that it still computes the same: the first losses of
the reference's baseline are computed anew. Then the fingerprints decide as they do for any table.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from posbench.catalogue.own_files import is_class_path
from posbench.config import ConfigError
from posbench.data import dataset_of
from posbench.model.architecture import checked_architecture
from posbench.model.decoder import build_model
from posbench.reporting.comparison import differences, disagreement, finished
from posbench.reporting.tasks import is_of_tasks
from posbench.runs import Run, find_runs
from posbench.system.console import Console
from posbench.system.device import choose_device
from posbench.training.step import TrainingStep

TOLERANCE = 1e-5  # nats a token, between the mean of the first losses as recorded and as computed now
OF_ONE_RUN = ("scheme", "seed", "experiment_name", "runs_dir", "tracking")  # overrides that a comparable row replaces


def joined(summary: pd.DataFrame, reference: Path, console: Console) -> pd.DataFrame:
    """The finished runs of a summary that holds the reference's runs and one's own, once they belong in one table.

    Arguments: reference, the folder of an experiment, which may lie in a pack (`posbench.runs.finding.folder_of`).
    Returns: the runs without those of one's own that repeat runs of the reference; a line says what both lost.
    Raises: ConfigError, with the command that trains a comparable row, if they do not agree, or if no run is left.
    """
    runs, left_out = finished(summary)
    for line in left_out:
        console.out(f"left out: {line}")
    is_theirs = runs["path"].map(lambda path: Path(path).is_relative_to(reference))
    same = ["scheme", "seed", *(["data.name"] if is_of_tasks(runs) else [])]
    both = runs[~is_theirs].merge(runs[is_theirs], on=same)
    own = runs[~is_theirs & ~runs["path"].isin(both["path_x"])]
    tables = [of for _, of in runs.groupby("data.name")] if is_of_tasks(runs) else [runs]
    found = [line for table in tables for line in differences(table)]
    if found:
        schemes = own[["scheme", "scheme.kind"]].drop_duplicates().itertuples(index=False)
        names = [str(kind if is_class_path(kind) else name) for name, kind in schemes]
        raise ConfigError(f"{disagreement(f'beside {reference.name}', found)}\n{how_to_train(reference, names)}")
    for run in both.itertuples():
        theirs = f"{reference.name} has too (loss {run.loss_y:.4f})"
        console.out(f"left out: {run.path_x} (loss {run.loss_x:.4f}), which {theirs}")
    if own.empty:
        raise ConfigError(
            f"no run is left to put beside {reference.name}, which has the finished ones already: train another scheme "
            "or seed"
        )
    return pd.concat([runs[is_theirs], own]).sort_index()


def check_same_losses(reference: Path, console: Console) -> None:
    """Compute the first losses of the reference's baseline anew, and say that they are as recorded.

    The record is the first row of its metrics: the mean over ten steps by default (`train.log_every`).
    Raises: ConfigError where the text or a loss is another one; it says which release to use.
    """
    run = baseline_of(reference)
    manifest, config = run.manifest, run.config
    row = next(row for row in run.logged if row["kind"] == "train")
    corpus = dataset_of(config, console.out)
    versions = manifest.versions
    if corpus.fingerprint != manifest.fingerprints.data:
        python = f"the standard library of Python {versions['python']}: use that Python"
        raise ConfigError(
            f"{reference.name} was trained on another text, so nothing here can be compared with it. Its text is "
            + (python if config.data.source == "stdlib" else f"data={config.data.name}, as it was then")
        )
    device = choose_device(config.train)
    model = build_model(config, corpus.vocab_size, checked_architecture(config), corpus.bos_id)
    step = TrainingStep(config, model, device)
    batches = corpus.batches(config.train, config.seed)
    losses = [float(step(n, batches.batch(n).each(device.send))[0]) for n in range(row["step"])]
    mean, recorded = math.fsum(losses) / len(losses), row["loss"]
    what = f"mean of the first {len(losses)} losses of {manifest.scheme} seed {manifest.seed}"
    if not abs(mean - recorded) <= TOLERANCE:
        commit = f", commit {versions['commit']}" if "commit" in versions else ""
        raise ConfigError(
            f"this posbench does not compute what {reference.name} recorded: the {what} is {mean:.6f} here and "
            f"{recorded:.6f} there. Use the release that trained it: posbench {versions['posbench']}{commit}, torch "
            f"{versions['torch']}"
        )
    here, there = device.describe()["name"], manifest.device.get("name")
    console.out(f"{what}: {mean:.6f} on {here}; recorded in {reference.name}: {recorded:.6f} on {there}")
    if here != there:
        console.out("Another kind of processor gives the same losses to about six digits, and fewer as a run goes on.")


def baseline_of(reference: Path) -> Run:
    """The first seed of the reference's baseline; of its first scheme where it has no run of that name."""
    runs = find_runs(reference)
    if not runs:
        raise ConfigError(f"--beside {reference} contains no runs: give the folder or the pack of an experiment")
    wanted = runs[0].config.experiment.baseline
    return min(runs, key=lambda run: (run.manifest.scheme != wanted, run.manifest.seed))


def how_to_train(reference: Path, schemes: Sequence[str] = ()) -> str:
    """The commands that train and score a row for the reference's table, with its seeds.

    Arguments: schemes, those of the row; by default a class in a file that is to be written.
    """
    run = baseline_of(reference)
    if run.manifest.command is None:
        return (
            f"{reference.name} does not record the command that trained it; its settings are in {run.path}/config.yaml"
        )
    seeds = sorted({other.manifest.seed for other in find_runs(reference)})
    words = [word for word in run.manifest.command if word.partition("=")[0].partition(".")[0] not in OF_ONE_RUN]
    words = [f"scheme={','.join(schemes) or 'my_scheme.py:MyScheme'}", *words]
    words += [f"seed={','.join(map(str, seeds))}", "experiment_name=mine"]
    train = f"train -m {shlex.join(words)}"
    if "scheme.lr" in run.manifest.identity:  # each scheme of the reference has a learning rate of its own
        train = f"tune {shlex.join(words)}   # ends with the command that trains at the best rate"
    return f"To train a comparable row:\n  posbench {train}\n  posbench eval mine"
