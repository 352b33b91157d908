"""Find each scheme's best learning rates in an experiment that tried several (`posbench tune`).

    runs/demo-tune/lr=0.005/<scheme>/seed=0/    a run of the experiment `demo` at one of the rates

NUM_RATES rates get FIRST_SEEDS seeds each, then the KEPT rates with the lowest mean loss over these seeds get the
planned number of seeds (`experiment.planned_seeds`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from posbench.analysis.agreement import finished_runs
from posbench.analysis.table import config_of
from posbench.config.fields import PLANNED_SEEDS
from posbench.runs import DIED, FINISHED, Run, find_runs
from posbench.runs.finding import search_folder

FIRST_PILOT = 1000  # runs from this seed on chose rates on other text, before searches were scored
NUM_RATES, FIRST_SEEDS, KEPT = 5, 2, 2
FACTOR = 2.0  # ratio of neighbouring rates
_OVER = (FINISHED, DIED)
_RATE_FOLDER = r"lr=[0-9.]+(e-?[0-9]+)?"  # name of the experiment whose runs have one rate


def rates_around(lr: float) -> list[float]:
    """Return the NUM_RATES learning rates that a search tries, in ascending order, with `lr` in the middle."""
    # Six digits, so that rates have short names in folders.
    return [float(f"{lr * FACTOR ** (n - NUM_RATES // 2):.6g}") for n in range(NUM_RATES)]


def runs_per_scheme(planned: int) -> int:
    """Return how many runs a search trains for each scheme, with `planned` seeds at the kept rates."""
    return NUM_RATES * FIRST_SEEDS + KEPT * (planned - FIRST_SEEDS)


@dataclass(frozen=True)
class RateSearch:
    """The runs of one experiment at several learning rates, and the rates that they choose for each scheme."""

    runs: pd.DataFrame  # scheme, train.lr, seed, loss (nats per token, infinite if the run diverged), onset_tokens
    planned: int  # seeds at each kept rate

    @cached_property
    def losses(self) -> dict[str, pd.DataFrame]:
        """Return the losses by scheme: a row per seed, a column per learning rate, NaN for a missing run."""
        by_scheme = self.runs.groupby("scheme", sort=False)
        return {
            str(scheme): runs.pivot_table(index="seed", columns="train.lr", values="loss", aggfunc="first")
            for scheme, runs in by_scheme
        }

    def kept(self, scheme: str) -> list[float]:
        """Return the rates kept for more seeds, best first; empty until all rates have their first seeds."""
        losses = self.losses[scheme]
        # Rates that have a loss with each of the first seeds.
        complete = losses.reindex(range(FIRST_SEEDS)).dropna(axis=1)
        if complete.shape[1] < NUM_RATES:
            return []
        # Chosen by the first seeds only, and then ordered by all planned ones.
        at_kept = losses[complete.mean().nsmallest(KEPT).index].reindex(range(self.planned))
        # NaN: a seed that some kept rate lacks. A stable sort, so that equal means keep the order of the first seeds.
        return [float(rate) for rate in at_kept.dropna().mean().sort_values(kind="stable").index.to_numpy()]

    def best(self, scheme: str) -> float:
        """Return the rate with the lowest mean loss over the seeds that all compared rates share."""
        losses = self.losses[scheme]
        # The kept rates or, if the search is unfinished, all rates so far.
        losses = losses[self.kept(scheme) or losses.columns]
        # Rates are compared on the same seeds.
        shared = losses.dropna()
        if shared.empty:
            shared = losses
        means = shared.mean()
        return float(means.index.to_numpy()[means.argmin()])

    def at_middle_rate(self, baseline: str) -> tuple[float, dict[str, pd.Series]]:
        """Return the rate in the middle, and the schemes' gaps to `baseline` there, by seed."""
        rates = sorted(self.losses[baseline].columns.to_numpy(float))
        middle, gaps = float(rates[len(rates) // 2]), dict[str, pd.Series]()
        for scheme, losses in self.losses.items():
            if middle in losses and scheme != baseline:
                gaps[scheme] = (losses[middle] - self.losses[baseline][middle]).dropna()
        return middle, gaps

    def using_order(self, scheme: str, rate: float) -> tuple[int, int]:
        """Return how many seeds at this rate use the order of distant tokens by the end, and how many say so."""
        is_at_rate = (self.runs["scheme"] == scheme) & (self.runs["train.lr"] == rate)
        is_at_rate &= self.runs["seed"] < self.planned
        onsets = self.runs.loc[is_at_rate, "onset_tokens"].dropna().astype(float)
        return int(np.isfinite(onsets).sum()), len(onsets)

    def is_late_at_best(self, scheme: str) -> bool:
        """Return whether seeds are late (use no long-range order) at the best rate, and none at the other."""
        best, second = self.kept(scheme)
        using, seeds = self.using_order(scheme, best)
        using_at_other, seeds_at_other = self.using_order(scheme, second)
        # Above 0, because without seeds that say so nothing is known of the other rate.
        return using < seeds and 0 < using_at_other == seeds_at_other

    def missing(self, scheme: str, rates: Iterable[float] = ()) -> list[tuple[float, int]]:
        """Return (rate, seed) of each run of the scheme that can be trained next, in order.

        Arguments: rates, to try if the search has just begun.
        """
        losses = self.losses.get(scheme, pd.DataFrame())
        # The kept rates get all planned seeds.
        seeds, candidates = range(self.planned), list[float]()
        if scheme in self.losses:
            candidates = self.kept(scheme)
        # Before rates are kept, all rates get the first seeds.
        if not candidates:
            seeds, candidates = range(FIRST_SEEDS), sorted({*rates, *map(float, losses.columns)})
        is_missing = losses.reindex(index=seeds, columns=candidates).isna()
        missing = []
        for seed in seeds:
            for rate in candidates:
                if is_missing.at[seed, rate]:
                    missing.append((rate, seed))
        return missing

    def left(self, scheme: str) -> int:
        """Return how many runs the search still needs for this scheme, at most."""
        if scheme not in self.losses:
            return runs_per_scheme(self.planned)
        if self.kept(scheme):
            return len(self.missing(scheme))
        has_first_seeds = self.losses[scheme].reindex(range(FIRST_SEEDS)).notna()
        # Runs whose rate is not known yet are counted.
        return runs_per_scheme(self.planned) - int(has_first_seeds.to_numpy().sum())

    @property
    def table(self) -> pd.DataFrame:
        """Return the runs with a column `is_kept`: whether the search kept the run's rate for more seeds."""
        kept_rates = {scheme: self.kept(scheme) for scheme in self.losses}
        is_kept = []
        for scheme, rate in zip(self.runs["scheme"], self.runs["train.lr"], strict=True):
            is_kept.append(rate in kept_rates[scheme])
        return self.runs.assign(is_kept=is_kept)

    def is_complete(self, schemes: Iterable[str]) -> bool:
        """Return whether all these schemes have all planned seeds at the rates that the search kept."""
        return all(scheme in self.losses and self.kept(scheme) and not self.missing(scheme) for scheme in schemes)

    def second(self, schemes: Iterable[str]) -> pd.DataFrame:
        """Return losses at each scheme's second best kept rate: a row per planned seed, a column per scheme."""
        columns = {}
        for scheme in schemes:
            _, second = self.kept(scheme)
            columns[scheme] = self.losses[scheme][second].reindex(range(self.planned))
        return pd.DataFrame(columns)


def with_searches(places: Iterable[str | Path]) -> list[Path]:
    """Return these paths, each followed by the folder of its learning-rate search if that has runs."""
    with_folders: list[Path] = []
    for place in map(Path, places):
        experiment = place.with_suffix("") if place.suffix == ".zip" else place
        folder = search_folder(experiment)
        is_searched = any(map(_counts, find_runs(folder)))
        # A path that has nothing itself is left out if its search has runs.
        if not is_searched or place.is_dir() or find_runs(place):
            with_folders.append(place)
        if is_searched:
            with_folders.append(folder)
    return with_folders


def _counts(run: Run) -> bool:
    # Old pilots do not count.
    seed = run.path.name.removeprefix("seed=")
    return seed.isdecimal() and int(seed) < FIRST_PILOT


def merge_searches(summary: pd.DataFrame) -> pd.DataFrame:
    """Return the summary with runs of a search under their experiment's name, marked in the column `searched`."""
    if summary.empty:
        return summary.assign(searched=False)
    searched = [Run(Path(path)).searched_experiment for path in summary["path"]]
    is_searched = pd.Series([folder is not None for folder in searched], summary.index)
    if not is_searched.any():
        return summary.assign(searched=False)
    # A run of a search records `lr=<rate>` as its experiment. Elsewhere the experiment stays as it was recorded.
    names = [folder.name if folder else "" for folder in searched]
    experiment = pd.Series(names, summary.index).where(is_searched, summary["experiment"])
    is_branch = ~summary["experiment"].str.fullmatch(_RATE_FOLDER)  # `lr=0.005-2M` is a branch of `lr=0.005`
    is_pilot = summary["seed"] >= FIRST_PILOT
    # Old pilots (unscored searches on other text) and branches (shorter runs) of a search do not count.
    runs = summary.assign(experiment=experiment)[~(is_searched & (is_branch | is_pilot))]
    # The experiment's own folder may repeat runs of the search, also ones that were interrupted there.
    is_over = runs["status"].isin(_OVER)
    repeats = pd.concat([runs[is_over], runs[~is_over]]).duplicated(["experiment", "scheme", "seed", "train.lr"])
    runs = runs[~repeats.reindex(runs.index)]
    # All runs of an experiment with a search are marked, also those in the experiment's own folder.
    return runs.assign(searched=runs["experiment"].isin(set(experiment[is_searched])))


def search_of(runs: pd.DataFrame, planned: int) -> RateSearch:
    """Return the search that consists of these runs, without those that neither finished nor died."""
    is_over = runs["status"].isin(_OVER)
    tried = runs[is_over].reindex(columns=["scheme", "train.lr", "seed", "loss", "diverged", "onset_tokens"])
    # A run that diverged has an infinite loss.
    tried = tried.assign(loss=tried["loss"].astype(float).where(tried["diverged"].isna(), np.inf))
    return RateSearch(tried.drop(columns="diverged"), planned)


def at_best_rates(runs: pd.DataFrame, planned: int) -> tuple[pd.DataFrame, RateSearch]:
    """Return the runs at each scheme's best rate, without seeds beyond the planned ones, and the search."""
    search = search_of(runs, planned)
    best = runs["scheme"].map({scheme: search.best(scheme) for scheme in search.losses})
    return runs[(runs["train.lr"] == best) & (runs["seed"] < planned)], search


def choose_rates(summary: pd.DataFrame) -> tuple[pd.DataFrame, RateSearch | None]:
    """Return the runs to compare, and the search that chose their learning rates, or None."""
    is_searched = summary.get("searched", pd.Series(False, summary.index))
    # Experiments without a search give all their runs.
    if not is_searched.any():
        return summary, None
    finished, _ = finished_runs(summary[is_searched])
    # The newest run of the search itself says how many seeds are planned; the experiment's own runs may plan others.
    is_of_search = finished["path"].map(lambda path: Run(Path(path)).searched_experiment is not None)
    newest = finished[is_of_search].sort_values("started").tail(1) if is_of_search.any() else finished
    experiment = config_of(str(newest["path"].iloc[0])).get("experiment", {})
    planned = int(experiment.get("planned_seeds", PLANNED_SEEDS))
    at_best, search = at_best_rates(summary[is_searched], planned)
    # Runs of experiments without a search stay as they are.
    return pd.concat([summary[~is_searched], at_best]).sort_index(), search
