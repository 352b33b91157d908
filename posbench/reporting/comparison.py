"""From the tidy table to everything that a report says: which runs stand in one table, and every figure of them.

Runs may differ in their scheme and seed and in nothing else. Their fingerprints say whether they do; where they do not
agree, the error says in what, and the reader chooses with --schemes, --seeds or --by.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from posbench.config import ConfigError, nearest
from posbench.evaluation.protocols import NGRAM, PROTOCOLS, VALIDATION
from posbench.evaluation.protocols.section import ComparedRuns, curves
from posbench.reporting.options import MARGIN
from posbench.reporting.published import Published
from posbench.reporting.statistics import (
    ENOUGH_SEEDS,
    FEWEST_SEEDS,
    Floats,
    best_rate,
    compare,
    document_error,
    fixed_pairs,
    interval,
)
from posbench.reporting.table import config_of, rates, settings_of
from posbench.runs.results import MARKS

_PLACE = ["protocol", "text", "metric", "length", "under", "first", "last"]


@dataclass(frozen=True)
class Comparison(ComparedRuns):
    """The runs of one table and what they say."""

    experiment: str
    pairs: pd.DataFrame  # every pair of schemes: see `statistics.compare`
    ngrams: pd.DataFrame  # of n-gram models: a row an order
    curves: pd.DataFrame  # validation losses while training: scheme, seed, tokens, loss
    rates: pd.DataFrame  # losses at each learning rate: a row a scheme and rate
    has_pilots: bool  # whether these are pilots' losses; else they are means of the compared seeds
    published: Published | None
    left_out: list[str]  # runs that are not compared, and why
    notes: list[str]

    @property
    def seeds(self) -> list[int]:
        return list(self.losses.index)

    @property
    def ranked(self) -> list[str]:
        """The schemes with seeds enough to be ranked: more of them where seeds of a scheme split in two."""
        fewest = ENOUGH_SEEDS if self.split_in_two else FEWEST_SEEDS
        return [scheme for scheme in self.schemes if self.losses[scheme].notna().sum() >= fewest]

    @property
    def can_rank(self) -> bool:
        return len(self.ranked) > 1

    @property
    def split_in_two(self) -> list[str]:
        """The schemes of which some seeds use distant order by the end and some do not; none where nobody scored it."""
        return split_in_two(self.runs)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The configuration of one run: what all share."""
        return config_of(str(self.runs["path"].iloc[0]))

    @property
    def allowed(self) -> float:
        """What the choice of learning rates may cost, nats a token; differences are tested beyond it."""
        return float(self.pairs["allowed"].max()) if self.can_rank else 0.0

    @property
    def num_fixed_pairs(self) -> int:
        """How many pairs the experiment fixed before training."""
        return len(fixed_pairs(self.config.get("experiment", {}).get("primary") or ()))

    def validation(self) -> pd.DataFrame:
        """The cells of the loss table, by scheme; empty where no run stored its windows."""
        return self.at(VALIDATION.name, self.training_length, metric="loss").set_index("scheme")


def build(
    summary: pd.DataFrame,
    rows: pd.DataFrame,
    baseline: str | None = None,
    published: Published | None = None,
    margin: float = MARGIN,
    by: str = "",
    tried: pd.DataFrame | None = None,
) -> Comparison:
    """Join the finished runs of the summary and compute everything of them.

    Arguments: tried, the losses at each learning rate of a search (`posbench.reporting.search`); None: those of pilots.
    Raises: ConfigError where no run is finished, runs do not agree, or a baseline was named that has no run.
    """
    runs, left_out = finished(summary)
    check_agreement(runs, by)
    config = config_of(str(runs["path"].iloc[0]))
    experiment = config.get("experiment", {})
    wanted = baseline or str(experiment.get("baseline") or "")
    losses = runs.pivot(index="seed", columns="scheme", values="loss").sort_index()
    losses.columns.name = None
    complete = losses.loc[:, losses.notna().all()]
    level = losses.sub(complete.mean(axis=1), axis=0).mean() if complete.shape[1] else losses.mean()
    ranked = sorted((float(value), str(scheme)) for scheme, value in level.items())
    losses = losses[[scheme for _, scheme in ranked]]
    base = wanted if wanted in losses else str(losses.columns[0])
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
    has_pilots = tried is None
    tried = rates(runs) if tried is None else tried
    is_chosen = bool(len(tried)) and not has_other_rates(tried)
    pilots = int(tried["seeds"].min()) if is_chosen and "seeds" in tried else 0
    links = published.links(losses.columns) if published else ()
    fewest = ENOUGH_SEEDS if split_in_two(runs) else FEWEST_SEEDS
    of_runs = runs[["path", "scheme", "seed"]]
    return Comparison(
        experiment=", ".join(dict.fromkeys(runs["experiment"])),
        runs=runs,
        wanted_baseline=wanted,
        losses=losses,
        cells=cells,
        pairs=compare(losses, base, links, margin, pilots, experiment.get("primary") or (), fewest),
        ngrams=_ngrams(rows, losses, base),
        curves=curves(runs["path"], "validation", ["loss"]).merge(of_runs, on="path").drop(columns="path"),
        rates=tried,
        has_pilots=has_pilots,
        published=published,
        left_out=left_out,
        notes=notes,
        holes=holes,
    )


def split_in_two(runs: pd.DataFrame) -> list[str]:
    """The schemes of which some runs use distant order by the end and some do not."""
    scored = runs.reindex(columns=["scheme", "onset_tokens"]).dropna()
    return [str(s) for s, onsets in scored.groupby("scheme")["onset_tokens"] if np.isfinite(onsets).nunique() > 1]


def has_other_rates(tried: pd.DataFrame) -> bool:
    """Whether runs of some scheme have another learning rate than its best by the pilots."""
    return any(
        best_rate(dict(zip(of["train.lr"], of["loss"], strict=True))) != of["trained_at"].iloc[0]
        for _, of in tried.dropna(subset="loss").groupby(["experiment", "scheme"])
    )


def choose(summary: pd.DataFrame, schemes: Sequence[str] = (), seeds: Collection[int] = ()) -> pd.DataFrame:
    """The runs of these schemes and seeds, all where none are named. Raises: ConfigError for one without a run."""
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


def finished(summary: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """The finished runs with a loss; and why the others take no part. Raises: ConfigError where there is none."""
    is_finished = (summary["status"] == "finished") & np.isfinite(summary["loss"].astype(float))
    left_out = []
    for run in summary[~is_finished].itertuples():
        reason = getattr(run, "reason", None)
        why = f"{run.status}: {reason}" if isinstance(reason, str) else str(run.status)
        if run.status == "finished":
            why = str(run.damaged if isinstance(run.damaged, str) else run.diverged or "it has no loss")
        left_out.append(f"{run.scheme} seed {run.seed}: {why}")
    if not is_finished.any():
        told = "".join(f"\n  {line}" for line in left_out[:5])
        raise ConfigError(f"no run is finished here: train some, such as `posbench train -m experiment=demo`{told}")
    return summary[is_finished], left_out


def check_agreement(runs: pd.DataFrame, by: str = "") -> None:
    """Raises: ConfigError where the runs differ in more than scheme and seed; it says in what.

    Arguments: by, the columns that these runs were grouped by already.
    """
    found = list(disagreements(runs))
    if found:
        settings = [what for what, _ in found if what in runs.columns]
        remedy = f", or group them with --by {','.join(filter(None, (by, settings[0])))}" if settings else ""
        said = disagreement("in one table", found)
        raise ConfigError(f"{said}\nChoose runs with --schemes or --seeds{remedy}")


def disagreement(where: str, found: Sequence[tuple[str, str]]) -> str:
    """The beginning of a message: that runs which differ in what was found cannot stand there."""
    lines = "".join(f"\n  {what}: {how}" for what, how in found[:6])
    return f"these runs cannot stand {where}, because they differ in{lines}"


def disagreements(runs: pd.DataFrame) -> Iterator[tuple[str, str]]:
    """What runs of one table differ in that must agree, and which of them have which value."""
    twice = runs[runs.duplicated(["scheme", "seed"], keep=False)]
    if len(twice):
        first = twice.sort_values(["scheme", "seed"]).iloc[:2]
        yield "runs of one scheme and seed", " and ".join(first["path"])
        own = [c for c in settings_of(runs) if c[:6] in ("model.", "train.") and twice[c].astype(str).nunique() > 1]
        yield from ((column, _counts(runs, column)) for column in own)
    else:
        yield from differences(runs)


def differences(runs: pd.DataFrame) -> Iterator[tuple[str, str]]:
    """What runs differ in besides their scheme and seed, and which of them have which value."""
    for name, what in (("data", "the text or its splits"), ("tokenizer", "the tokenizer")):
        if runs[f"fingerprint.{name}"].nunique() > 1:
            yield what, _counts(runs, f"fingerprint.{name}")
    if runs["fingerprint.config"].nunique() > 1:
        with_own_rates = bool(runs["own_rate"].any())
        aside = ("scheme.", "device.compiled", *(["train.lr"] if with_own_rates else []))
        shared = [column for column in settings_of(runs) if not column.startswith(aside)]
        differing = [column for column in shared if runs[column].astype(str).nunique() > 1]
        if "model.name" in differing:  # which its sizes need not repeat
            differing = [column for column in differing if column == "model.name" or not column.startswith("model.")]
        yield from ((column, _counts(runs, column)) for column in differing)
        if not differing and not with_own_rates:
            yield "the configuration", _counts(runs, "fingerprint.config")
    for seed, of_seed in runs.groupby("seed"):
        if of_seed["fingerprint.batches"].nunique() > 1:
            yield f"the batches of seed {seed}", _counts(of_seed, "fingerprint.batches")
        parts = [json.loads(text) for text in of_seed["fingerprint.initial_weights"].unique()]
        names = dict.fromkeys(name for each in parts for name in each)
        unlike = [name for name in names if len({each[name] for each in parts if name in each}) > 1]
        if unlike:
            yield f"the initial weights of seed {seed}", ", ".join(unlike)
    own = [column for column in settings_of(runs) if column.startswith("scheme.") or column == "train.lr"]
    options = runs[own].astype(str)
    for scheme, numbers in options.groupby(runs["scheme"]).nunique().iterrows():
        of_scheme = runs["scheme"] == scheme
        yield from (
            (f"{option} of {scheme}", _counts(runs[of_scheme], option)) for option in numbers.index[numbers > 1]
        )


def _counts(runs: pd.DataFrame, column: str) -> str:
    """`0.005 (33 runs), 0.001 (alibi seed 0)`."""
    texts = []
    for value, of_value in sorted(runs.groupby(runs[column].astype(str)), key=lambda item: -len(item[1])):
        first = of_value.iloc[0]
        which = f"{len(of_value)} runs" if len(of_value) > 1 else f"{first['scheme']} seed {first['seed']}"
        texts.append(f"{value[:16]} ({which})")
    return ", ".join(texts)


@dataclass(frozen=True)
class _Cell:
    """One scheme at one place: the sums of each seed and document."""

    seeds: list[int]
    values: Any  # [seeds, documents], float64
    counts: Floats  # [documents]: the same for every seed
    documents: Any  # their numbers


def measure(
    rows: pd.DataFrame,
    runs: pd.DataFrame,
    baseline: str,
    training_length: int,
    notes: list[str],
    holes: dict[tuple[str, str], list[str]],
) -> pd.DataFrame:
    """A row for each scheme at each place: protocol, text, metric, length, under, and first to last position.

    Columns: value, the mean over seeds; gap, value less the baseline's (as trained, same seeds and documents); change,
    value less that of the same runs at the training length. Each has its ends over seeds (`_low`, `_high`) and half its
    interval over documents (`_documents`). A place whose runs scored different windows is left out, and `holes` say so.
    """
    rows = rows[rows["run"].isin(runs.index)]
    older = rows["at_step"] != 0
    if older.any():
        notes.append(f"{rows[older].groupby(['run', 'at_step']).ngroups} evaluations of older weights are not shown.")
    rows = rows[~older]
    places, digests = {}, {}
    unlike: dict[
        tuple[str, str, str, str], dict[int, None]
    ] = {}  # protocol, text, options and what is wrong -> lengths
    for place, of_place in rows.groupby(_PLACE, observed=True, sort=True):  # as trained before options
        here: dict[str, Any] = dict(zip(_PLACE, place, strict=True))
        protocol, text, under = (here[name] for name in ("protocol", "text", "under"))
        digests[place] = of_place["windows_digest"].iloc[0]
        if of_place["windows_digest"].nunique() > 1:
            runs_of = of_place.groupby("windows_digest", observed=True)["run"].first()
            which = " and ".join(f"{runs.loc[run, 'scheme']} seed {runs.loc[run, 'seed']}" for run in runs_of[:2])
            if protocol == VALIDATION.name and not text:
                raise ConfigError(
                    f"{which} were validated on different windows, so their losses are not comparable: train one of "
                    "them again with the other's train.validation_tokens, or choose with --schemes or --seeds"
                )
            why = f"is left out: {which} scored different windows"
            unlike.setdefault((protocol, text, under, why), {})[here["length"]] = None
            continue
        as_trained = digests.get(tuple((here | {"under": ""}).values()), digests[place])
        if as_trained != digests[place] and PROTOCOLS[protocol].is_by_length and under not in MARKS:
            why = "scored other windows than as trained, so do not compare the two"
            unlike.setdefault((protocol, text, under, why), {})[here["length"]] = None
        places[place] = dict(_cells(of_place))
    for (protocol, text, under, why), numbers in unlike.items():
        lengths = ",".join(map(str, numbers))
        words = [*dict.fromkeys(runs["experiment"]), "--protocol", protocol, "--length", lengths]
        words += [f"--under {option}" for option in under.split()]
        command = " ".join(["posbench eval", *words, "--again"])
        at = f"{lengths.replace(',', ', ')}{' under ' * bool(under)}{under}"
        holes.setdefault((protocol, text), []).append(f"{protocol} at {at} {why} (`{command}` scores all alike).")
    made = [
        row
        for place, of_place in places.items()
        for row in _figures(place, of_place, places, baseline, training_length)
    ]
    frame = pd.DataFrame(made, columns=["scheme", *_PLACE, "seeds", *_FIGURES, "targets", "documents"])
    is_loss = frame["metric"] == "loss"
    frame.insert(10, "perplexity", np.where(is_loss, np.exp(np.minimum(frame["value"], 700.0)), math.nan))
    return frame


_FIGURES = [f"{name}{end}" for name in ("value", "gap", "change") for end in ("", "_low", "_high", "_documents")]


def _cells(rows: pd.DataFrame) -> Iterator[tuple[str, _Cell]]:
    """Scheme -> its cell, from the rows of one place."""
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
    """The rows of one place."""
    here = dict(zip(_PLACE, place, strict=True))
    rows = {}
    for scheme, cell in cells.items():
        rows[scheme] = {"scheme": scheme, **here, "seeds": len(cell.seeds), "documents": len(cell.documents)}
        rows[scheme] |= {"targets": int(cell.counts.sum())}
        rows[scheme] |= _interval("value", cell.values.sum(1) / cell.counts.sum())
    if here["metric"] == "bits_per_byte":
        return rows.values()
    counts = next(iter(cells.values())).counts
    errors = document_error(np.stack([cell.values.mean(0) for cell in cells.values()]), counts)
    for row, error in zip(rows.values(), errors, strict=True):
        row["value_documents"] = error
    as_trained = places.get(tuple((here | {"under": ""}).values()), {})
    others: dict[str, Mapping[str, _Cell]] = {}
    if baseline in as_trained:
        others["gap"] = dict.fromkeys(cells, as_trained[baseline])
    if PROTOCOLS[here["protocol"]].is_by_length:
        others["change"] = places.get(tuple((here | {"under": "", "length": training_length}).values()), {})
    for name, other in others.items():
        pairs = {s: (cell, other[s]) for s, cell in cells.items() if s in other and other[s] is not cell}
        pairs = {s: pair for s, pair in pairs.items() if set(pair[0].seeds) & set(pair[1].seeds)}
        for scheme, difference in zip(pairs, _differences_of(name, list(pairs.values())), strict=True):
            rows[scheme] |= difference
    return rows.values()


def _interval(name: str, values: Any) -> dict[str, float]:
    return dict(zip((name, f"{name}_low", f"{name}_high"), interval(values), strict=True))


def _differences_of(name: str, pairs: Sequence[tuple[_Cell, _Cell]]) -> list[dict[str, float]]:
    """One cell less another, over the seeds that both have, with half its interval over documents, for each pair.

    All first cells are of one place, and all second ones. Where both places scored the same targets, a document's part
    is of the same tokens. Elsewhere it is the difference of two token-weighted means with their documents in common, to
    first order.
    """
    if not pairs:
        return []
    rows, means = [], []
    for one, other in pairs:
        seeds = [seed for seed in one.seeds if seed in other.seeds]
        a, b = (cell.values[[cell.seeds.index(seed) for seed in seeds]] for cell in (one, other))
        rows.append(_interval(name, a.sum(1) / one.counts.sum() - b.sum(1) / other.counts.sum()))
        means.append((a.mean(0), b.mean(0)))
    sums = [np.stack(each) for each in zip(*means, strict=True)]  # of one place and the other: [pairs, documents]
    one, other = pairs[0]
    has_same = np.array_equal(one.documents, other.documents) and np.array_equal(one.counts, other.counts)
    errors = document_error(sums[0] - sums[1], one.counts) if has_same else np.full(len(pairs), math.nan)
    return [row | {f"{name}_documents": error} for row, error in zip(rows, errors, strict=True)]


def _ngrams(rows: pd.DataFrame, losses: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """n-gram models on the batches and targets of the table: a row an order, none where a seed lacks it."""
    made = []
    of_ngrams = rows[rows["protocol"] == NGRAM.name]
    for order, name in of_ngrams[["first", "scheme"]].drop_duplicates().sort_values("first").itertuples(index=False):
        of = of_ngrams[of_ngrams["scheme"] == name]
        per_seed = (of.groupby("seed")["value"].sum() / of.groupby("seed")["count"].sum()).reindex(losses.index)
        if per_seed.notna().all():
            row = {"scheme": name, "order": int(order), "seeds": len(per_seed)}
            row |= _interval("loss", per_seed.to_numpy()) | _interval("gap", (per_seed - losses[baseline]).dropna())
            made.append(row)
    return pd.DataFrame(made)
