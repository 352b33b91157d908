"""Loss by position in the window, the retrieval probe, and what the first says of long non-overlapping windows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from posbench.reporting.evaluations import POSITION, RETRIEVAL
from posbench.reporting.frame import records
from posbench.reporting.measure import Found, Measurement, lengths_of, same_task
from posbench.reporting.statistics import t_interval

if TYPE_CHECKING:
    import pandas as pd


def position(found: Found, notes: list[str]) -> pd.DataFrame:
    """Loss (nats/token) by scheme, window length and bucket: token-weighted in each run, then the mean over runs."""
    return _probe(found, POSITION, ["bucket_start", "bucket_end"], lambda s: s["nll"] / s["targets"], "loss", notes)


def retrieval(found: Found, notes: list[str]) -> pd.DataFrame:
    """By how much a passage is easier for having been read before, nats/token, by gap in tokens.

    Both readings end with the same tokens at the same positions; in the control another passage stood in its place.
    """

    def drop(sums: pd.DataFrame) -> pd.Series:
        return (sums["control_nll"] - sums["second_nll"]) / sums["targets"]

    return _probe(found, RETRIEVAL, ["gap"], drop, "drop", notes)


def _probe(
    found: Found,
    protocol: str,
    by: list[str],
    score: Callable[[pd.DataFrame], pd.Series],
    name: str,
    notes: list[str],
) -> pd.DataFrame:
    """One row a scheme, length and group of `by`: the mean over runs of `score` of the group's sums."""
    import pandas as pd

    rows = []
    for length in lengths_of(found, protocol):
        values: dict[tuple[Any, ...], list[float]] = {}
        for (scheme, _), e in sorted(same_task(found, protocol, length, notes).items()):
            for key, value in score(e.sums(by)).items():
                values.setdefault((scheme, *(key if isinstance(key, tuple) else (key,))), []).append(float(value))
        for (scheme, *keys), each in values.items():
            mean = t_interval(np.array(each))
            place = {"scheme": scheme, "length": length, **dict(zip(by, keys, strict=True))}
            rows.append({**place, name: mean.mean, "low": mean.low, "high": mean.high, "seeds": len(each)})
    return pd.DataFrame(rows, columns=["scheme", "length", *by, name, "low", "high", "seeds"])


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
