"""Loss by position in the window, the retrieval probe, and what the first says of long non-overlapping windows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from posbench.reporting.evaluations import POSITION, RETRIEVAL
from posbench.reporting.frame import records
from posbench.reporting.measure import Found, Measurement, lengths_of, same_task
from posbench.reporting.statistics import t_interval

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
    """One row a scheme, length and group of `by`: each score of the group's sums, the mean over runs with its interval.

    The interval of the first is `low` and `high`, that of others `<score>_low` and `<score>_high`; `rows` and `targets`
    count what each run scored in the group.
    """
    import pandas as pd

    ends = {name: ("low", "high") if n == 0 else (f"{name}_low", f"{name}_high") for n, name in enumerate(scores)}
    made = []
    for length in lengths_of(found, protocol):
        runs = []
        for (scheme, _), e in same_task(found, protocol, length, notes).items():
            sums = e.sums(by).assign(scheme=scheme, rows=e.windows.groupby(by, sort=True).size())
            runs.append(sums.assign(**{name: score(sums) for name, score in scores.items()}).reset_index())
        for keys, each in pd.concat(runs).groupby(["scheme", *by], sort=True):
            row = {"length": length, "seeds": len(each), **dict(zip(["scheme", *by], keys, strict=True))}
            row |= {count: int(each[count].iloc[0]) for count in ("rows", "targets")}
            for name, (low, high) in ends.items():
                mean = t_interval(each[name].to_numpy())
                row |= {name: mean.mean, low: mean.low, high: mean.high}
            made.append(row)
    columns = [column for name in scores for column in (name, *ends[name])]
    return pd.DataFrame(made, columns=["scheme", "length", *by, *columns, "seeds", "rows", "targets"])


def early_tokens(measurements: list[Measurement], by_position: pd.DataFrame, training_length: int) -> pd.DataFrame:
    """How much of the gain of longer non-overlapping windows is only that fewer tokens stand near a window's start.

    With T the training length, `gain` is the loss at T less that at a longer length L. If more than T tokens of
    context made no token better or worse, the tokens behind T would each have the loss at the end of a T-token
    window, l_end, and the gain would be `early` = (1 - T / L) (loss_T - l_end). The last bucket below T that is at
    least T/8 wide stands for l_end, in windows of T tokens evaluated by position, the very windows of loss_T (the same
    positions of longer windows hold other text, whose loss differs by more than what is asked); its loss lies a
    little above l_end, so `early` is a lower bound.
    Columns: scheme, length, gain, early (nats/token), for lengths that are multiples of T.
    """
    import pandas as pd

    losses = {(m.scheme, m.length): m.loss.mean for m in measurements if m.protocol == "nonoverlapping"}
    width = by_position["bucket_end"] - by_position["bucket_start"]
    wide = (by_position["length"] == training_length) & (8 * width >= training_length)
    last = by_position[wide].sort_values("bucket_end").drop_duplicates("scheme", keep="last")
    ends = {row["scheme"]: float(row["loss"]) for row in records(last)}
    rows = []
    for scheme, length in sorted(losses):
        at_training = losses.get((scheme, training_length))
        if length > training_length and length % training_length == 0 and at_training is not None and scheme in ends:
            early = (1 - training_length / length) * (at_training - ends[scheme])
            gain = at_training - losses[scheme, length]
            rows.append({"scheme": scheme, "length": length, "gain": gain, "early": early})
    return pd.DataFrame(rows, columns=["scheme", "length", "gain", "early"])
