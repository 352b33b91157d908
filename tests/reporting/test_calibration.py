"""The procedure keeps its word in trials with a known truth. Rates are held to binomial error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fabricate import World, fabricate
from scipy import stats

from posbench.reporting.calibration import (
    Rate,
    calibration_table,
    document_interval,
    gap_interval,
    heavy,
    planted,
    same_scheme,
    uneven,
)
from posbench.reporting.findings import find


@pytest.mark.parametrize(("schemes", "seeds"), [(2, 5), (3, 5), (11, 3)])
def test_one_scheme_under_several_names_is_told_apart_in_at_most_a_twentieth_of_trials(
    schemes: int, seeds: int
) -> None:
    rate = same_scheme(600, schemes, seeds)
    assert rate.hits <= stats.binom.isf(1e-4, rate.trials, 0.05)
    assert rate.keeps_promise


@pytest.mark.parametrize("noise", [heavy, uneven])
def test_nor_where_noise_is_heavy_or_uneven(noise: Callable) -> None:
    rate = same_scheme(600, 3, 5, noise)
    assert rate.hits <= stats.binom.isf(1e-4, rate.trials, 0.05)


@pytest.mark.parametrize(("schemes", "seeds"), [(2, 3), (2, 5), (3, 5), (11, 5)])
def test_a_planted_difference_is_found_at_the_promised_power(schemes: int, seeds: int) -> None:
    rate = planted(600, schemes, seeds)
    assert rate.hits >= stats.binom.ppf(1e-4, rate.trials, 0.80)
    assert rate.keeps_promise
    if schemes == 2:  # one pair: nothing but the promise itself
        assert rate.hits <= stats.binom.isf(1e-4, rate.trials, 0.80)


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    for rate in (gap_interval(600, 3), document_interval(1000, 7), document_interval(1000, 30)):
        assert rate.keeps_promise, rate


def test_a_broken_promise_shows() -> None:
    assert not Rate("twice the false positives", 1000, 100, 0.05, at_most=True).keeps_promise
    assert not Rate("half the power", 1000, 400, 0.80, at_most=False).keeps_promise
    table = calibration_table([Rate("x", 1000, 100, 0.05, at_most=True)])
    assert table.rows == [["x", "1000", "at most 5%", "10.0%", "NO"]]


@pytest.mark.slow
def test_the_whole_way_from_run_folders_makes_no_difference_where_there_is_none(tmp_path: Path) -> None:
    """A/A from files: 8 experiments of one scheme under two names; 4 false ones are rarer than 1 in 2000."""
    false = 0
    for trial in range(8):
        random = np.random.default_rng(trial)
        world = World({"qk_rope": 0.0, "nope": 0.0}, seeds=(0, 1, 2), lengths=(), probes=False, random=random)
        false += find(fabricate(tmp_path / str(trial), world)).pairs[0].is_decided
    assert false < 4
