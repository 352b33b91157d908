"""Compute everything that a report says from the tidy table, after checking which runs may share a table.

The tidy table has a row per scored window and metric. Runs in one table of a report differ in nothing but scheme and
seed, which their fingerprints (digests of configuration, text, batches and so on) show. If they differ in anything
else, the error names it, and the user selects runs with --schemes, --seeds or --by.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from posbench.config import ConfigError, nearest
from posbench.config.fields import PLANNED_SEEDS
from posbench.evaluation.protocols import NGRAM, PROTOCOLS, VALIDATION
from posbench.evaluation.protocols.section import ComparedRuns
from posbench.reporting.families import planned_tests
from posbench.reporting.options import MARGIN
from posbench.reporting.published import Published
from posbench.reporting.search import RateSearch, at_best_rates, merge_searches, with_searches
from posbench.reporting.statistics import (
    ENOUGH_SEEDS,
    FEWEST_SEEDS,
    ROUNDING,
    Floats,
    compare,
    document_error,
    fixed_pairs,
    interval,
)
from posbench.reporting.table import config_of, read, settings_of
from posbench.runs.finding import folder_of
from posbench.runs.results import MARKS
from posbench.system.console import Console

_PLACE = ["protocol", "text", "metric", "length", "under", "first", "last"]


@dataclass(frozen=True)
class Comparison(ComparedRuns):
    """The runs that one report compares, with the tests and notes that the report shows about them."""

    experiment: str
    pairs: pd.DataFrame  # a row per pair of schemes, see `statistics.compare`
    ngrams: pd.DataFrame  # losses of n-gram models, a row per order
    search: RateSearch | None  # the search that chose the learning rates; None: each scheme has runs at one rate only
    published: Published | None
    planned_tests: int  # of loops in these experiments, for which the claimed pairs are corrected; 0: no loop
    left_out: list[str]  # runs that are not compared, and why
    notes: list[str]

    @property
    def seeds(self) -> list[int]:
        return list(self.losses.index)

    @property
    def ranked(self) -> list[str]:
        """Return the schemes that have enough seeds to be ranked.

        More seeds are needed if some scheme's seeds split in two: only some use the order of distant tokens.
        """
        fewest = ENOUGH_SEEDS if self.split_in_two else FEWEST_SEEDS
        return [scheme for scheme in self.schemes if self.losses[scheme].notna().sum() >= fewest]

    @property
    def can_rank(self) -> bool:
        return len(self.ranked) > 1 and not self.unfinished

    @property
    def unfinished(self) -> dict[str, int]:
        """Return {scheme: number of runs that its learning-rate search still needs}, only for schemes that need some.

        While any scheme needs some, the report ranks nothing.
        """
        searched = [scheme for scheme in self.schemes if self.search and scheme in self.search.losses]
        left = {scheme: self.search.left(scheme) for scheme in searched if self.search}
        return {scheme: runs for scheme, runs in left.items() if runs}

    @property
    def is_at_best_rates(self) -> bool:
        """Return whether claims hold at best learning rates: every scheme has a finished search for its rates."""
        return self.search is not None and self.search.is_complete(self.schemes)

    @property
    def undecidable(self) -> list[str]:
        """Return the schemes that diverged with some seed at each rate that their search kept: no test decides them."""
        if self.search is None or not self.is_at_best_rates:
            return []
        kept = {scheme: self.search.losses[scheme][self.search.kept(scheme)] for scheme in self.schemes}
        return [scheme for scheme, losses in kept.items() if np.isinf(losses).any().all()]

    @property
    def constant_pairs(self) -> list[tuple[str, str]]:
        """Return the pairs whose losses differ by the same amount with every seed, which are not tested."""
        tested = self.pairs[self.pairs["p_claimed"].notna() & (self.pairs["difference"] > 0)]
        constant = tested[tested["sd"] <= ROUNDING]
        return list(zip(constant["left"], constant["right"], strict=True))

    @property
    def scope(self) -> str:
        """Return the learning rates at which the claims hold, as text to print with a claim: `at best rates`."""
        if self.is_at_best_rates:
            return "at best rates"
        return "at this rate" if self.runs["train.lr"].nunique() == 1 else "at these rates"

    @property
    def split_in_two(self) -> list[str]:
        """Return the schemes of which only some seeds use the order of distant tokens by the end; [] if unmeasured."""
        return split_in_two(self.runs)

    @cached_property
    def config(self) -> dict[str, Any]:
        """Return the first run's configuration as nested dicts. Use it only for settings that all runs share."""
        return config_of(str(self.runs["path"].iloc[0]))

    @property
    def num_fixed_pairs(self) -> int:
        """Return the number of pairs of schemes that the experiment fixed before training."""
        return len(fixed_pairs(self.config.get("experiment", {}).get("primary") or ()))

    def validation(self) -> pd.DataFrame:
        """Return the figures of the validation loss, a row per scheme; no rows if no run stored its windows."""
        return self.at(VALIDATION.name, self.training_length, metric="loss").set_index("scheme")


def read_runs(
    places: Sequence[str | Path],
    beside: str | Path | None,
    console: Console,
    select: Callable[[pd.DataFrame, pd.DataFrame], pd.DataFrame] = lambda summary, rows: summary,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the summary (a row per run) of these places and their searches, and their tidy table.

    Arguments: places, folders or packs (zip files) of runs; beside, the folder of a reference experiment whose runs are
    added; console, to print how well this posbench computes what the reference recorded; select, called with both
    tables before the runs are checked against the reference, returns the summary to use; by default all of it.
    Raises: ConfigError if there are no runs, or these cannot share a table with the reference; the errors of `select`.
    """
    reference = folder_of(Path(beside)) if beside else None
    if reference:
        from posbench.reporting.reference_table import check_same_losses, join_reference  # imports torch and Hydra

        check_same_losses(reference, console)
        places = [reference, *places]  # first, because the first run defines the experiment
    summary, rows = read(with_searches(places))
    summary = merge_searches(summary)
    if summary.empty:
        raise ConfigError(f"{places[0]} contains no runs: train some, such as `posbench train -m experiment=demo`")
    chosen = select(summary, rows)
    return join_reference(chosen, reference, console) if reference else chosen, rows


def build(
    summary: pd.DataFrame,
    rows: pd.DataFrame,
    baseline: str | None = None,
    published: Published | None = None,
    margin: float = MARGIN,
    group_by: str = "",
) -> Comparison:
    """Return the Comparison of the summary's finished runs: losses, tests, figures and notes for one report.

    If an experiment has a search for learning rates, its runs at each scheme's best rate are compared.
    Arguments: summary, a row per run; rows, the tidy table, a row per scored window and metric; baseline, the scheme
    that gaps are measured against; margin, nats per token below which losses count as equal; group_by, settings that
    the runs are already grouped by (--by), for the error message.
    Raises: ConfigError if no run is finished, runs differ in other settings, or the named baseline has no run.
    """
    compared, search = choose_rates(summary)
    runs, left_out = finished_runs(compared)
    if search:
        later = summary[summary["searched"] & (summary["seed"] >= search.planned)]
        left_out += [
            f"{scheme} seed {seed} at {rate:g}: beyond the {search.planned} planned seeds, so the test does not read it"
            for scheme, seed, rate in later[["scheme", "seed", "train.lr"]].to_numpy().tolist()
        ]
    check_agreement(runs, group_by)
    experiment = config_of(str(runs["path"].iloc[0])).get("experiment", {})
    wanted_baseline = baseline or baseline_of(runs)
    losses = runs.pivot(index="seed", columns="scheme", values="loss").sort_index()
    losses.columns.name = None
    complete = losses.loc[:, losses.notna().all()]
    level = losses.sub(complete.mean(axis=1), axis=0).mean() if complete.shape[1] else losses.mean()
    ranked = sorted((float(value), str(scheme)) for scheme, value in level.items())
    losses = losses[[scheme for _, scheme in ranked]]
    base = wanted_baseline if wanted_baseline in losses else str(losses.columns[0])
    if baseline and baseline not in losses:
        raise ConfigError(
            f"the baseline {baseline!r} has no finished run here: choose one of {', '.join(map(str, losses.columns))}"
        )
    notes: list[str] = []
    length = int(runs["train.context_length"].iloc[0])
    holes: dict[tuple[str, str], list[str]] = {}
    cells = measure(rows, runs, base, length, notes, holes)
    if summary.get("damaged") is not None:
        notes += [line for text in summary["damaged"].dropna() for line in text.splitlines()]
    links = published.links(losses.columns) if published else ()
    second = (
        search.second(losses.columns).reindex(losses.index) if search and search.is_complete(losses.columns) else None
    )
    fewest = ENOUGH_SEEDS if split_in_two(runs) else FEWEST_SEEDS
    tests = planned_tests(runs["path"])
    return Comparison(
        experiment=", ".join(dict.fromkeys(runs["experiment"])),
        runs=runs,
        wanted_baseline=wanted_baseline,
        losses=losses,
        cells=cells,
        pairs=compare(losses, second, links, margin, experiment.get("primary") or (), fewest, tests),
        ngrams=_ngrams(rows, losses, base),
        search=search,
        published=published,
        planned_tests=tests,
        left_out=left_out,
        notes=notes,
        holes=holes,
    )


def baseline_of(runs: pd.DataFrame) -> str:
    """Return the baseline that the experiment of the first of these runs names, or "". Arguments: a row per run."""
    return str(config_of(str(runs["path"].iloc[0])).get("experiment", {}).get("baseline") or "")


def split_in_two(runs: pd.DataFrame) -> list[str]:
    """Return the schemes of which some runs, but not all, use the order of distant tokens by the end of training.

    Arguments: runs, a row per run.
    """
    scored = runs.reindex(columns=["scheme", "onset_tokens"]).dropna()
    return [str(s) for s, onsets in scored.groupby("scheme")["onset_tokens"] if np.isfinite(onsets).nunique() > 1]


def choose_rates(summary: pd.DataFrame) -> tuple[pd.DataFrame, RateSearch | None]:
    """Return the runs to compare, and the search that chose their learning rates or None if there was no search.

    Experiments with a search give the runs at each scheme's best rate, other experiments all their runs. Arguments:
    summary, a row per run.
    """
    is_searched = summary.get("searched", pd.Series(False, summary.index))
    if not is_searched.any():
        return summary, None
    experiment = config_of(str(finished_runs(summary[is_searched])[0]["path"].iloc[0])).get("experiment", {})
    planned = int(experiment.get("planned_seeds", PLANNED_SEEDS))
    at_best, search = at_best_rates(summary[is_searched], planned)
    return pd.concat([summary[~is_searched], at_best]).sort_index(), search


def choose(summary: pd.DataFrame, schemes: Sequence[str] = (), seeds: Collection[int] = ()) -> pd.DataFrame:
    """Return the summary's runs of these schemes and seeds; an empty argument means all.

    Arguments: summary, a row per run.
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

    Arguments: summary, a row per run. Raises: ConfigError if no finished run has a loss.
    """
    is_finished = (summary["status"] == "finished") & np.isfinite(summary["loss"].astype(float))
    left_out = []
    for run in summary[~is_finished].itertuples():
        reason = getattr(run, "reason", None)
        reason_text = f"{run.status}: {reason}" if isinstance(reason, str) else str(run.status)
        if run.status == "finished":
            reason_text = str(run.damaged if isinstance(run.damaged, str) else run.diverged or "it has no loss")
        left_out.append(f"{run.scheme} seed {run.seed}: {reason_text}")
    if not is_finished.any():
        reasons = "".join(f"\n  {line}" for line in left_out[:5])
        raise ConfigError(f"no run is finished here: train some, such as `posbench train -m experiment=demo`{reasons}")
    return summary[is_finished], left_out


def check_agreement(runs: pd.DataFrame, group_by: str = "") -> None:
    """Raise ConfigError if the runs differ in more than scheme and seed; it names the settings and a remedy.

    Arguments: runs, a row per run; group_by, the columns that these runs are already grouped by.
    """
    differing = list(disagreements(runs))
    if differing:
        settings = [name for name, _ in differing if name in runs.columns]
        remedy = f", or group them with --by {','.join(filter(None, (group_by, settings[0])))}" if settings else ""
        raise ConfigError(f"{disagreement('share a table', differing)}\nChoose runs with --schemes or --seeds{remedy}")


def disagreement(purpose: str, differing: Sequence[tuple[str, str]]) -> str:
    """Return the start of an error message: `these runs cannot <purpose>, because they differ in` these settings.

    Arguments: purpose, a verb phrase; differing, pairs of a setting and a text that says which runs have which value.
    """
    lines = "".join(f"\n  {name}: {values}" for name, values in differing[:6])
    return f"these runs cannot {purpose}, because they differ in{lines}"


def disagreements(runs: pd.DataFrame) -> Iterator[tuple[str, str]]:
    """Yield (setting, text) for each setting that keeps these runs out of one table; text: which runs have which value.

    If a scheme and seed occurs in several runs, these are reported, with the settings in which they differ; else all
    that differs besides scheme and seed. Arguments: runs, a row per run.
    """
    twice = runs[runs.duplicated(["scheme", "seed"], keep=False)]
    if len(twice):
        first = twice.sort_values(["scheme", "seed"]).iloc[:2]
        yield "runs of one scheme and seed", " and ".join(first["path"])
        columns = [c for c in settings_of(runs) if c.startswith(("model.", "train."))]
        columns = [column for column in columns if twice[column].astype(str).nunique() > 1]
        yield from ((column, counts(runs, column)) for column in columns)
    else:
        yield from differences(runs)


def differences(runs: pd.DataFrame) -> Iterator[tuple[str, str]]:
    """Yield (setting, text) for what differs besides scheme and seed; the text says which runs have which value.

    Arguments: runs, a row per run.
    """
    for name, description in (("data", "the text or its splits"), ("tokenizer", "the tokenizer")):
        if runs[f"fingerprint.{name}"].nunique() > 1:
            yield description, counts(runs, f"fingerprint.{name}")
    if runs["fingerprint.config"].nunique() > 1:
        with_own_rates = bool(runs["own_rate"].any())
        ignored = ("scheme.", "device.compiled", *(["train.lr"] if with_own_rates else []))
        shared = [column for column in settings_of(runs) if not column.startswith(ignored)]
        differing = [column for column in shared if runs[column].astype(str).nunique() > 1]
        if "model.name" in differing:  # the model's name says enough: its sizes need not be listed too
            differing = [column for column in differing if column == "model.name" or not column.startswith("model.")]
        yield from ((column, counts(runs, column)) for column in differing)
        if not differing and not with_own_rates:
            yield "the configuration", counts(runs, "fingerprint.config")
    for seed, of_seed in runs.groupby("seed"):
        if of_seed["fingerprint.batches"].nunique() > 1:
            yield f"the batches of seed {seed}", counts(of_seed, "fingerprint.batches")
        parts = [json.loads(text) for text in of_seed["fingerprint.initial_weights"].unique()]
        names = dict.fromkeys(name for digests in parts for name in digests)
        unlike = [name for name in names if len({digests[name] for digests in parts if name in digests}) > 1]
        if unlike:
            yield f"the initial weights of seed {seed}", ", ".join(unlike)
    columns = [column for column in settings_of(runs) if column.startswith("scheme.") or column == "train.lr"]
    options = runs[columns].astype(str)
    for scheme, numbers in options.groupby(runs["scheme"]).nunique().iterrows():
        of_scheme = runs["scheme"] == scheme
        yield from ((f"{option} of {scheme}", counts(runs[of_scheme], option)) for option in numbers.index[numbers > 1])


def counts(runs: pd.DataFrame, column: str) -> str:
    """Return how many runs have each value of a column, as text: `0.005 (33 runs), 0.001 (alibi seed 0)`.

    Arguments: runs, a row per run.
    """
    texts = []
    for value, of_value in sorted(runs.groupby(runs[column].astype(str)), key=lambda item: -len(item[1])):
        first = of_value.iloc[0]
        owner = f"{len(of_value)} runs" if len(of_value) > 1 else f"{first['scheme']} seed {first['seed']}"
        texts.append(f"{value[:16]} ({owner})")
    return ", ".join(texts)


@dataclass(frozen=True)
class _Cell:
    """A metric's sums for one scheme, per seed and document, of one protocol, text, length and so on."""

    seeds: list[int]
    values: Any  # [seeds, documents], float64: the metric summed over the targets
    counts: Floats  # [documents]: number of targets, the same for every seed
    documents: Any  # [documents]: their numbers in the split


def measure(
    rows: pd.DataFrame,
    runs: pd.DataFrame,
    baseline: str,
    training_length: int,
    notes: list[str],
    holes: dict[tuple[str, str], list[str]],
) -> pd.DataFrame:
    """Return every figure of a report, a row per scheme and place: protocol, text, metric, length, under, first, last.

    `under` has the evaluation options ("" as trained); `first` and `last` are the range of positions or distances.
    Other columns: value, the mean over seeds; gap, value minus the baseline's (as trained, same seeds and documents);
    change, value minus the same runs' value at the training length. Each has the ends of its interval over seeds
    (`_low`, `_high`) and half its interval over documents (`_documents`).

    Arguments: rows, the tidy table, a row per scored window and metric; runs, a row per run; notes and holes get a line
    for everything left out, such as a place at which the runs scored different windows; holes are keyed by protocol and
    text.
    Raises: ConfigError if the runs were validated on different windows.
    """
    rows = rows[rows["run"].isin(runs.index)]
    older = rows["at_step"] != 0
    if older.any():
        notes.append(f"{rows[older].groupby(['run', 'at_step']).ngroups} evaluations of older weights are not shown.")
    rows = _on_the_same_targets(rows[~older], runs, holes)
    _note_missing_lengths(rows, runs, holes)
    places, digests = {}, {}
    problems: dict[tuple[str, str, str, str], dict[int, None]] = {}  # protocol, text, options, problem -> lengths
    # Sorted, so that a place as trained (no options) comes before the same place with options.
    for place, of_place in rows.groupby(_PLACE, observed=True, sort=True):
        fields: dict[str, Any] = dict(zip(_PLACE, place, strict=True))
        protocol, text, options = (fields[name] for name in ("protocol", "text", "under"))
        digests[place] = of_place["windows_digest"].iloc[0]
        if of_place["windows_digest"].nunique() > 1:
            runs_of = of_place.groupby("windows_digest", observed=True)["run"].first()
            names = " and ".join(f"{runs.loc[run, 'scheme']} seed {runs.loc[run, 'seed']}" for run in runs_of[:2])
            if protocol == VALIDATION.name and not text:
                raise ConfigError(
                    f"{names} were validated on different windows, so their losses are not comparable: train one of "
                    "them again with the other's train.validation_tokens, or choose with --schemes or --seeds"
                )
            problem = f"is left out: {names} scored different windows"
            problems.setdefault((protocol, text, options, problem), {})[fields["length"]] = None
            continue
        as_trained = digests.get(tuple((fields | {"under": ""}).values()), digests[place])
        if as_trained != digests[place] and PROTOCOLS[protocol].is_by_length and options not in MARKS:
            problem = "scored other windows than as trained, so do not compare the two"
            problems.setdefault((protocol, text, options, problem), {})[fields["length"]] = None
        places[place] = dict(_cells(of_place))
    for (protocol, text, options, problem), numbers in problems.items():
        lengths = ",".join(map(str, numbers))
        arguments = [*dict.fromkeys(runs["experiment"]), "--protocol", protocol, "--length", lengths]
        arguments += [f"--under {option}" for option in options.split()]
        command = " ".join(["posbench eval", *arguments, "--again"])
        at = f"{lengths.replace(',', ', ')}{' under ' * bool(options)}{options}"
        holes.setdefault((protocol, text), []).append(f"{protocol} at {at} {problem} (`{command}` scores all alike).")
    figures = [
        row
        for place, of_place in places.items()
        for row in _figures(place, of_place, places, baseline, training_length)
    ]
    frame = pd.DataFrame(figures, columns=["scheme", *_PLACE, "seeds", *_FIGURES, "targets", "documents"])
    is_loss = frame["metric"] == "loss"
    frame.insert(10, "perplexity", np.where(is_loss, np.exp(np.minimum(frame["value"], 700.0)), math.nan))
    return frame


def _on_the_same_targets(
    rows: pd.DataFrame, runs: pd.DataFrame, holes: dict[tuple[str, str], list[str]]
) -> pd.DataFrame:
    """Return the rows of one anchor for each protocol and text, so that all lengths of a table share their targets.

    It is the longest anchor that all runs with results of this protocol have, or else the longest of any run. `holes`
    gets a line about the lengths that only have other anchors.
    """
    chosen = []
    for (protocol, text), group in rows.groupby(["protocol", "text"], observed=True, sort=True):
        counts = group.groupby("anchor")["run"].nunique()
        shared = counts[counts == group["run"].nunique()]
        anchor = max(shared.index if len(shared) else counts.index)
        kept = group[group["anchor"] == anchor]
        chosen.append(kept)
        lengths = sorted(set(group["length"]) - set(kept["length"]))
        if not lengths:
            continue
        names = " ".join(dict.fromkeys(runs["experiment"]))
        wanted = ",".join(map(str, sorted({*lengths, *kept["length"], anchor})))
        line = (
            f"{protocol} at {', '.join(map(str, lengths))} is left out: it was scored on other targets than {anchor} "
            f"tokens (`posbench eval {names} --protocol {protocol} --length {wanted}` scores all on the same)."
        )
        holes.setdefault((str(protocol), str(text)), []).append(line)
    return pd.concat(chosen) if chosen else rows


def _note_missing_lengths(rows: pd.DataFrame, runs: pd.DataFrame, holes: dict[tuple[str, str], list[str]]) -> None:
    """Add a line to `holes` for the runs that lack lengths at which others were scored, as trained.

    Arguments: rows, the tidy table; runs, a row per run.
    """
    as_trained = rows[(rows["metric"] == "loss") & (rows["under"] == "")]
    for (protocol, text), group in as_trained.groupby(["protocol", "text"], observed=True, sort=True):
        if not PROTOCOLS[str(protocol)].is_by_length:
            continue
        scored = group.groupby("run")["length"].agg(set).to_dict()
        lengths = set(group["length"])
        missing = [tuple(sorted(lengths - scored.get(run, set()))) for run in runs.index]
        for lacking, of_lengths in runs.groupby(pd.Series(missing, runs.index)):
            if not lacking:
                continue
            names = []
            for scheme, of_scheme in of_lengths.groupby("scheme"):
                seeds = ", ".join(map(str, sorted(of_scheme["seed"])))
                is_whole = len(of_scheme) == (runs["scheme"] == scheme).sum()
                names.append(str(scheme) if is_whole else f"{scheme} (of seeds {seeds})")
            shown, data = ",".join(map(str, lacking)), ["--data", str(text)] if text else []
            words = [*dict.fromkeys(runs["experiment"]), "--protocol", str(protocol), "--length", shown, *data]
            holes.setdefault((str(protocol), str(text)), []).append(
                f"{protocol} at {shown.replace(',', ', ')} has no result of {', '.join(names)} (`posbench eval "
                f"{' '.join(words)}` scores it, unless the scheme cannot read so far)."
            )


_FIGURES = [f"{name}{end}" for name in ("value", "gap", "change") for end in ("", "_low", "_high", "_documents")]


def _cells(rows: pd.DataFrame) -> Iterator[tuple[str, _Cell]]:
    """Yield (scheme, cell) for each scheme: its metric summed over targets, per seed and document.

    Arguments: rows, of the tidy table (a row per scored window), all of one protocol, text, metric, length and so on.
    """
    documents, document = np.unique(rows["document"], return_inverse=True)
    numbers, first, run = np.unique(rows["run"], return_index=True, return_inverse=True)
    shape = (len(numbers), len(documents))
    sums = {
        name: np.bincount(run * shape[1] + document, rows[name], math.prod(shape)).reshape(shape)
        for name in ("value", "count")
    }
    schemes, seeds = (np.asarray(rows[name].iloc[first]) for name in ("scheme", "seed"))
    for scheme in np.unique(schemes):
        of_scheme = np.flatnonzero(schemes == scheme)
        of_scheme = of_scheme[np.argsort(seeds[of_scheme])]
        yield scheme, _Cell(seeds[of_scheme].tolist(), sums["value"][of_scheme], sums["count"][of_scheme[0]], documents)


def _figures(
    place: tuple[Any, ...],
    cells: Mapping[str, _Cell],
    places: Mapping[tuple[Any, ...], Mapping[str, _Cell]],
    baseline: str,
    training_length: int,
) -> Iterable[dict[str, Any]]:
    """Return the mean, gap and change of one metric with their intervals, as a dict per scheme.

    Arguments: place, the protocol, text, metric, length and so on, in the order of _PLACE; cells, {scheme: its sums at
    this place}; places, {place: its cells} for all places.
    """
    fields = dict(zip(_PLACE, place, strict=True))
    rows = {}
    for scheme, cell in cells.items():
        rows[scheme] = {"scheme": scheme, **fields, "seeds": len(cell.seeds), "documents": len(cell.documents)}
        rows[scheme] |= {"targets": int(cell.counts.sum())}
        rows[scheme] |= _interval("value", cell.values.sum(1) / cell.counts.sum())
    if fields["metric"] == "bits_per_byte":
        return rows.values()
    counts = next(iter(cells.values())).counts
    errors = document_error(np.stack([cell.values.mean(0) for cell in cells.values()]), counts)
    for row, error in zip(rows.values(), errors, strict=True):
        row["value_documents"] = error
    as_trained = places.get(tuple((fields | {"under": ""}).values()), {})
    references: dict[str, Mapping[str, _Cell]] = {}
    if baseline in as_trained:
        references["gap"] = dict.fromkeys(cells, as_trained[baseline])
    if PROTOCOLS[fields["protocol"]].is_by_length:
        references["change"] = places.get(tuple((fields | {"under": "", "length": training_length}).values()), {})
    for name, reference in references.items():
        pairs = {s: (cell, reference[s]) for s, cell in cells.items() if s in reference}
        pairs = {s: pair for s, pair in pairs.items() if pair[0] is not pair[1]}
        pairs = {s: pair for s, pair in pairs.items() if set(pair[0].seeds) & set(pair[1].seeds)}
        for scheme, difference in zip(pairs, _differences_of(name, list(pairs.values())), strict=True):
            rows[scheme] |= difference
    return rows.values()


def _interval(name: str, values: Any) -> dict[str, float]:
    return dict(zip((name, f"{name}_low", f"{name}_high"), interval(values), strict=True))


def _differences_of(name: str, pairs: Sequence[tuple[_Cell, _Cell]]) -> list[dict[str, float]]:
    """Return the mean of first minus second cell over their common seeds, with its intervals, for each pair of cells.

    A cell has a scheme's sums per seed and document, at one place: protocol, text, metric, length and so on. All first
    cells are from one place, and all second cells are from one place. The interval over documents is NaN unless both
    places scored the same targets. Arguments: name, the key of the mean in the returned dicts.
    """
    if not pairs:
        return []
    rows, means = [], []
    for first, second in pairs:
        seeds = [seed for seed in first.seeds if seed in second.seeds]
        a, b = (cell.values[[cell.seeds.index(seed) for seed in seeds]] for cell in (first, second))
        rows.append(_interval(name, a.sum(1) / first.counts.sum() - b.sum(1) / second.counts.sum()))
        means.append((a.mean(0), b.mean(0)))
    sums = [np.stack(nll) for nll in zip(*means, strict=True)]  # first and second place: [pairs, documents]
    first, second = pairs[0]
    has_same = np.array_equal(first.documents, second.documents) and np.array_equal(first.counts, second.counts)
    errors = document_error(sums[0] - sums[1], first.counts) if has_same else np.full(len(pairs), math.nan)
    return [row | {f"{name}_documents": error} for row, error in zip(rows, errors, strict=True)]


def _ngrams(rows: pd.DataFrame, losses: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """Return a row per order of n-gram models that every seed has: loss on the runs' targets, gap to the baseline.

    Arguments: rows, the tidy table, a row per scored window and metric; losses, of the runs, a row per seed and a
    column per scheme.
    """
    table = []
    of_ngrams = rows[rows["protocol"] == NGRAM.name]
    for order, name in of_ngrams[["first", "scheme"]].drop_duplicates().sort_values("first").itertuples(index=False):
        sums = of_ngrams[of_ngrams["scheme"] == name].groupby("seed")[["value", "count"]].sum()
        per_seed = (sums["value"] / sums["count"]).reindex(losses.index)
        if per_seed.notna().all():
            row = {"scheme": name, "order": int(order), "seeds": len(per_seed)}
            row |= _interval("loss", per_seed.to_numpy()) | _interval("gap", (per_seed - losses[baseline]).dropna())
            table.append(row)
    return pd.DataFrame(table)
