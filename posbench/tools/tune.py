"""Search for the best learning rates of each scheme of an experiment (`posbench tune`); reports use the runs.

    runs/demo-tune/lr=0.005/<scheme>/seed=0/    an ordinary run of the experiment at one of the rates

`posbench.analysis.search` defines the search (docs/statistics.md). A search that was stopped goes on when the same
command is given again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from rich.console import Console

from posbench.analysis.search import (
    FIRST_SEEDS,
    RateSearch,
    merge_searches,
    rates_around,
    runs_per_scheme,
    search_of,
    with_searches,
)
from posbench.analysis.table import read
from posbench.composition.compose import compose, quoted
from posbench.composition.sweep import SweepJob, run_application, sweep_of
from posbench.config import Config, ConfigError
from posbench.config.units import count_of
from posbench.reporting.sections import rate_table
from posbench.reporting.text import as_text
from posbench.runs import find_runs, run_at
from posbench.runs.finding import search_folder
from posbench.system.console import Say, plain_table
from posbench.training import Died
from posbench.training.stacked_runs import stacks_here, stacks_of, train_stacked


@dataclass(frozen=True)
class Tuning:
    """A search for the best learning rates of each scheme of one experiment."""

    words: tuple[str, ...]  # overrides of a run, except its scheme, rate and seed
    schemes: dict[str, str]  # name -> choice of conf/scheme
    folder: Path  # the experiment's folder
    planned: int  # seeds at each kept rate
    rates: list[float]  # the rates to try
    is_stacked: bool  # whether runs of a scheme may train as one

    def search(self) -> RateSearch:
        """Return the search as far as it has been trained, from its runs in folders and packs (zip files)."""
        places = [place for place in with_searches([self.folder]) if place.is_dir() or find_runs(place)]
        summary = merge_searches(read(places)[0])
        tried = {*self.rates}
        runs = summary[summary["scheme"].isin(list(self.schemes))]
        if len(runs):
            # Runs in the experiment's own folder count too, if their rate is one of the search's.
            runs = runs[runs["train.lr"].isin(tried)]
        return search_of(runs, self.planned)

    def missing(self) -> dict[tuple[float, int], list[str]]:
        """Return {(rate, seed): schemes} for the missing runs that can be trained now, in the order of seeds."""
        search = self.search()
        missing: dict[tuple[int, float], list[str]] = {}
        # By seed, so that all rates have their first seed before any has its second.
        for scheme in self.schemes:
            for rate, seed in search.missing(scheme, self.rates):
                missing.setdefault((seed, rate), []).append(scheme)
        return {(rate, seed): missing[seed, rate] for seed, rate in sorted(missing)}


def tune(
    words: Sequence[str],
    job: Callable[[Config], object],
    say: Say,
    console: Console,
    train: bool = True,
) -> dict[Path, RateSearch]:
    """Train the missing runs of learning-rate searches, print the results, and return {experiment's folder: search}.

    Arguments: job, trains a run; train, False to only print how far the search is.
    Raises: ConfigError for words that are refused, and if a run neither finished nor diverged.
    """
    swept = sweep_of(words)
    if any(word.startswith("train.from_run=") for word in words):
        raise ConfigError("posbench tune searches rates for runs from their first step: leave out train.from_run")
    refused = [key for key in swept if key not in ("scheme", "seed", "data")]
    tunings = []
    if not refused:
        tunings = [_tuning(words, swept, data) for data in swept.get("data", [""])]
    if len({tuning.folder for tuning in tunings}) < len(tunings):
        # Two texts under one name would share the folder of the search.
        refused.append("data (under one experiment_name)")
    if refused:
        raise ConfigError(
            f"posbench tune sweeps learning rates over schemes, so {', '.join(refused)} cannot be swept too: give one "
            "value"
        )

    def run(words: Sequence[str]) -> None:
        task = SweepJob(
            job, say, lambda folder: run_at(folder).is_finished, stacks=stacks_of, stacked_job=train_stacked
        )
        run_application("posbench tune", words, task)

    return {tuning.folder: _search(tuning, run, console, train) for tuning in tunings}


def _tuning(words: Sequence[str], swept: Mapping[str, list[str]], data: str) -> Tuning:
    if data:
        words_of_runs = [word for word in words if word.partition("=")[0] != "data"]
        words = [*words_of_runs, f"data={data}"]
    # The last scheme that was named counts, as on the command line of `train`.
    single = [word.partition("=")[2] for word in words if word.startswith("scheme=")]
    choices = swept.get("scheme", single[-1:] or ["qk_rope"])
    common = [word for word in with_planned_seeds(words) if word.partition("=")[0] != "scheme"]
    config = compose([*common, f"scheme={choices[0]}"])
    folder = Path(config.runs_dir) / config.experiment_name
    # Hydra fills in the rate of each run, so that each rate has a folder.
    run_words = (*common, f"runs_dir={quoted(str(search_folder(folder)))}", "experiment_name='lr=${scheme.lr}'")
    schemes = {compose([*common, f"scheme={choice}"]).scheme.name: choice for choice in choices}
    rates = rates_around(config.shared_lr)
    return Tuning(run_words, schemes, folder, config.experiment.planned_seeds, rates, stacks_here(config))


def with_planned_seeds(words: Sequence[str]) -> list[str]:
    """Return the words of a search with `experiment.planned_seeds=3` for `seed=0,1,2`."""
    seeds = [word.partition("=")[2] for word in words if word.startswith("seed=")]
    rest = [word for word in words if not word.startswith("seed=")]
    return [*rest, f"experiment.planned_seeds={_planned(seeds[-1])}"] if seeds else rest


def _planned(seeds: str) -> int:
    # Return the number of seeds that `seed=0,1,2` asks for.
    numbers = seeds.split(",")
    if numbers != [str(n) for n in range(len(numbers))] or len(numbers) < FIRST_SEEDS:
        raise ConfigError(
            f"seed={seeds}: a search has the seeds 0, 1, 2, ..., at least {FIRST_SEEDS}: write seed=0,1,2, or their "
            "number as experiment.planned_seeds=3"
        )
    return len(numbers)


def _search(tuning: Tuning, run: Callable[..., object], console: Console, train: bool) -> RateSearch:
    # The table is printed even if training is interrupted.
    sweeps_of = _sweeps_by_scheme if tuning.is_stacked else _sweeps_by_seed
    try:
        # First all rates get their first seeds, then the kept rates the other seeds.
        while train:
            missing = tuning.missing()
            if not missing:
                break
            for sweep in sweeps_of(tuning, missing):
                with suppress(Died):  # raised if the only run died, or all of them with the same message
                    run(["-m", *tuning.words, *sweep])
            # No progress: a run has neither finished nor died.
            if missing == tuning.missing():
                (rate, seed), schemes = next(iter(missing.items()))
                raise ConfigError(
                    f"{schemes[0]} seed {seed} at {rate:g} is not finished: see its message above, and run the same "
                    "command again to resume"
                )
    finally:
        search = tuning.search()
        _show(tuning, search, console)
    return search


def _sweeps_by_seed(tuning: Tuning, missing: Mapping[tuple[float, int], list[str]]) -> Iterator[list[str]]:
    for (rate, seed), schemes in missing.items():
        choices = ",".join(tuning.schemes[scheme] for scheme in schemes)
        yield [f"scheme={choices}", f"scheme.lr={rate!r}", f"seed={seed}"]


def _sweeps_by_scheme(tuning: Tuning, missing: Mapping[tuple[float, int], list[str]]) -> Iterator[list[str]]:
    # A sweep may have runs that are finished, which training skips.
    for scheme, choice in tuning.schemes.items():
        places = [place for place, schemes in missing.items() if scheme in schemes]
        if places:
            rates, seeds = (sorted(set(values)) for values in zip(*places, strict=True))
            yield [f"scheme={choice}", f"scheme.lr={','.join(map(repr, rates))}", f"seed={','.join(map(str, seeds))}"]


def _show(tuning: Tuning, search: RateSearch, console: Console) -> None:
    if search.losses:
        frame = as_text(rate_table(search))
        table = plain_table(*frame.columns)
        for scheme, *texts in frame.to_numpy().tolist():
            table.add_row(scheme, *(text.replace("*", "") for text in texts))
        console.print(table)
    left = {scheme: search.left(scheme) for scheme in tuning.schemes}
    total = len(tuning.schemes) * runs_per_scheme(tuning.planned)
    experiment = tuning.folder.name
    # Finished: each scheme's best rates, and the next command.
    if not any(left.values()):
        for scheme in tuning.schemes:
            best, second = search.kept(scheme)
            console.out(f"{scheme}: best rate {best:g}, also kept {second:g}")
        console.out(f"The search is finished. Next: posbench eval {experiment}-tune && posbench report {experiment}")
        return
    console.out(f"Left to train: {sum(left.values())} of {count_of(total, 'run')} (branches are not counted):")
    for (rate, seed), schemes in tuning.missing().items():
        console.out(f"  seed {seed} at {rate:g}: {', '.join(schemes)}")
    # Until all rates of a scheme have their first seeds, it has no kept rates.
    if any(not search.losses.get(scheme, pd.DataFrame()).size or not search.kept(scheme) for scheme in tuning.schemes):
        console.out(f"  then the two best rates of each scheme, to {tuning.planned} seeds")
    console.out("The same command goes on. Nothing is ranked before the search is finished.")
    console.out(f"posbench judge {experiment} still says what the runs of the experiment itself show, at their rate.")
