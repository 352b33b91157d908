"""Measure schemes: the mean of a metric at each place, with gaps, changes and intervals.

A place is a protocol, text, metric, length, evaluation options and range of positions or distances.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from posbench.analysis.statistics import Floats, document_error, interval_of
from posbench.analysis.table import where
from posbench.config import ConfigError
from posbench.evaluation.protocols import PROTOCOLS, VALIDATION
from posbench.runs import Run
from posbench.runs.results import MARKS

_PLACE = ["protocol", "text", "metric", "length", "under", "first", "last"]


@dataclass(frozen=True)
class Cell:
    """The values of one scheme at one place."""

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
    (`_low`, `_high`) and half its interval over documents (`_documents`). lowest and highest are extremes over seeds.
    Arguments: rows, the tidy table; runs, a row per run; notes and holes (by protocol and text) get a line for
    everything left out.
    Raises: ConfigError if the runs were validated on different windows.
    """
    rows = rows[rows["run"].isin(runs.index)]
    # Weights of an earlier step are another model.
    is_older = rows["at_step"] != 0
    if is_older.any():
        notes.append(
            f"{rows[is_older].groupby(['run', 'at_step']).ngroups} evaluations of older weights are not shown."
        )
    rows = on_the_same_targets(rows[~is_older], runs, holes)
    _note_missing_lengths(rows, runs, holes)
    places: dict[tuple[Any, ...], dict[str, Cell]] = {}
    digests: dict[tuple[Any, ...], str] = {}
    problems: dict[tuple[str, str, str, str], dict[int, None]] = {}  # protocol, text, options, problem -> lengths
    # Sorted, so that a place as trained (no options) comes before the same place with options.
    for place, of_place in rows.groupby(_PLACE, observed=True, sort=True):
        fields: dict[str, Any] = dict(zip(_PLACE, place, strict=True))
        digests[place] = of_place["windows_digest"].iloc[0]
        place_as_trained = tuple((fields | {"under": ""}).values())
        # Without results as trained at this place, there is nothing that its windows could differ from.
        digest_as_trained = digests.get(place_as_trained, digests[place])
        problem = ""
        if of_place["windows_digest"].nunique() > 1:
            problem = f"is left out: {_unlike(fields, of_place, runs)} scored different windows"
        else:
            places[place] = dict(cells_of(of_place))
            is_by_length = PROTOCOLS[fields["protocol"]].is_by_length
            if digest_as_trained != digests[place] and is_by_length and fields["under"] not in MARKS:
                problem = "scored other windows than as trained, so do not compare the two"
        if problem:
            key = (fields["protocol"], fields["text"], fields["under"], problem)
            problems.setdefault(key, {})[fields["length"]] = None
    for (protocol, text, options, problem), lengths in problems.items():
        words = [f"--under {option}" for option in options.split()]
        if options:
            problem = f"under {options} {problem}"
        _leave_out(holes, runs, (protocol, text), list(lengths), problem, *words, "--again")
    figures: list[dict[str, Any]] = []
    for place, of_schemes in places.items():
        figures += _figures(place, of_schemes, places, baseline, training_length)
    frame = pd.DataFrame(figures, columns=["scheme", *_PLACE, "seeds", *_FIGURES, *_SEED_RANGE, "targets", "documents"])
    perplexities = np.exp(np.minimum(frame["value"], 700.0))  # a larger loss would overflow
    # Column 10 is the one after `value`.
    frame.insert(10, "perplexity", np.where(frame["metric"] == "loss", perplexities, math.nan))
    return frame


def _unlike(fields: Mapping[str, Any], of_place: pd.DataFrame, runs: pd.DataFrame) -> str:
    """Return two runs that scored different windows at a place, as text: `rope seed 0 and alibi seed 0`.

    Raises: ConfigError if these windows are the validation of their own text, which the final losses come from.
    """
    names = []
    for run in of_place.groupby("windows_digest", observed=True)["run"].first()[:2]:
        names.append(f"{runs.loc[run, 'scheme']} seed {runs.loc[run, 'seed']}")
    if fields["protocol"] == VALIDATION.name and not fields["text"]:
        raise ConfigError(
            f"{' and '.join(names)} were validated on different windows, so their losses are not comparable: train one "
            "of them again with the other's train.validation_tokens, or choose with --schemes or --seeds"
        )
    return " and ".join(names)


def _leave_out(
    holes: dict[tuple[str, str], list[str]],
    runs: pd.DataFrame,
    place: tuple[str, str],
    lengths: Sequence[int],
    reason: str,
    *words: str,
    scored: Sequence[int] = (),
) -> None:
    """Add a sentence about figures to `holes`: lengths, reason, and the command that scores them.

    Arguments: place, protocol and text; words, more of the command's; scored, its lengths, by default `lengths`.
    """
    protocol, text = place
    # "": the runs' own text.
    if text:
        words = ("--data", text, *words)
    listed = ",".join(map(str, scored or lengths))
    command = ["posbench eval", *experiments_of(runs), "--protocol", protocol, "--length", listed, *words]
    line = f"{protocol} at {', '.join(map(str, lengths))} {reason} (`{' '.join(command)}` scores it)."
    holes.setdefault(place, []).append(line)


def experiments_of(runs: pd.DataFrame) -> list[str]:
    """Return the names by which commands find these runs: those of a search are in `demo-tune`."""
    names = []
    for experiment, path in zip(runs["experiment"], runs["path"], strict=True):
        is_searched = Run(Path(path)).searched_experiment is not None
        names.append(f"{experiment}-tune" if is_searched else experiment)
    return list(dict.fromkeys(names))


def means(rows: pd.DataFrame, columns: Sequence[str]) -> pd.Series:
    """Return token-weighted means of the rows with equal values in the columns `by`, indexed by these."""
    sums = rows.groupby(list(columns), observed=True)[["value", "count"]].sum()
    return sums["value"] / sums["count"]


def as_trained(rows: pd.DataFrame, runs: pd.DataFrame, **equal: Any) -> pd.DataFrame:
    """Return the rows of these runs on their own text, as trained, in which the columns have the values passed here."""
    return where(rows[rows["run"].isin(runs.index)], under="", text="", at_step=0, **equal)


def on_the_same_targets(
    rows: pd.DataFrame, runs: pd.DataFrame, holes: dict[tuple[str, str], list[str]]
) -> pd.DataFrame:
    """Return the rows of one anchor for each protocol and text, so that all lengths of a table share their targets.

    `holes` gets a line about the lengths that only have other anchors.
    """
    chosen = []
    for (protocol, text), group in rows.groupby(["protocol", "text"], observed=True, sort=True):
        # The longest anchor that all runs with results of this protocol have, or else the longest of any run.
        counts = group.groupby("anchor")["run"].nunique()
        shared = counts[counts == group["run"].nunique()]
        if shared.empty:
            shared = counts
        anchor = max(shared.index)
        same_targets = group[group["anchor"] == anchor]
        chosen.append(same_targets)
        for under, as_scored in group.groupby("under", observed=True):
            kept = same_targets[same_targets["under"] == under]["length"]
            other_lengths = sorted(set(as_scored["length"]) - set(kept))
            options = [option for option in str(under).split() if option not in MARKS]
            if other_lengths:
                to_score = sorted({*other_lengths, *same_targets["length"], anchor})
                reason = f"is left out: it was scored on other targets than {anchor} tokens"
                if options:
                    reason = f"under {' '.join(options)} {reason}"
                words = [f"--under {option}" for option in options]
                _leave_out(holes, runs, (str(protocol), str(text)), other_lengths, reason, *words, scored=to_score)
    if not chosen:
        return rows
    return pd.concat(chosen)


def _note_missing_lengths(rows: pd.DataFrame, runs: pd.DataFrame, holes: dict[tuple[str, str], list[str]]) -> None:
    as_trained = rows[(rows["metric"] == "loss") & (rows["under"] == "")]
    for (protocol, text), group in as_trained.groupby(["protocol", "text"], observed=True, sort=True):
        if not PROTOCOLS[str(protocol)].is_by_length:
            continue
        # Runs are grouped by the lengths that they lack, so that one line tells of all of them.
        scored = group.groupby("run")["length"].agg(set).to_dict()
        lengths = set(group["length"])
        missing = [tuple(sorted(lengths - scored.get(run, set()))) for run in runs.index]
        for lacking, of_lengths in runs.groupby(pd.Series(missing, runs.index)):
            # These runs have every length.
            if not lacking:
                continue
            names = []
            for scheme, of_scheme in of_lengths.groupby("scheme"):
                name = str(scheme)
                # The seeds are named only if other seeds of the scheme have these lengths.
                if len(of_scheme) < (runs["scheme"] == scheme).sum():
                    seeds = ", ".join(map(str, sorted(of_scheme["seed"])))
                    name += f" (of seeds {seeds})"
                names.append(name)
            reason = f"has no result of {', '.join(names)}: not scored yet, or the scheme cannot read so far"
            _leave_out(holes, runs, (str(protocol), str(text)), lacking, reason)


_FIGURES = [f"{name}{end}" for name in ("value", "gap", "change") for end in ("", "_low", "_high", "_documents")]

_SEED_RANGE = ("lowest", "highest")


def cells_of(rows: pd.DataFrame) -> Iterator[tuple[str, Cell]]:
    """Yield each scheme with its cell. Arguments: rows, of one place, in which all runs scored the same windows."""
    # `document` and `run` are places in the sorted arrays of documents and runs, one per row.
    documents, document = np.unique(rows["document"], return_inverse=True)
    run_numbers, first_rows, run = np.unique(rows["run"], return_index=True, return_inverse=True)
    shape = (len(run_numbers), len(documents))
    cell_of_row = run * shape[1] + document  # of each row in a flattened table of runs and documents
    # Sums by run and document, as one flat histogram.
    values = np.bincount(cell_of_row, rows["value"], math.prod(shape)).reshape(shape)
    counts = np.bincount(cell_of_row, rows["count"], math.prod(shape)).reshape(shape)
    schemes = np.asarray(rows["scheme"].iloc[first_rows])
    seeds = np.asarray(rows["seed"].iloc[first_rows])
    for scheme in np.unique(schemes):
        of_scheme = np.flatnonzero(schemes == scheme)
        of_scheme = of_scheme[np.argsort(seeds[of_scheme])]
        # All runs have the same targets, so the counts of one hold for all.
        yield scheme, Cell(seeds[of_scheme].tolist(), values[of_scheme], counts[of_scheme[0]], documents)


def _figures(
    place: tuple[Any, ...],
    cells: Mapping[str, Cell],
    places: Mapping[tuple[Any, ...], Mapping[str, Cell]],
    baseline: str,
    training_length: int,
) -> Iterable[dict[str, Any]]:
    """Return the figures of one place, a dict per scheme.

    Arguments: cells, of this place, by scheme; places, the cells of all places, with which gap and change are computed.
    """
    fields = dict(zip(_PLACE, place, strict=True))
    rows = {}
    for scheme, cell in cells.items():
        row = {"scheme": scheme, **fields, "seeds": len(cell.seeds), "documents": len(cell.documents)}
        row["targets"] = int(cell.counts.sum())
        of_seeds = cell.values.sum(1) / cell.counts.sum()
        row |= interval_of("value", of_seeds)
        row |= {"lowest": float(of_seeds.min()), "highest": float(of_seeds.max())}
        rows[scheme] = row
    # Bits per byte are the loss in another unit: their gaps and intervals would say the same.
    if fields["metric"] == "bits_per_byte":
        return rows.values()
    counts = next(iter(cells.values())).counts  # all schemes have the same documents
    over_seeds = np.stack([cell.values.mean(0) for cell in cells.values()])  # [schemes, documents]
    for row, error in zip(rows.values(), document_error(over_seeds, counts), strict=True):
        row["value_documents"] = error
    place_as_trained = tuple((fields | {"under": ""}).values())
    # The baseline is as trained, also beside schemes under other options.
    as_trained = places.get(place_as_trained, {})
    references: dict[str, Mapping[str, Cell]] = {}
    if baseline in as_trained:
        references["gap"] = dict.fromkeys(cells, as_trained[baseline])
    if PROTOCOLS[fields["protocol"]].is_by_length:
        place_at_training_length = tuple((fields | {"under": "", "length": training_length}).values())
        references["change"] = places.get(place_at_training_length, {})
    # The pairs hold each cell and the one that is subtracted from it. Only seeds that both have are compared.
    for name, reference in references.items():
        pairs = {}
        for scheme, cell in cells.items():
            subtracted = reference.get(scheme)
            # A cell has no difference to itself: the baseline has no gap, and the training length no change.
            if subtracted is not None and subtracted is not cell and set(cell.seeds) & set(subtracted.seeds):
                pairs[scheme] = cell, subtracted
        for scheme, difference in zip(pairs, differences_of(name, list(pairs.values())), strict=True):
            rows[scheme] |= difference
    return rows.values()


def differences_of(name: str, pairs: Sequence[tuple[Cell, Cell]]) -> list[dict[str, float]]:
    """Return the mean of the first cell minus the second's, with its intervals, a dict per pair: {name}, {name}_low...

    The first cells of all pairs have the same documents, and so have the second ones.
    """
    if not pairs:
        return []
    rows, first_means, second_means = [], [], []
    for first, second in pairs:
        seeds = [seed for seed in first.seeds if seed in second.seeds]
        a = first.values[list(map(first.seeds.index, seeds))]
        b = second.values[list(map(second.seeds.index, seeds))]
        # A mean over all targets per seed.
        rows.append(interval_of(name, a.sum(1) / first.counts.sum() - b.sum(1) / second.counts.sum()))
        first_means.append(a.mean(0))  # over seeds, [documents]
        second_means.append(b.mean(0))
    first, second = pairs[0]
    errors = np.full(len(pairs), math.nan)
    # An interval over documents needs the same targets at both places.
    if np.array_equal(first.documents, second.documents) and np.array_equal(first.counts, second.counts):
        errors = document_error(np.stack(first_means) - np.stack(second_means), first.counts)
    return [row | {f"{name}_documents": error} for row, error in zip(rows, errors, strict=True)]
