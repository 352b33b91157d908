"""Figures of groups of windows (loss by position, retrieval), and what the first says of long windows."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from posbench.evaluation.documents import document_error
from posbench.evaluation.protocols import NONOVERLAPPING, POSITION, Protocol, Score
from posbench.reporting.frame import records
from posbench.reporting.gathering import Found, lengths_of
from posbench.reporting.joining import common_seeds
from posbench.reporting.measure import Measurement, compared_over, only, same_task
from posbench.reporting.statistics import Floats, t_interval

if TYPE_CHECKING:
    import pandas as pd

    from posbench.runs.readings import Result


def probe(found: Found, protocol: Protocol, baseline: str | None, notes: list[str]) -> pd.DataFrame:
    """One row a scheme, length and group of rows: each score of the protocol, mean over seeds and interval.

    Scores are of the group's sums in each run, so token-weighted. The seeds are those that all schemes shown share;
    what lacks one is named in `notes`. The interval over seeds of the first score is `low` and `high`, that of others
    `<score>_low` and `<score>_high`. Where the protocol names its `texts`, `<score>_texts` is half the 95 % interval
    that the choice of texts leaves. Where it `has_gaps`, `gap` is the first score less the baseline's, paired by seed
    and by text, with the same intervals (NaN without a baseline). The protocol's counts are of what each run scored in
    the group.
    """
    import pandas as pd

    rows: list[dict[str, Any]] = []
    partly: dict[str, list[str]] = {}
    schemes_of_all, seeds_of_all = {scheme for scheme, _ in found}, {seed for _, seed in found}
    for length in lengths_of(found, protocol.name):
        same = same_task(found, protocol, length, notes)
        schemes, seeds = common_seeds({s: {seed for of, seed in same if of == s} for s, _ in same}, "")
        if (set(schemes), set(seeds)) != (schemes_of_all, seeds_of_all):
            missing = sorted(schemes_of_all - set(schemes))
            partly.setdefault(only(seeds, missing), []).append(f"{protocol.name} at {length}")
        rows += _of_length(protocol, {key: same[key] for key in itertools.product(schemes, seeds)}, length, baseline)
    notes += compared_over(partly)
    scores = [column for score in protocol.scores for column in _columns(protocol, score)]
    scores += _GAP * protocol.has_gaps
    frame = pd.DataFrame(rows, columns=["scheme", "length", *protocol.groups, *scores, "seeds", *protocol.counts])
    for score in protocol.scores:
        _without_older(frame, found, protocol, score, notes)
    return frame


_GAP = ["gap", "gap_low", "gap_high", "gap_texts"]


def _of_length(
    protocol: Protocol, results: dict[tuple[str, int], Result], length: int, baseline: str | None
) -> list[dict[str, Any]]:
    """The rows of one length."""
    import pandas as pd

    by = list(protocol.groups)
    runs = []
    for (scheme, seed), result in results.items():
        sums = result.sums(by)
        scores = {score.name: score.of(sums) for score in protocol.scores if score.needs is None or score.needs in sums}
        count = result.windows.groupby(by, sort=True).size()
        runs.append(sums.assign(scheme=scheme, seed=seed, rows=count, **scores).reset_index())
    errors = _text_errors(protocol, results, baseline) if protocol.texts else {}
    together = pd.concat(runs)
    if protocol.has_gaps and (together["scheme"] == baseline).any():
        name = protocol.scores[0].name
        of_base = together[together["scheme"] == baseline].set_index(["seed", *by])[name]
        together["gap"] = together[name] - of_base.reindex(together.set_index(["seed", *by]).index).to_numpy()
    rows = []
    for keys, each in together.groupby(["scheme", *by], sort=True):
        row = {"length": length, "seeds": len(each), **dict(zip(["scheme", *by], keys, strict=True))}
        row |= {column: int(each[of].iloc[0]) for column, of in protocol.counts.items()}
        for score in protocol.scores:
            if score.name in each:
                mean = t_interval(each[score.name].to_numpy())
                low, high = _ends(protocol, score)
                row |= {score.name: mean.mean, low: mean.low, high: mean.high}
        if "gap" in each and keys[0] != baseline:
            gap = t_interval(each["gap"].to_numpy())
            row |= {"gap": gap.mean, "gap_low": gap.low, "gap_high": gap.high}
        rows.append(row | errors.get(keys, {}))
    return rows


def _text_errors(
    protocol: Protocol, results: dict[tuple[str, int], Result], baseline: str | None
) -> dict[tuple[Any, ...], dict[str, float]]:
    """(scheme, group) -> half the interval over texts of each score, `<score>_texts`, of the mean over seeds."""
    by, columns = list(protocol.groups), [result.windows.columns for result in results.values()]
    scores = [score for score in protocol.scores if score.needs is None or all(score.needs in c for c in columns)]
    schemes = list(dict.fromkeys(scheme for scheme, _ in results))
    sums = {key: result.sums([*by, *protocol.texts]) for key, result in results.items()}
    targets = next(iter(sums.values()))["targets"]
    nll = {
        (scheme, score.name): np.mean(
            [score.of(of) * of["targets"] for (name, _), of in sums.items() if name == scheme], axis=0
        )
        for scheme in schemes
        for score in scores
    }
    if protocol.has_gaps and baseline in schemes:
        first = protocol.scores[0].name
        nll |= {(s, "gap"): nll[s, first] - nll[baseline, first] for s in schemes if s != baseline}
    stacked = np.stack(list(nll.values()))
    errors: dict[tuple[Any, ...], dict[str, float]] = {}
    for group, places in targets.groupby(by, sort=True).indices.items():
        scored = places[targets.to_numpy()[places] > 0]
        half = document_error(stacked[:, scored], targets.to_numpy()[scored])
        keys = group if isinstance(group, tuple) else (group,)
        for (scheme, name), value in zip(nll, half, strict=True):
            errors.setdefault((scheme, *keys), {})[f"{name}_texts"] = float(value)
    return errors


def _ends(protocol: Protocol, score: Score) -> tuple[str, str]:
    """The columns of a score's interval."""
    return ("low", "high") if score is protocol.scores[0] else (f"{score.name}_low", f"{score.name}_high")


def _columns(protocol: Protocol, score: Score) -> tuple[str, ...]:
    """A score and its intervals."""
    return score.name, *_ends(protocol, score), *([f"{score.name}_texts"] if protocol.texts else [])


def _without_older(frame: pd.DataFrame, found: Found, protocol: Protocol, score: Score, notes: list[str]) -> None:
    """Take a score away at lengths where a result was stored before there was the column that it needs."""
    results = [r for held in found.values() for r in held if r.protocol == protocol.name]
    older = sorted({r.length for r in results if score.needs is not None and score.needs not in r.windows})
    if older:
        frame.loc[frame["length"].isin(older), list(_columns(protocol, score))] = np.nan
        lengths = ",".join(map(str, older))
        notes.append(
            f"{protocol.name} at {lengths}: results without {score.needs_title}, so {score.title} is not known there; "
            f"`posbench eval --protocol {protocol.name} --length {lengths}` scores them again."
        )


def early_tokens(
    measurements: list[Measurement], by_position: pd.DataFrame, found: Found, training_length: int
) -> pd.DataFrame:
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
        of_scheme = [m for m in measurements if (m.scheme, m.protocol) == (bucket["scheme"], NONOVERLAPPING.name)]
        by_length = {m.length: m for m in of_scheme if m.length % training_length == 0}
        at = by_length.get(training_length)
        below = _mean_less_end(at, bucket["bucket_start"], found) if at else None
        reach = min((int(_last_tokens(m.results[0].windows).max()) for m in by_length.values()), default=0)
        for length, longer in sorted(by_length.items()):
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
    ends = _last_tokens(longer.results[0].windows)
    reach = int(ends[ends <= reach].max(initial=0))
    seeds = sorted(set(at.seeds) & set(longer.seeds))
    parts = []
    for m in (at, longer):
        windows = [m.results[m.seeds.index(seed)].windows for seed in seeds]
        inside = [rows[_last_tokens(rows) <= reach] for rows in windows]
        parts.append([(_by_document(rows, "nll"), _by_document(rows, "targets")) for rows in inside])
    targets = [of for part in parts for _, of in part]
    if not seeds or not reach or any(not np.array_equal(of, targets[0]) for of in targets):
        return None
    nll = np.mean([short - long for (short, _), (long, _) in zip(*parts, strict=True)], axis=0)
    return _with_doubt(nll, targets[0])


def _mean_less_end(at: Measurement, start: int, found: Found) -> tuple[float, float] | None:
    """The loss of `at` less that of its targets in the bucket from `start` on, by the position results of its runs.

    The doubt is that of the difference of two means with the documents in common, to first order. None where no run
    was evaluated by position over the same text.
    """
    sums = []
    for seed, result in zip(at.seeds, at.results, strict=True):
        beside = [r for r in found[at.scheme, seed] if (r.protocol, r.length) == (POSITION.name, at.length)]
        for rows in (r.windows for r in beside):
            if np.array_equal(_by_document(rows, "targets"), _by_document(result.windows, "targets")):
                end = rows.assign(**{c: rows[c].where(rows["bucket_start"] == start, 0) for c in ("nll", "targets")})
                sums.append([_by_document(part, c) for part in (rows, end) for c in ("nll", "targets")])
    if not sums:
        return None
    nll, targets, nll_end, targets_end = np.mean(sums, axis=0)
    mean, end_mean = nll.sum() / targets.sum(), nll_end.sum() / targets_end.sum()
    apart = (nll - mean * targets) / targets.sum() - (nll_end - end_mean * targets_end) / targets_end.sum()
    return float(mean - end_mean), _with_doubt(apart * targets.sum(), targets)[1]


def _last_tokens(rows: pd.DataFrame) -> Floats:
    """The token behind the last target of each row."""
    return (rows["start"] + rows["targets"]).to_numpy()


def _by_document(rows: pd.DataFrame, column: str) -> Floats:
    """Sums over the rows of each document, from document 0 on. A NaN is not skipped."""
    return np.asarray(np.bincount(rows["document"], weights=rows[column]), dtype=np.float64)


def _with_doubt(nll: Floats, targets: Floats) -> tuple[float, float]:
    """The token-weighted mean and half the 95 % interval that the choice of documents leaves."""
    scored = targets > 0
    return float(nll.sum() / targets.sum()), float(document_error(nll[None, scored], targets[scored])[0])
