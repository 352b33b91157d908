"""What loss by position says of long non-overlapping windows, by worked examples."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pandas as pd
import pytest

from posbench.reporting.measure import Measurement
from posbench.reporting.probes import early_tokens
from posbench.reporting.statistics import Interval

T = 64


def measurements(loss_of: dict[int, float]) -> list[Measurement]:
    nothing = Interval(0.0, 0.0, 0.0)
    rest: dict[str, Any] = {"seeds": (0,), "losses": (), "gap": nothing, "loss_documents": 0.0, "gap_documents": 0.0}
    counts: dict[str, Any] = {"bits_per_byte": 0.0, "targets": 1, "windows": 1, "documents": 1}
    means = {length: Interval(loss, loss, loss) for length, loss in loss_of.items()}
    return [Measurement("a", "nonoverlapping", "test", n, loss=mean, **rest, **counts) for n, mean in means.items()]


def positions(loss: np.ndarray, edges: list[int]) -> pd.DataFrame:
    """Buckets over losses by position, as evaluation cuts them."""
    rows = [
        {"scheme": "a", "length": len(loss), "bucket_start": lo, "bucket_end": hi, "loss": loss[lo:hi].mean()}
        for lo, hi in itertools.pairwise(edges)
    ]
    return pd.DataFrame(rows)


def test_where_longer_context_changes_nothing_all_of_the_gain_is_fewer_early_tokens() -> None:
    """Losses fall to their floor within 32 tokens and stay there, whatever the length."""
    curve = 2 + np.maximum(0, 3 - 0.1 * np.arange(1024))
    losses = {length: float(curve[:length].mean()) for length in (T, 2 * T, 16 * T)}
    early = early_tokens(measurements(losses), positions(curve[:T], [0, 1, 15, 44, 63, T]), T).set_index("length")
    for length in (2 * T, 16 * T):
        assert early.loc[length, "gain"] > 0
        assert early.loc[length, "early"] == pytest.approx(early.loc[length, "gain"], rel=1e-9)


def test_what_longer_context_gives_is_no_early_token() -> None:
    """Losses go on falling behind T: the part of fewer early tokens is less than the gain."""
    curve = 5 / np.sqrt(1 + np.arange(1024))
    losses = {length: float(curve[:length].mean()) for length in (T, 4 * T)}
    (row,) = early_tokens(measurements(losses), positions(curve[:T], [0, 1, 15, 44, T]), T).to_dict("records")
    end = curve[T - 1]
    assert 0 < row["early"] <= 0.75 * (losses[T] - end)  # a lower bound, as it says
    assert row["early"] < row["gain"]


def test_a_bucket_of_one_position_stands_for_nothing() -> None:
    curve = np.full(T, 2.0)
    curve[-1] = 9.0
    losses = {T: float(curve.mean()), 2 * T: float(curve.mean())}
    (row,) = early_tokens(measurements(losses), positions(curve, [0, 15, 63, T]), T).to_dict("records")
    assert row["early"] == pytest.approx(0.5 * (curve.mean() - 2.0))


def test_lengths_just_past_the_training_length_are_not_asked() -> None:
    found = early_tokens(measurements({T: 3.0, T + 1: 3.0}), positions(np.full(T, 2.0), [0, 32, T]), T)
    assert found.empty


def test_windows_of_the_training_length_go_before_longer_ones() -> None:
    """Longer windows hold few tokens at these positions, and other ones than the loss at T."""
    curve = np.concatenate((np.full(32, 3.0), np.full(32, 2.0)))
    far = positions(np.full(4 * T, 9.0), [0, 32, T, 2 * T, 4 * T])
    both = pd.concat((far, positions(curve, [0, 32, T])))
    (row,) = early_tokens(measurements({T: 2.5, 2 * T: 2.25}), both, T).to_dict("records")
    assert row["early"] == pytest.approx(0.25)


def test_other_windows_than_those_of_the_training_length_say_nothing_of_early_tokens() -> None:
    """At the same positions they hold other text."""
    curve = 2 + np.maximum(0, 3 - 0.1 * np.arange(4 * T))
    losses = {length: float(curve[:length].mean()) for length in (T, 4 * T)}
    assert early_tokens(measurements(losses), positions(curve, [0, 15, 32, T, 4 * T]), T).empty
