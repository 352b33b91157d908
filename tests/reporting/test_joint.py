"""The joint interval of a gap over seeds and documents: its limits, and how often it holds a planted truth."""

from __future__ import annotations

import math

import numpy as np
import pytest

from posbench.evaluation.documents import document_error
from posbench.reporting.joint import joint_error
from posbench.reporting.statistics import t_interval

TARGETS = np.array([900, 40, 700, 850, 1000, 1000, 300, 650, 1000, 120, 1000, 800.0])


def gaps(random: np.random.Generator, seeds: int, of_seed: float, of_document: float, of_both: float) -> np.ndarray:
    """Gaps around 0, nats/token [seeds, documents]."""
    parts = (of_seed, (seeds, 1)), (of_document, (1, len(TARGETS))), (of_both, (seeds, len(TARGETS)))
    return np.asarray(sum(sd * random.normal(size=shape) for sd, shape in parts))


@pytest.mark.parametrize("seeds", [5, 8])
@pytest.mark.parametrize("of_document", [0.01, 0.05, 0.2])
def test_it_holds_the_truth_whichever_doubt_is_larger(seeds: int, of_document: float) -> None:
    random = np.random.default_rng(3)
    hits = 0
    for _ in range(1500):
        values = gaps(random, seeds, 0.04, of_document, 0.02)
        mean = float((values.mean(axis=0) * TARGETS).sum() / TARGETS.sum())
        hits += abs(mean) <= joint_error(values * TARGETS, TARGETS)
    assert 0.93 <= hits / 1500 <= 0.97


def test_where_only_one_of_the_two_differs_it_is_the_interval_over_that_one() -> None:
    random = np.random.default_rng(4)
    over_seeds = np.repeat(random.normal(0.1, 0.04, (6, 1)), len(TARGETS), axis=1)
    assert joint_error(over_seeds * TARGETS, TARGETS) == pytest.approx(t_interval(over_seeds[:, 0]).half_width)
    over_documents = np.repeat(random.normal(0.1, 0.04, (1, len(TARGETS))), 6, axis=0)
    (half,) = document_error(over_documents[:1] * TARGETS, TARGETS)
    assert joint_error(over_documents * TARGETS, TARGETS) == pytest.approx(half)


def test_it_is_not_given_where_it_was_not_shown_to_hold() -> None:
    values = gaps(np.random.default_rng(5), 8, 0.04, 0.05, 0.02) * TARGETS
    assert joint_error(values, TARGETS) > 0
    assert math.isnan(joint_error(values[:4], TARGETS))
    assert math.isnan(joint_error(values[:, :3], TARGETS[:3]))
    assert math.isnan(joint_error(np.where(values == values[0, 0], np.inf, values), TARGETS))
