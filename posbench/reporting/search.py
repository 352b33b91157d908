"""Find each scheme's best learning rate in an experiment that tried several, and the runs at this rate."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd

from posbench.reporting.statistics import best_rate
from posbench.runs import find_runs
from posbench.runs.finding import search_folder

FIRST_PILOT = 1000  # runs from this seed on are pilots, on other text (posbench/tools/tune.py)


def with_searches(places: Iterable[str | Path]) -> list[Path]:
    """Return these paths, each followed by the folder of its learning-rate search if that has more than pilots."""
    with_folders: list[Path] = []
    for place in map(Path, places):
        folder = search_folder(place.with_suffix("") if place.suffix == ".zip" else place)
        searched = [folder] if any(run.manifest.seed < FIRST_PILOT for run in find_runs(folder)) else []
        with_folders += [place] * bool(place.is_dir() or find_runs(place) or not searched) + searched
    return with_folders


def merge_searches(summary: pd.DataFrame) -> tuple[pd.DataFrame, bool]:
    """Return the summary with runs of a learning-rate search under their experiment's name, and whether it had any.

    Left out are pilots and branches (shorter runs) of a search, and runs that the experiment's own folder repeats.
    """
    if summary.empty:
        return summary, False
    folders = summary["path"].map(lambda path: Path(path).parents[2].name)
    is_searched = folders.str.endswith("-tune") & summary["experiment"].str.startswith("lr=")
    if not is_searched.any():
        return summary, False
    experiment = folders.str.removesuffix("-tune").where(is_searched, summary["experiment"])
    is_branch = summary["train.tokens"] != summary["train.trunk_tokens"]
    is_pilot = summary["seed"] >= FIRST_PILOT
    runs = summary.assign(experiment=experiment)[~(is_searched & (is_branch | is_pilot))]
    return runs.drop_duplicates(["experiment", "scheme", "seed", "train.lr"]), True


def at_best_rates(runs: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the runs at each scheme's best learning rate, and the mean loss at every rate that was tried.

    The best rate is chosen by the mean loss over the seeds that were run at all rates, if any. A rate at which a run
    died is never chosen. The table of losses has a row per scheme and rate, with columns scheme, train.lr, loss (nats
    per token), status, seeds, trained_at (the best rate), experiment.
    """
    tried, chosen = [], []
    for (name, scheme), of_scheme in runs.groupby(["experiment", "scheme"], sort=False):
        losses = of_scheme.pivot(index="seed", columns="train.lr", values="loss")
        died = of_scheme.loc[of_scheme["status"] == "died", "train.lr"].unique()
        means = losses.dropna().mean() if len(losses.dropna()) else losses.mean()
        means[means.index.isin(died)] = np.inf
        best = best_rate({float(rate): loss for rate, loss in zip(means.index, means, strict=True)})
        chosen.append(of_scheme[of_scheme["train.lr"] == best])
        seeds = losses.notna().sum()
        status = ["died" if rate in died else "finished" for rate in means.index]
        columns = {"train.lr": means.index, "loss": means.replace(np.inf, np.nan).to_numpy(), "status": status}
        same = {"scheme": scheme, "seeds": seeds.to_numpy(), "trained_at": best, "experiment": name}
        tried.append(pd.DataFrame(columns | same))
    return pd.concat(chosen).sort_index(), pd.concat(tried, ignore_index=True)
