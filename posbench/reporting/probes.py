"""Loss by position in the window, the retrieval probe, and what the first says of long non-overlapping windows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from posbench.reporting.evaluations import POSITION, RETRIEVAL, evaluations
from posbench.reporting.frame import records
from posbench.reporting.joining import common_seeds
from posbench.reporting.measure import Found, Measurement, compared_over, lengths_of, only, same_task
from posbench.reporting.statistics import Floats, document_error, t_interval

if TYPE_CHECKING:
    import pandas as pd

    Score = Callable[[pd.DataFrame], pd.Series]  # of the sums of a group
    Scores = Mapping[str, Score]
SHUFFLED = "shuffled_nll"  # the column that older retrieval results lack


def position(found: Found, notes: list[str]) -> pd.DataFrame:
    """Loss (nats/token) by scheme, window length and bucket: token-weighted in each run, then the mean over runs."""
    scores: Scores = {"loss": lambda s: s["nll"] / s["targets"]}
    return _probe(found, POSITION, ["bucket_start", "bucket_end"], scores, notes).drop(columns=["rows", "targets"])


def retrieval(found: Found, notes: list[str]) -> pd.DataFrame:
    """By how much a passage is easier for having been read before, nats/token, by gap in tokens.

    All readings end with the same tokens at the same positions. `drop`: against a reading with another passage in place
    of the first copy, what an expectation of words seen before gives too; `by_order`: against one with the first copy
    shuffled, NaN at lengths where a result was stored before there was this control.
    """

    def less_second(column: str) -> Score:
        return lambda sums: (sums.get(column, math.nan) - sums["second_nll"]) / sums["targets"]

    scores = {"drop": less_second("control_nll"), "by_order": less_second(SHUFFLED)}
    made = _probe(found, RETRIEVAL, ["gap"], scores, notes).rename(columns={"rows": "trials"})
    older = {e.length for held in found.values() for e in held if e.protocol == RETRIEVAL and SHUFFLED not in e.windows}
    if older:
        made.loc[made["length"].isin(older), ["by_order", "by_order_low", "by_order_high"]] = math.nan
        lengths = ",".join(map(str, sorted(older)))
        notes.append(
            f"retrieval at {lengths}: results without the shuffled control, so the part by order is not known there; "
            f"`posbench eval --protocol retrieval --length {lengths}` scores them again."
        )
    return made


def _probe(
    found: Found,
    protocol: str,
    by: list[str],
    scores: Scores,
    notes: list[str],
) -> pd.DataFrame:
    """One row a scheme, length and group of `by`: each score of the group's sums, mean over seeds and interval.

    The seeds are those that all schemes shown share; what lacks one is named in `notes`.
    The interval of the first is `low` and `high`, that of others `<score>_low` and `<score>_high`; `rows` and `targets`
    count what each run scored in the group.
    """
    import pandas as pd

    ends = {name: ("low", "high") if n == 0 else (f"{name}_low", f"{name}_high") for n, name in enumerate(scores)}
    made = []
    partly: dict[str, list[str]] = {}
    every = {scheme for scheme, _ in found}, {seed for _, seed in found}
    for length in lengths_of(found, protocol):
        same = same_task(found, protocol, length, notes)
        schemes, seeds = common_seeds({s: {seed for of, seed in same if of == s} for s, _ in same}, "")
        if (set(schemes), set(seeds)) != every:
            partly.setdefault(only(seeds, sorted(every[0] - set(schemes))), []).append(f"{protocol} at {length}")
        runs = []
        for scheme, seed in itertools.product(schemes, seeds):
            e = same[scheme, seed]
            sums = e.sums(by).assign(scheme=scheme, rows=e.windows.groupby(by, sort=True).size())
            runs.append(sums.assign(**{name: score(sums) for name, score in scores.items()}).reset_index())
        for keys, each in pd.concat(runs).groupby(["scheme", *by], sort=True):
            row = {"length": length, "seeds": len(each), **dict(zip(["scheme", *by], keys, strict=True))}
            row |= {count: int(each[count].iloc[0]) for count in ("rows", "targets")}
            for name, (low, high) in ends.items():
                mean = t_interval(each[name].to_numpy())
                row |= {name: mean.mean, low: mean.low, high: mean.high}
            made.append(row)
    notes += compared_over(partly)
    columns = [column for name in scores for column in (name, *ends[name])]
    return pd.DataFrame(made, columns=["scheme", "length", *by, *columns, "seeds", "rows", "targets"])


def early_tokens(measurements: list[Measurement], by_position: pd.DataFrame, training_length: int) -> pd.DataFrame:
    """How much of the gain of longer non-overlapping windows is only that fewer tokens stand near a window's start.

    With T the training length, `gain` is the loss at T less that at a longer length L, over the targets that all
    lengths scored and the seeds that both have. If more than T tokens of context made no token better or worse, the
    tokens behind T would each have the loss at the end of a T-token window, l_end, and the gain would be `early` =
    (1 - T / L) (loss_T - l_end). The last bucket below T that is at least T/8 wide stands for l_end, in windows of T
    tokens evaluated by position, the very windows of loss_T (the same positions of longer windows hold other text,
    whose loss differs by more than what is asked). An estimate: l_end is of other tokens than loss_T, and loss need
    not fall with position.
    Columns: scheme, length, gain, early (nats/token), each with half of its 95 % interval over documents
    (`gain_documents`, `early_documents`), for lengths that are multiples of T.
    """
    import pandas as pd

    width = by_position["bucket_end"] - by_position["bucket_start"]
    wide = (by_position["length"] == training_length) & (8 * width >= training_length)
    last = by_position[wide].sort_values("bucket_end").drop_duplicates("scheme", keep="last")
    rows = []
    for bucket in records(last):
        of_scheme = [m for m in measurements if (m.scheme, m.protocol) == (bucket["scheme"], "nonoverlapping")]
        there = {m.length: m for m in of_scheme if m.length % training_length == 0}
        at = there.get(training_length)
        below = _mean_less_end(at, bucket["bucket_start"]) if at else None
        reach = min((int(_ends(m.evaluations[0].windows).max()) for m in there.values()), default=0)
        for length, longer in sorted(there.items()):
            gain = _gain(at, longer, reach) if at and length > training_length else None
            if gain and below:
                early, doubt = ((1 - training_length / length) * value for value in below)
                row = {"scheme": longer.scheme, "length": length, "gain": gain[0], "gain_documents": gain[1]}
                rows.append({**row, "early": early, "early_documents": doubt})
    return pd.DataFrame(rows, columns=["scheme", "length", "gain", "gain_documents", "early", "early_documents"])


def _gain(at: Measurement, longer: Measurement, reach: int) -> tuple[float, float] | None:
    """The loss of `at` less that of `longer` over the targets up to `reach` that windows of both hold, and its doubt.

    None where they have no seed in common or scored other text.
    """
    ends = _ends(longer.evaluations[0].windows)
    reach = int(ends[ends <= reach].max(initial=0))
    seeds = sorted(set(at.seeds) & set(longer.seeds))
    parts = []
    for m in (at, longer):
        windows = [m.evaluations[m.seeds.index(seed)].windows for seed in seeds]
        inside = [rows[_ends(rows) <= reach] for rows in windows]
        parts.append([(_by_document(rows, "nll"), _by_document(rows, "targets")) for rows in inside])
    targets = [of for part in parts for _, of in part]
    if not seeds or not reach or any(not np.array_equal(of, targets[0]) for of in targets):
        return None
    nll = np.mean([short - long for (short, _), (long, _) in zip(*parts, strict=True)], axis=0)
    return _with_doubt(nll, targets[0])


def _mean_less_end(at: Measurement, start: int) -> tuple[float, float] | None:
    """The loss of `at` less that of its targets in the bucket from `start` on, by the position evaluations beside it.

    The doubt is that of the difference of two means with the documents in common, to first order. None where no run
    was evaluated by position over the same text.
    """
    found = []
    for e in at.evaluations:
        beside = [o for o in evaluations(e.file.parents[2]) if (o.protocol, o.length) == (POSITION, at.length)]
        for rows in (o.windows for o in beside):
            if np.array_equal(_by_document(rows, "targets"), _by_document(e.windows, "targets")):
                end = rows.assign(**{c: rows[c].where(rows["bucket_start"] == start, 0) for c in ("nll", "targets")})
                found.append([_by_document(part, c) for part in (rows, end) for c in ("nll", "targets")])
    if not found:
        return None
    nll, targets, nll_end, targets_end = np.mean(found, axis=0)
    mean, end_mean = nll.sum() / targets.sum(), nll_end.sum() / targets_end.sum()
    apart = (nll - mean * targets) / targets.sum() - (nll_end - end_mean * targets_end) / targets_end.sum()
    return float(mean - end_mean), _with_doubt(apart * targets.sum(), targets)[1]


def _ends(rows: pd.DataFrame) -> Floats:
    """The token behind the last target of each row."""
    return (rows["start"] + rows["targets"]).to_numpy()


def _by_document(rows: pd.DataFrame, column: str) -> Floats:
    """Sums over the rows of each document, from document 0 on. A NaN is not skipped."""
    return np.asarray(np.bincount(rows["document"], weights=rows[column]), dtype=np.float64)


def _with_doubt(nll: Floats, targets: Floats) -> tuple[float, float]:
    """The token-weighted mean and half the 95 % interval that the choice of documents leaves."""
    there = targets > 0
    return float(nll.sum() / targets.sum()), float(document_error(nll[None, there], targets[there])[0])
