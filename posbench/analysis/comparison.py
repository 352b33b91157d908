"""Compare the runs that share a table: their losses, cells, tests and notes, from the tidy table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from posbench.analysis.agreement import check_agreement, finished_runs
from posbench.analysis.cells import means, measure
from posbench.analysis.families import planned_tests
from posbench.analysis.long_range_order import LongRangeOrder, long_range_order
from posbench.analysis.options import MARGIN
from posbench.analysis.search import RateSearch, choose_rates
from posbench.analysis.statistics import (
    CONFIRMING,
    ENOUGH_SEEDS,
    FEWEST_SEEDS,
    ROUNDING,
    compare,
    fixed_pairs,
    interval_of,
    pairs_of,
    verdict,
)
from posbench.analysis.table import config_of
from posbench.config import ConfigError
from posbench.evaluation.protocols import NGRAM
from posbench.evaluation.protocols.section import ComparedRuns
from posbench.runs import DIED


@dataclass(frozen=True)
class Comparison(ComparedRuns):
    """The runs that one report compares, with the tests and notes about them."""

    experiment: str
    second: pd.DataFrame | None  # losses at each scheme's second kept rate; None without a finished search
    pairs: pd.DataFrame  # a row per pair of schemes, see `statistics.compare`
    ngrams: pd.DataFrame  # losses of n-gram models, a row per order
    long_range_order: LongRangeOrder | None  # what order beyond 32 tokens is worth; None without results of `order`
    search: RateSearch | None  # the search that chose the learning rates; None: each scheme has runs at one rate only
    planned_tests: int  # of loops in these experiments, for which the claimed pairs are corrected; 0: no loop
    # Groups of schemes whose pairs the experiment fixed before training; () if none of these pairs was trained.
    primary: Sequence[str]
    failed: dict[str, dict[int, str]]  # scheme -> seed -> why its run died
    undecided: set[frozenset[str]]  # pairs that stay open, whatever the tests say: of failed and of late schemes
    split_in_two: list[str]  # schemes of which only some seeds use the order of distant tokens by the end
    late_at_best: list[str]  # schemes with late seeds at the best of their kept rates only: their pairs are open
    left_out: list[str]  # runs that are not compared, and why
    notes: list[str]

    @property
    def seeds(self) -> list[int]:
        return list(self.losses.index)

    @property
    def ranked(self) -> list[str]:
        """Return the schemes that have enough seeds to be ranked."""
        fewest = fewest_seeds(self.split_in_two)
        return [scheme for scheme in self.schemes if self.losses[scheme].notna().sum() >= fewest]

    @property
    def can_rank(self) -> bool:
        return len(self.ranked) > 1 and not self.unfinished

    @property
    def unfinished(self) -> dict[str, int]:
        """Return {scheme: number of runs that its learning-rate search still needs}, without zeros."""
        # While any scheme needs some, the report ranks nothing.
        if self.search is None:
            return {}
        unfinished = {}
        for scheme in self.schemes:
            # A scheme without a search needs none.
            runs_left = self.search.left(scheme) if scheme in self.search.losses else 0
            if runs_left:
                unfinished[scheme] = runs_left
        return unfinished

    @property
    def is_at_best_rates(self) -> bool:
        """Return whether every scheme has a finished search for its rates, so that claims hold at best rates."""
        return self.search is not None and self.search.is_complete(self.schemes)

    @property
    def undecidable(self) -> list[str]:
        """Return the schemes that diverged with some seed at each kept rate: no test decides them."""
        if self.search is None or not self.is_at_best_rates:
            return []
        undecidable = []
        for scheme in self.schemes:
            losses = self.search.losses[scheme][self.search.kept(scheme)]  # a row per seed, a column per kept rate
            # Infinite: diverged. Every column has such a row.
            if np.isinf(losses).any().all():
                undecidable.append(scheme)
        return undecidable

    @property
    def constant_pairs(self) -> list[tuple[str, str]]:
        """Return the pairs whose losses differ by the same amount with every seed, which are not tested."""
        tested = self.pairs[self.pairs["p_claimed"].notna() & (self.pairs["difference"] > 0)]
        constant = tested[tested["sd"] <= ROUNDING]
        return list(zip(constant["left"], constant["right"], strict=True))

    @property
    def scope(self) -> str:
        """Return the learning rates at which the claims hold, as text: `at best rates`."""
        if self.is_at_best_rates:
            return "at best rates"
        if self.runs["train.lr"].nunique() == 1:
            return "at this rate"
        return "at these rates"

    @cached_property
    def config(self) -> dict[str, Any]:
        """Return the first run's configuration as nested dicts, for settings that all runs share."""
        return config_of(str(self.runs["path"].iloc[0]))

    @property
    def fixed(self) -> set[frozenset[str]]:
        """Return the pairs of schemes that the experiment fixed before training, or none if none was trained."""
        return fixed_pairs(self.primary)

    @property
    def fixed_but_untested(self) -> list[list[str]]:
        """Return the pairs that were fixed before training and are not tested here."""
        tested = self.pairs.dropna(subset="p_claimed")
        tested_pairs = set(map(frozenset, zip(tested["left"], tested["right"], strict=True)))
        return sorted(map(sorted, self.fixed - tested_pairs))

    @property
    def without_tests(self) -> list[str]:
        """Return the ranked schemes that share too few seeds with every other one for a test."""
        tested = self.pairs.dropna(subset="p")
        return [scheme for scheme in self.ranked if scheme not in {*tested["left"], *tested["right"]}]

    @cached_property
    def ranking(self) -> pd.DataFrame:
        """Return the final losses, a row per scheme, best first: seeds, loss, gap to the baseline, verdict.

        Loss and gap have the ends of their 95 % interval over seeds (_low, _high). The verdict is one of
        `statistics.verdict`, or failed; empty for the baseline, and for pairs that are not tested.
        """
        rows = []
        for scheme in self.schemes:
            losses = self.losses[scheme].dropna()
            row = {"scheme": scheme, "seeds": losses.index.to_list()} | interval_of("loss", losses)
            row |= interval_of("gap", (losses - self.losses[self.baseline]).dropna())
            row["verdict"] = verdict(self.pairs, scheme, self.baseline) if self.can_rank else ""
            if scheme in self.failed and scheme != self.baseline:
                row["verdict"] = "failed"
            rows.append(row)
        return pd.DataFrame(rows)


def build(
    summary: pd.DataFrame,
    rows: pd.DataFrame,
    baseline: str | None = None,
    margin: float = MARGIN,
    group_by: str = "",
    doubt: str = "seeds",
    confirming: bool = False,
) -> Comparison:
    """Return the Comparison of the summary's finished runs.

    Arguments: baseline, the scheme that gaps are measured against; margin, nats per token below which losses count as
    equal; group_by, settings that the runs are already grouped by; doubt, what intervals are over, seeds or documents;
    confirming, whether to read the seeds that confirm a winner too.
    Raises: ConfigError if no run is finished, runs differ in other settings, or the named baseline has no run.
    """
    # If an experiment has a search for learning rates, only its runs at each scheme's best rate are compared.
    compared, search = choose_rates(summary)
    left_out: list[str] = []
    if not confirming:
        compared, left_out = _without_confirming(compared)
    runs, unfinished = finished_runs(compared)
    left_out += unfinished
    # A confirmation reads no other seeds.
    failed = _failed(compared[compared["seed"].isin(CONFIRMING)] if confirming else compared)
    if search:
        # `choose_rates` left these seeds out.
        beyond_planned = summary[summary["searched"] & (summary["seed"] >= search.planned)]
        for (scheme, rate), seeds in beyond_planned.groupby(["scheme", "train.lr"])["seed"]:
            numbers = ", ".join(map(str, sorted(seeds)))
            left_out.append(
                f"{scheme} at {rate:g}, seeds {numbers}: beyond the {search.planned} planned seeds, so the test does "
                "not read them"
            )
    check_agreement(runs, group_by)
    wanted_baseline = baseline or baseline_of(runs)
    losses = runs.pivot(index="seed", columns="scheme", values="loss").sort_index()
    losses.columns.name = None  # else pandas would carry the name `scheme` into later tables
    # A scheme without some of the seeds is ranked by how far it is from the complete schemes with the same seeds.
    complete = losses.loc[:, losses.notna().all()]
    mean_level = losses.mean()
    if complete.shape[1]:
        mean_level = losses.sub(complete.mean(axis=1), axis=0).mean()
    ranked = sorted((float(value), str(scheme)) for scheme, value in mean_level.items())
    losses = losses[[scheme for _, scheme in ranked]]
    used_baseline = wanted_baseline if wanted_baseline in losses else str(losses.columns[0])
    if baseline and baseline not in losses:
        raise ConfigError(
            f"the baseline {baseline!r} has no finished run here: choose one of {', '.join(map(str, losses.columns))}"
        )
    notes: list[str] = []
    length = int(runs["train.context_length"].iloc[0])
    holes: dict[tuple[str, str], list[str]] = {}
    cells = measure(rows, runs, used_baseline, length, notes, holes)
    if summary.get("damaged") is not None:
        for text in summary["damaged"].dropna():
            notes += text.splitlines()
    # None and [] hold unless a finished search compares two rates of each scheme.
    second: pd.DataFrame | None = None  # losses at the second kept rates
    at_second: pd.DataFrame | None = None  # the runs at these rates
    late: list[str] = []
    if search and search.is_complete(losses.columns):
        second = search.second(losses.columns).reindex(losses.index)
        at_second = _runs_at_second_rates(summary, search, losses.columns)
        late = [str(scheme) for scheme in losses if search.is_late_at_best(str(scheme))]
    split_schemes = split_in_two(runs)
    fewest = fewest_seeds(split_schemes)
    planned = planned_tests(runs["path"])
    primary = _primary(runs, losses)
    undecided = pairs_of({*late, *failed}, losses)
    pairs = compare(losses, second, margin, primary, fewest, planned, undecided)
    return Comparison(
        experiment=", ".join(dict.fromkeys(runs["experiment"])),
        runs=runs,
        wanted_baseline=wanted_baseline,
        losses=losses,
        second=second,
        cells=cells,
        pairs=pairs,
        ngrams=_ngrams(rows, losses, used_baseline),
        long_range_order=long_range_order(rows, runs, cells, at_second, primary, fewest, failed),
        search=search,
        planned_tests=planned,
        primary=primary,
        failed=failed,
        undecided=undecided,
        split_in_two=split_schemes,
        late_at_best=late,
        left_out=left_out,
        notes=notes,
        holes=holes,
        doubt=doubt,
    )


def _runs_at_second_rates(summary: pd.DataFrame, search: RateSearch, schemes: Iterable[str]) -> pd.DataFrame:
    # Each scheme keeps two rates, the best first.
    is_planned = summary["searched"] & (summary["seed"] < search.planned)
    parts = []
    for scheme in schemes:
        is_second = (summary["scheme"] == scheme) & (summary["train.lr"] == search.kept(scheme)[1])
        parts.append(summary[is_planned & is_second])
    return pd.concat(parts)


def _without_confirming(compared: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    # A winner of a loop was chosen by the other seeds, so the two kinds are never pooled.
    is_confirming = compared["seed"].isin(CONFIRMING)
    if not is_confirming.any() or is_confirming.all():
        return compared, []
    schemes = ", ".join(sorted(set(compared.loc[is_confirming, "scheme"])))
    seeds = f"seeds {CONFIRMING.start} to {CONFIRMING[-1]}"
    line = f"{seeds} of {schemes}: they are kept to confirm winners (posbench judge --confirm)"
    return compared[~is_confirming], [line]


def _failed(compared: pd.DataFrame) -> dict[str, dict[int, str]]:
    died = compared[compared["status"] == DIED].sort_values(["scheme", "seed"])
    failed: dict[str, dict[int, str]] = {}
    for scheme, seed, reason in died.reindex(columns=["scheme", "seed", "reason"]).to_numpy().tolist():
        failed.setdefault(str(scheme), {})[seed] = str(reason)
    return failed


def _primary(runs: pd.DataFrame, losses: pd.DataFrame) -> Sequence[str]:
    experiment = config_of(str(runs["path"].iloc[0])).get("experiment", {})
    primary = experiment.get("primary") or ()
    # An experiment of another name did not fix pairs for these runs. The first words of names are compared, because
    # headline_gpu_muon is a part of headline_muon.
    chosen = re.split("[-_]", str(experiment.get("name")))[0]
    name = re.split("[-_]", str(runs["experiment"].iloc[0]))[0]
    has_trained_pair = any(pair <= {*losses.columns} for pair in fixed_pairs(primary))
    return primary if has_trained_pair and chosen == name else ()


def baseline_of(runs: pd.DataFrame) -> str:
    """Return the baseline that the experiment of the first of these runs names, or "".

    If only its continued runs (arms) are here, it is the one that changed nothing, which is called `plain`.
    """
    baseline = str(config_of(str(runs["path"].iloc[0])).get("experiment", {}).get("baseline") or "")
    schemes, unchanged = set(runs["scheme"]), f"{baseline}_plain"
    return unchanged if baseline not in schemes and unchanged in schemes else baseline


def split_in_two(runs: pd.DataFrame) -> list[str]:
    """Return the schemes of which some runs, but not all, use the order of distant tokens by the end."""
    scored = runs.reindex(columns=["scheme", "onset_tokens"]).dropna()
    return [str(s) for s, onsets in scored.groupby("scheme")["onset_tokens"] if np.isfinite(onsets).nunique() > 1]


def fewest_seeds(split_in_two: Sequence[str]) -> int:
    """Return how many seeds a ranked scheme needs: more if the seeds of some scheme split in two."""
    return ENOUGH_SEEDS if split_in_two else FEWEST_SEEDS


def _ngrams(rows: pd.DataFrame, losses: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """Return the losses of n-gram models and their gaps to the baseline, a row per order."""
    table = []
    of_ngrams = rows[rows["protocol"] == NGRAM]
    # Rows of n-gram models have the order in the column `first`, and the model's name as the scheme.
    orders = of_ngrams[["first", "scheme"]].drop_duplicates().sort_values("first")
    for order, name in orders.itertuples(index=False):
        per_seed = means(of_ngrams[of_ngrams["scheme"] == name], ["seed"]).reindex(losses.index)
        # NaN: a seed without this order. Only orders that every seed has are compared.
        if per_seed.notna().all():
            row = {"scheme": name, "order": int(order), "seeds": len(per_seed)}
            row |= interval_of("loss", per_seed.to_numpy()) | interval_of("gap", (per_seed - losses[baseline]).dropna())
            table.append(row)
    return pd.DataFrame(table)
