"""Compare the runs that share a table: their losses, cells, tests and notes, from the tidy table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd

from posbench.analysis.agreement import check_agreement, finished_runs
from posbench.analysis.cells import measure
from posbench.analysis.families import planned_tests
from posbench.analysis.long_range_order import LongRangeOrder, long_range_order
from posbench.analysis.onset import decayed_points
from posbench.analysis.options import MARGIN
from posbench.analysis.search import RateSearch, choose_rates
from posbench.analysis.statistics import (
    CONFIRMING,
    ENOUGH_SEEDS,
    FEWEST_SEEDS,
    ROUNDING,
    compare,
    conclusions,
    fixed_pairs,
    interval_of,
    pairs_of,
    verdict,
)
from posbench.analysis.table import config_of, curves, where
from posbench.config import ConfigError
from posbench.config.units import short_count
from posbench.runs import DIED


@dataclass(frozen=True)
class Comparison:
    """Runs that share a table, by one metric: which they are, and everything that was measured in them.

    Text is compared over seeds (`SeedComparison`), a task by accuracy (`posbench.analysis.tasks`), and a model that was
    not trained here with itself under other options, over documents.
    """

    runs: pd.DataFrame  # rows of the summary, one per compared run
    schemes: list[str]  # best first
    wanted_baseline: str
    cells: pd.DataFrame  # every figure: a row per scheme, protocol, length, bucket and so on (`cells.measure`)
    holes: dict[tuple[str, str], list[str]]  # (protocol, text) -> which figures are left out, and why
    left_out: list[str]  # runs that are not compared, and why
    notes: list[str]
    metric: str = "loss"  # what schemes are compared by
    lower_is_better: bool = True
    doubt: str = "seeds"  # what intervals are over: seeds, or documents
    group: str = ""  # the value that these runs share, in a report by groups

    @property
    def title(self) -> str:
        """Return the names of the experiments that these runs belong to."""
        return ", ".join(dict.fromkeys(self.runs["experiment"]))

    @cached_property
    def config(self) -> dict[str, Any]:
        """Return the first run's configuration as nested dicts, for settings that all runs share."""
        return config_of(str(self.runs["path"].iloc[0]))

    @property
    def baseline(self) -> str:
        """Return the scheme that gaps are measured against: the requested one, or the best one if that has no run."""
        return self.wanted_baseline if self.wanted_baseline in self.schemes else self.schemes[0]

    @property
    def training_length(self) -> int:
        return int(self.runs["train.context_length"].iloc[0])

    @property
    def has_onsets(self) -> bool:
        """Return whether any run logged when it began to use long-range order. Continued runs do not log it."""
        return bool(self.runs.get("onset_tokens", pd.Series(dtype=float)).notna().any())

    @property
    def onsets(self) -> pd.DataFrame:
        """Return the tokens until each run used long-range order, infinite if never: seeds by schemes."""
        onsets = self.runs.pivot(index="seed", columns="scheme", values="onset_tokens")
        return onsets[self.schemes].sort_index()

    @property
    def files(self) -> dict[str, pd.DataFrame]:
        """Return the tables of all figures, by the names of their CSV files."""
        return {"table.csv": self.cells}

    @property
    def numbers(self) -> list[dict[str, Any]]:
        """Return the rows of the first table for `posbench report --json`."""
        raise NotImplementedError

    def logged(self, kind: str, figures: Sequence[str]) -> pd.DataFrame:
        """Return what the runs logged during training, as `curves` does, with scheme and seed."""
        return curves(self.runs["path"], kind, figures).merge(self.runs[["path", "scheme", "seed"]], on="path")

    def at(self, protocol: str | None = None, length: int | None = None, **equal: Any) -> pd.DataFrame:
        """Return the rows of `cells`, the table of all figures, with these values. None accepts any."""
        # By default figures of schemes as trained, on the runs' own text.
        return where(self.cells, **{"under": "", "text": "", "protocol": protocol, "length": length, **equal})


@dataclass(frozen=True, kw_only=True)
class SeedComparison(Comparison):
    """A comparison over seeds, with the tests that say which scheme beats which."""

    values: pd.DataFrame  # of the metric, nats per token: a row per seed, a column per scheme, best scheme first
    second: pd.DataFrame | None  # the same at each scheme's second kept rate; None without a finished search
    margin: float  # nats per token below which values count as equal
    pairs: pd.DataFrame  # a row per pair of schemes, see `statistics.compare`
    search: RateSearch | None  # the search that chose the learning rates; None: each scheme has runs at one rate only
    planned_tests: int  # of loops in these experiments, for which the claimed pairs are corrected; 0: no loop
    # Groups of schemes whose pairs the experiment fixed before training; () if none of these pairs was trained.
    primary: Sequence[str]
    failed: dict[str, dict[int, str]]  # scheme -> seed -> why its run died
    undecided: set[frozenset[str]]  # pairs that stay open, whatever the tests say: of failed and of late schemes
    split_in_two: list[str]  # schemes of which only some seeds use the order of distant tokens by the end
    late_at_best: list[str]  # schemes with late seeds at the best of their kept rates only: their pairs are open
    long_range_order: LongRangeOrder | None  # what order beyond 32 tokens is worth; None without results of `order`

    @property
    def files(self) -> dict[str, pd.DataFrame]:
        files = {"table.csv": self.cells, "pairs.csv": self.pairs}
        if self.search:
            files["rates.csv"] = self.search.table
        return files

    # ------------------------------------------------------------ what can be ranked

    @property
    def seeds(self) -> list[int]:
        return list(self.values.index)

    @property
    def ranked(self) -> list[str]:
        """Return the schemes that have enough seeds to be ranked."""
        fewest = fewest_seeds(self.split_in_two)
        return [scheme for scheme in self.schemes if self.values[scheme].notna().sum() >= fewest]

    @property
    def unranked(self) -> list[str]:
        return [scheme for scheme in self.schemes if scheme not in self.ranked]

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
    def scope(self) -> str:
        """Return the learning rates at which the claims hold, as text: `at best rates`."""
        if self.is_at_best_rates:
            return "at best rates"
        return "at this rate" if len(self.rates) == 1 else "at these rates"

    @property
    def rates(self) -> list[str]:
        return [f"{rate:g}" for rate in sorted(set(self.runs["train.lr"]))]

    # ------------------------------------------------------------ what the tests decide

    @property
    def conclusions(self) -> Mapping[str, Any]:
        """Return which claimed pairs are decided, equal and open; {} if nothing can be ranked."""
        return conclusions(self.ranked, self.pairs) if self.can_rank else {}

    @property
    def detectable(self) -> float:
        """Return the smallest gap, in nats, that a tested pair finds in 80 % of cases."""
        return float(self.pairs.dropna(subset="p_claimed")["detectable"].median())

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

    # ------------------------------------------------------------ figures

    @property
    def gaps(self) -> pd.DataFrame:
        """Return the values minus the baseline's with the same seed."""
        return self.values.sub(self.values[self.baseline], axis=0)

    @property
    def always(self) -> dict[str, list[str]]:
        """Return the schemes with a lower, or a higher, value than the baseline with every seed that both have."""
        sides = {"lower": self.gaps < 0, "higher": self.gaps > 0}
        has_no_gap = self.gaps.isna()
        always = {}
        for side, is_so in sides.items():
            is_always = (is_so | has_no_gap).all() & is_so.any()
            if is_always.any():
                always[side] = list(is_always.index[is_always])
        return always

    @property
    def ends(self) -> pd.DataFrame:
        """Return the final losses of these runs and of their branches, as `decayed_points` does."""
        return decayed_points(self.runs)

    @property
    def is_tested_against_baseline(self) -> bool:
        return self.can_rank and self.wanted_baseline in self.schemes

    @property
    def winners(self) -> list[str]:
        """Return the schemes that beat the baseline."""
        return [s for s in self.schemes if verdict(self.pairs, s, self.baseline).startswith("better")]

    @property
    def has_every_run(self) -> bool:
        """Return whether every scheme has a run with every seed."""
        return bool(self.gaps.notna().all(axis=None))

    @property
    def none_caught_on(self) -> bool:
        """Return whether onsets were logged, and no run began to use long-range order."""
        return self.has_onsets and not np.isfinite(self.onsets).any(axis=None)

    @property
    def beyond(self) -> pd.DataFrame:
        """Return the figures of the longest scored length beyond the training length, the smallest change first."""
        cells = self.at(metric="loss", last=0).dropna(subset="change")  # of whole windows, not of ranges of positions
        cells = cells[cells["length"] > self.training_length]
        if cells.empty:
            return cells
        is_shown = (cells["protocol"] == cells["protocol"].iloc[0]) & (cells["length"] == cells["length"].max())
        return cells[is_shown].sort_values("change", kind="stable")

    @cached_property
    def ranking(self) -> pd.DataFrame:
        """Return the final losses, a row per scheme, best first: seeds, loss, gap to the baseline, verdict.

        Loss and gap have the ends of their 95 % interval over seeds (_low, _high). The verdict is one of
        `statistics.verdict`, or failed; empty for the baseline, and for pairs that are not tested.
        """
        rows = []
        for scheme in self.schemes:
            losses = self.values[scheme].dropna()
            row = {"scheme": scheme, "seeds": losses.index.to_list()} | interval_of("loss", losses)
            row |= interval_of("gap", self.gaps[scheme].dropna())
            row["verdict"] = verdict(self.pairs, scheme, self.baseline) if self.can_rank else ""
            if scheme in self.failed and scheme != self.baseline:
                row["verdict"] = "failed"
            rows.append(row)
        return pd.DataFrame(rows)

    @property
    def numbers(self) -> list[dict[str, Any]]:
        # A dict per scheme. The verdict is None for the baseline, and for pairs that are not tested.
        shared = {"baseline": self.baseline, "scope": self.scope.removeprefix("at ")}
        rows: list[Any] = self.ranking.to_dict("records")
        # A verdict that is "" means not tested.
        return [{**row, **shared, "verdict": row["verdict"] or None} for row in rows]


def build(
    summary: pd.DataFrame,
    rows: pd.DataFrame,
    baseline: str | None = None,
    margin: float = MARGIN,
    group_by: str = "",
    confirming: bool = False,
    group: str = "",
) -> SeedComparison:
    """Return the comparison of the summary's finished runs.

    Arguments: baseline, the scheme that gaps are measured against; margin, nats per token below which losses count as
    equal; group_by, settings that the runs are already grouped by; confirming, whether to read the seeds that
    confirm a winner too; group, the value of `group_by` that they share, as text.
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
    losses = by_level(losses)
    used_baseline = wanted_baseline if wanted_baseline in losses else str(losses.columns[0])
    if baseline and baseline not in losses:
        raise ConfigError(
            f"the baseline {baseline!r} has no finished run here: choose one of {', '.join(map(str, losses.columns))}"
        )
    notes = damage(summary)
    length = int(runs["train.context_length"].iloc[0])
    holes: dict[tuple[str, str], list[str]] = {}
    cells = measure(rows, runs, used_baseline, length, notes, holes)
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
    return SeedComparison(
        runs=runs,
        schemes=list(losses.columns),
        wanted_baseline=wanted_baseline,
        values=losses,
        second=second,
        cells=cells,
        pairs=pairs,
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
        margin=margin,
        group=group,
    )


def by_level(losses: pd.DataFrame) -> pd.DataFrame:
    """Return the losses with the best scheme first. Arguments: losses, a row per seed, a column per scheme."""
    # A scheme without some of the seeds is ranked by how far it is from the complete schemes with the same seeds.
    complete = losses.loc[:, losses.notna().all()]
    mean_level = losses.mean()
    if complete.shape[1]:
        mean_level = losses.sub(complete.mean(axis=1), axis=0).mean()
    ranked = sorted((float(value), str(scheme)) for scheme, value in mean_level.items())
    return losses[[scheme for _, scheme in ranked]].rename_axis(columns=None)


def continued(runs: pd.DataFrame) -> dict[str, list[str]]:
    """Return {text: schemes} for the schemes whose runs continued the training of another model.

    The text says how many tokens were trained before: `10M of 40M tokens as <the other run>`.
    """
    schemes_of: dict[str, list[str]] = {}
    if "continues" not in runs:
        return schemes_of
    for scheme, continued in runs.dropna(subset="continues").groupby("scheme"):
        tokens_before, tokens = int(continued["tokens_before"].iloc[0]), int(continued["tokens"].iloc[0])
        names = continued["continues"]
        # Runs that differ only in their seed are one source.
        sources = sorted({re.sub(r"/seed=\d+", "", name.rpartition("/")[0] or name) for name in names})
        text = f"{short_count(tokens_before)} of {short_count(tokens)} tokens as {', '.join(sources)}"
        schemes_of.setdefault(text, []).append(str(scheme))
    return schemes_of


def damage(summary: pd.DataFrame) -> list[str]:
    """Return a line for each damaged file of these runs."""
    texts = summary.get("damaged", pd.Series(dtype=object)).dropna().unique()
    return list(chain.from_iterable(text.splitlines() for text in texts))


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
