"""The interval over documents, against Student's and against draws with a known truth."""

import math

import numpy as np
import pytest
from scipy import stats

from posbench.analysis.statistics import FEWEST_DOCUMENTS, document_error, document_variance, effective, quantile

LENGTHS = np.array([17781, 12795, 12276, 10510, 7172, 5621, 5175, 4543, 4534, 3157, 2893, 1825, 900, 300, 60.0])


def test_documents_of_equal_length_give_students_interval():
    values, targets = np.random.default_rng(0).normal(0.1, 0.05, 20), np.full(20, 500.0)
    low, high = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert document_error((values * targets)[None], targets)[0] == pytest.approx((high - low) / 2)


def test_95_of_100_intervals_over_unequal_documents_hold_the_truth():
    """The draws are independent of the quantile's own. Student's t of n - 1 would hold 88 %."""
    values = np.random.default_rng(5).normal(0.02, 0.03, (20_000, len(LENGTHS)))
    half = document_error(values * LENGTHS, LENGTHS)
    off = np.abs((values * LENGTHS).sum(1) / LENGTHS.sum() - 0.02)
    assert np.mean(off <= half) == pytest.approx(0.95, abs=0.007)
    naive = half / quantile(LENGTHS / LENGTHS.sum()) * stats.t.isf(0.025, len(LENGTHS) - 1)
    assert np.mean(off <= naive) < 0.94


def test_the_variance_is_right_on_average():
    values, weights = np.random.default_rng(6).normal(0, 0.03, (20_000, len(LENGTHS))), LENGTHS / LENGTHS.sum()
    assert document_variance(values * LENGTHS, LENGTHS).mean() == pytest.approx(0.03**2 * (weights**2).sum(), rel=0.02)


def test_many_small_documents_hardly_count_beside_large_ones():
    """Five that hold the text decide the mean, and their differences are the doubt."""
    targets = np.array([1.0] * 5 + [1e6] * 5)
    apart, alike = np.array([1, 2, 3, 4, 5.0]), np.array([1, 1.01, 1.02, 1.03, 1.04])
    nll = np.stack([np.append(np.full(5, 7.0), values * 1e6) for values in (apart, alike)])
    for half, values in zip(document_error(nll, targets), (apart, alike), strict=True):
        assert half == pytest.approx(stats.t.isf(0.025, 4) * values.std(ddof=1) / math.sqrt(5), rel=0.05)


def test_too_few_documents_have_no_interval():
    few = np.array([1e6, 1e6, 1e6, 1.0, 1.0])
    assert effective(few) < FEWEST_DOCUMENTS
    assert np.isnan(document_error(np.ones((2, 5)), few)).all()
    assert math.isnan(document_error(np.array([[3.0]]), np.array([2.0]))[0])


def test_documents_without_targets_are_none_and_a_loss_that_is_no_number_has_no_interval():
    nll, targets = np.array([[1.0, 2.0, 3.0, 2.5, 1.5, 2.2]]), np.array([1.0, 2, 2, 2, 1, 1])
    with_empty = document_error(np.append(nll, [[0.0]], axis=1), np.append(targets, 0))
    assert with_empty == pytest.approx(document_error(nll, targets))
    assert np.isnan(document_error(np.where(nll == 3, np.inf, nll), targets)).all()
