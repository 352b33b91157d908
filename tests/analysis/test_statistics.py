"""The statistics against scipy and against formulas by hand."""

import math
from itertools import combinations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from posbench.analysis.statistics import (
    beats,
    compare,
    conclusions,
    detectable,
    equivalent_pairs,
    flip_test,
    letters,
    significant_pairs,
    verdict,
)


def losses(seeds=5, **levels):
    random = np.random.default_rng(3)
    shared = random.normal(0, 0.05, seeds)
    return pd.DataFrame({name: 3 + level + shared + random.normal(0, 0.004, seeds) for name, level in levels.items()})


TABLE = losses(a=0.0, b=0.0005, c=0.03, d=0.2)
NOISE = np.random.default_rng(5).normal(0, 0.01, (3, 5))


def test_pairs_are_the_paired_t_test_and_its_interval():
    pairs = compare(TABLE).set_index(["left", "right"])
    assert len(pairs) == 6
    for (left, right), pair in pairs.iterrows():
        test = stats.ttest_rel(TABLE[right], TABLE[left])
        ends = test.confidence_interval(0.95)
        assert pair["difference"] == pytest.approx((TABLE[right] - TABLE[left]).mean()) and pair["difference"] >= 0
        assert (pair["p"], pair["difference_low"], pair["difference_high"]) == pytest.approx((test.pvalue, *ends))
        p_below = stats.ttest_1samp(TABLE[right] - TABLE[left], 0.01, alternative="less").pvalue
        p_above = stats.ttest_1samp(TABLE[right] - TABLE[left], -0.01, alternative="greater").pvalue
        assert pair["p_equal"] == pytest.approx(max(p_below, p_above))


def test_holms_correction_is_over_the_claimed_pairs():
    fixed = [{"a", "b"}, {"a", "c"}, {"b", "c"}, {"c", "d"}]
    for primary, claimed, size in ((["a b c", "d c", "a elsewhere"], fixed, 5), ([], None, 6)):  # one is absent
        pairs = compare(TABLE, primary=primary)
        names = [{left, right} for left, right in zip(pairs["left"], pairs["right"], strict=True)]
        inside = np.array([claimed is None or pair in claimed for pair in names])
        p = pairs.loc[inside, "p"].sort_values()
        steps = np.maximum.accumulate(p.to_numpy() * (size - np.arange(len(p)))).clip(max=1)
        assert pairs.loc[p.index, "p_claimed"].to_numpy() == pytest.approx(steps)
        assert pairs.loc[~inside, "p_claimed"].isna().all()


def test_runs_that_are_the_same_to_the_last_bit_are_equal_and_not_decided():
    table = TABLE.assign(twin=TABLE["a"])
    pairs = compare(table)
    assert verdict(pairs, "a", "twin") == "equal"
    twins = frozenset(("a", "twin"))
    assert twins in equivalent_pairs(pairs) and twins not in significant_pairs(pairs)


def test_verdicts():
    pairs = compare(losses(seeds=8, a=0.0, b=0.0, c=0.0085, d=0.2))
    assert verdict(pairs, "d", "a") == "worse" and verdict(pairs, "a", "d") == "better"
    assert verdict(pairs, "a", "b") == "equal"
    assert verdict(compare(TABLE.iloc[:1]), "a", "d") == ""


def test_the_detectable_difference_is_found_in_80_percent_of_cases():
    for seeds, level in ((3, 0.05), (5, 0.005)):
        shift = detectable(0.02, seeds, level) * math.sqrt(seeds) / 0.02
        assert stats.nct.sf(stats.t.isf(level / 2, seeds - 1), seeds - 1, shift) == pytest.approx(0.8, abs=1e-6)


@given(st.sets(st.tuples(st.integers(0, 6), st.integers(0, 6)).filter(lambda pair: pair[0] < pair[1])))
def test_schemes_share_a_letter_exactly_where_their_pair_is_not_decided(apart):
    order = list("abcdefg")
    pairs = {frozenset((order[i], order[j])) for i, j in apart}
    given_letters = letters(order, pairs)
    for first, second in combinations(order, 2):
        share = set(given_letters[first]) & set(given_letters[second])
        assert bool(share) == (frozenset((first, second)) not in pairs)
    assert given_letters["a"].startswith("a")


def test_conclusions_name_every_decided_pair_and_every_open_one():
    """Schemes are ordered by their mean losses: none is put above one with a lower loss."""
    table = losses(seeds=6, a=0.0, b=0.004, c=0.2, d=0.3)
    summary = conclusions(["a", "b", "c", "d"], compare(table))
    assert summary["beats"] == {"a": ["c", "d"], "b": ["c", "d"], "c": ["d"]} and summary["has_letters"]
    assert (summary["decided"], summary["pairs"], summary["open"]) == (5, 6, [("a", "b")])
    fixed = conclusions(["a", "b", "c", "d"], compare(table, primary=["a d", "b c"]))
    assert fixed["beats"] == {"a": ["d"], "b": ["c"]} and fixed["pairs"] == 2 and not fixed["has_letters"]


def test_differences_that_sum_to_zero_but_for_rounding():
    assert flip_test(np.array([1.3, -1.4, -1.7, -0.1, 1.3, 0.6])) == 1.0


@given(st.lists(st.integers(-50, 50).map(float), min_size=2, max_size=6))  # whose means have no rounding
def test_the_test_of_onsets_is_that_of_scipy(values):
    difference = np.array(values)
    flips = stats.permutation_test((difference,), np.mean, permutation_type="samples", n_resamples=np.inf)
    assert flip_test(difference) == pytest.approx(flips.pvalue, abs=1e-9)


def test_a_scheme_must_be_beaten_at_both_rates_that_its_search_kept():
    """By scipy: the larger one-sided paired p of the two, doubled. A rate at which a run diverged counts as beaten."""
    best, first, second = (
        losses(a=level)["a"].to_numpy() + noise for level, noise in zip((0.0, 0.2, 0.04), NOISE, strict=True)
    )
    one_sided = [stats.ttest_rel(kept, best, alternative="greater").pvalue for kept in (first, second)]
    assert beats(best, [first, second]) == pytest.approx(2 * max(one_sided)) and one_sided[1] > 5 * one_sided[0]
    assert beats(best, [first]) == pytest.approx(stats.ttest_rel(first, best).pvalue)
    diverged = np.where(np.arange(5) == 2, math.inf, second)
    assert beats(best, [first, diverged]) == pytest.approx(2 * one_sided[0])
    assert beats(first, [best, second]) == 1.0, "the worse one beats nobody"


def test_a_rate_with_a_diverged_run_is_beaten_only_by_who_is_ahead_with_every_seed():
    a, b = np.array([1.0, 1.1, 1.2, 1.1, 1.0]), np.array([1.5, 1.7, 1.6, 1.8, 1.6])
    one_diverged = np.where(np.arange(5) == 2, math.inf, b)
    behind = np.where(np.arange(5) == 2, math.inf, b - 8)
    p = stats.ttest_rel(b, a).pvalue
    assert beats(a, [b, one_diverged]) == pytest.approx(p) and p < 0.05
    assert beats(a, [b, behind]) == 1.0, "b is far ahead in the runs at that rate that did not diverge"
    # Nothing can be tested if each kept rate has a diverged run, of either scheme.
    assert beats(a, [one_diverged, one_diverged]) == beats(a, [behind, behind]) == 1.0
    assert beats(one_diverged, [b, b + 1]) == beats(one_diverged, [one_diverged, one_diverged]) == 1.0
    both = beats(np.stack([a, a]), [np.stack([b, one_diverged]), np.stack([one_diverged, one_diverged])])
    assert both.tolist() == pytest.approx([p, 1.0])


@pytest.mark.parametrize("gap", [1e-9, 0.3, 8.0])
def test_a_gap_that_is_the_same_with_every_seed_is_open(gap):
    table = TABLE[["a"]].assign(b=TABLE["a"] + gap)
    pairs = compare(table)
    assert pairs["p_claimed"].tolist() == [1.0] and verdict(pairs, "a", "b") == ("equal" if gap < 0.01 else "open")
    assert compare(table.assign(b=table["b"] + NOISE[0] / 100))["p"][0] < 1


def test_a_gap_at_best_rates_that_the_second_rate_does_not_confirm_is_open():
    table = losses(seeds=5, a=0.0, b=0.1)
    second = pd.DataFrame({"a": table["a"] + 0.01, "b": table["a"] + np.array([0.02, -0.03, 0.01, 0.0, 0.02])})
    at_rates, at_best = compare(table), compare(table, second)
    assert verdict(at_rates, "a", "b") == "better" and verdict(at_best, "a", "b") == "open"
    assert at_best["p_at_rates"].tolist() == at_rates["p"].tolist()
    confirmed = compare(table, second.assign(b=table["b"] + 0.03))
    assert verdict(confirmed, "a", "b") == "better" and significant_pairs(confirmed) == {frozenset("ab"): "a"}
    assert math.isnan(compare(table, second[:2].reindex(range(5)))["p_claimed"][0]), "two seeds are no test"


def test_schemes_are_equal_only_if_they_are_so_at_both_rates():
    table = losses(seeds=8, a=0.0, b=0.0)
    near, far = table + 0.001, table + np.array([0.001, 0.05])
    assert verdict(compare(table, near), "a", "b") == "equal" and verdict(compare(table, far), "a", "b") == "open"


def test_a_pair_of_fewer_seeds_than_are_needed_is_not_tested():
    table = TABLE.assign(d=TABLE["d"].where(np.arange(5) < 2))
    pairs = compare(table)
    assert (pairs["p"].isna() == (pairs["seeds"] == 2)).all() and verdict(pairs, "d", "c") == ""
    assert verdict(compare(TABLE, fewest=6), "d", "c") == ""
