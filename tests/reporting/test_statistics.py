"""The statistics against scipy and against formulas by hand."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pandas as pd
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy import stats

from posbench.evaluation.protocols.order import flip_test
from posbench.reporting.statistics import (
    compare,
    conclusions,
    decided,
    detectable,
    equivalent,
    holm,
    interval,
    letters,
    sign_test,
    verdict,
)


def losses(seeds: int = 5, **levels: float) -> pd.DataFrame:
    random = np.random.default_rng(3)
    shared = random.normal(0, 0.05, seeds)
    return pd.DataFrame({name: 3 + level + shared + random.normal(0, 0.004, seeds) for name, level in levels.items()})


TABLE = losses(a=0.0, b=0.0005, c=0.03, d=0.2)


def test_pairs_are_the_paired_t_test_and_its_interval() -> None:
    pairs = compare(TABLE, "c").set_index(["left", "right"])
    assert len(pairs) == 6
    for (left, right), pair in pairs.iterrows():
        test = stats.ttest_rel(TABLE[right], TABLE[left])
        ends = test.confidence_interval(0.95)
        assert pair["difference"] == pytest.approx((TABLE[right] - TABLE[left]).mean()) and pair["difference"] >= 0
        assert (pair["p"], pair["difference_low"], pair["difference_high"]) == pytest.approx((test.pvalue, *ends))
        p_below = stats.ttest_1samp(TABLE[right] - TABLE[left], 0.01, alternative="less").pvalue
        p_above = stats.ttest_1samp(TABLE[right] - TABLE[left], -0.01, alternative="greater").pvalue
        assert pair["p_equal"] == pytest.approx(max(p_below, p_above))


def test_holms_correction_is_by_family() -> None:
    pairs = compare(TABLE, "c", [("a", ">", "b"), ("b", "~", "d")], primary=["a b c", "d c", "a elsewhere"])
    names = [{left, right} for left, right in zip(pairs["left"], pairs["right"], strict=True)]
    for family, inside, size in (
        ("all", [True] * 6, 6),
        ("baseline", ["c" in pair for pair in names], 3),
        ("published", [pair in ({"a", "b"}, {"b", "d"}) for pair in names], 2),
        ("primary", [pair in ({"a", "b"}, {"a", "c"}, {"b", "c"}, {"c", "d"}) for pair in names], 5),  # one absent
    ):
        p = pairs.loc[inside, "p"].sort_values()
        steps = np.maximum.accumulate(p.to_numpy() * (size - np.arange(len(p)))).clip(max=1)
        assert pairs.loc[p.index, f"p_{family}"].to_numpy() == pytest.approx(steps)
        assert pairs.loc[~np.array(inside), f"p_{family}"].isna().all()


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_keeps_the_order_and_is_never_below_p(p: list[float]) -> None:
    adjusted = holm(np.array(p))
    assert (adjusted >= np.array(p) - 1e-15).all() and adjusted.max() <= 1
    assert (np.diff(adjusted[np.argsort(p, kind="stable")]) >= 0).all()
    assert adjusted.min() == pytest.approx(min(1, min(p) * len(p)))


def test_pairs_use_the_seeds_that_both_have() -> None:
    table = TABLE.copy()
    table.loc[0, "a"] = math.nan
    pairs = compare(table, "c").set_index(["left", "right"])
    assert pairs.loc[("a", "d"), "seeds"] == 4 and pairs.loc[("b", "d"), "seeds"] == 5
    assert pairs.loc[("a", "d"), "difference"] == pytest.approx((TABLE["d"] - TABLE["a"])[1:].mean())


def test_one_seed_gives_differences_and_no_tests() -> None:
    pairs = compare(TABLE.iloc[:1], "a")
    assert pairs["difference"].notna().all()
    assert pairs[["p", "p_all", "difference_low", "p_equal", "detectable"]].isna().all(axis=None)
    assert interval([2.0])[0] == 2.0 and math.isnan(interval([2.0])[1])


def test_runs_that_are_the_same_to_the_last_bit_are_equal_and_not_decided() -> None:
    table = TABLE.assign(twin=TABLE["a"])
    pairs = compare(table, "a")
    assert verdict(pairs, "a", "twin", "all") == "equal"
    assert frozenset(("a", "twin")) in equivalent(pairs) and frozenset(("a", "twin")) not in decided(pairs)


def test_verdicts() -> None:
    pairs = compare(losses(seeds=8, a=0.0, b=0.0, c=0.0085, d=0.2), "a")
    assert verdict(pairs, "d", "a", "baseline") == "worse" and verdict(pairs, "a", "d", "baseline") == "better"
    assert verdict(pairs, "a", "b", "baseline") == "equal"
    assert verdict(compare(TABLE.iloc[:1], "a"), "a", "d", "baseline") == ""


def test_the_detectable_difference_is_found_in_80_percent_of_cases() -> None:
    for seeds, level in ((3, 0.05), (5, 0.005)):
        shift = detectable(0.02, seeds, level) * math.sqrt(seeds) / 0.02
        assert stats.nct.sf(stats.t.isf(level / 2, seeds - 1), seeds - 1, shift) == pytest.approx(0.8, abs=1e-6)


@given(st.sets(st.tuples(st.integers(0, 6), st.integers(0, 6)).filter(lambda pair: pair[0] < pair[1])))
def test_schemes_share_a_letter_exactly_where_their_pair_is_not_decided(apart: set[tuple[int, int]]) -> None:
    order = list("abcdefg")
    pairs = {frozenset((order[i], order[j])) for i, j in apart}
    given_letters = letters(order, pairs)
    for first, second in combinations(order, 2):
        share = set(given_letters[first]) & set(given_letters[second])
        assert bool(share) == (frozenset((first, second)) not in pairs)
    assert given_letters["a"].startswith("a")


def test_conclusions_name_leaders_the_beaten_and_the_least_gap_between_them() -> None:
    table = losses(seeds=6, a=0.0, b=0.001, c=0.2, d=0.3)
    findings = conclusions(["a", "b", "c", "d"], compare(table, "c"))
    assert (findings["leaders"], findings["beaten"], findings["between"]) == (["a", "b"], ["c", "d"], [])
    assert findings["by"] == pytest.approx(min((table["c"] - table[leader]).mean() for leader in "ab"))
    assert findings["decided"] == 5 and findings["pairs"] == 6


def test_a_scheme_that_beats_the_second_leads_alone() -> None:
    findings = conclusions(["a", "b", "c"], compare(losses(seeds=6, a=0.0, b=0.1, c=0.1005), "c"))
    assert (findings["leaders"], findings["beaten"], findings["between"]) == (["a"], ["b", "c"], [])


@example([1.3, -1.4, -1.7, -0.1, 1.3, 0.6])  # 0 but for rounding
@given(st.lists(st.floats(-5, 5).map(lambda value: round(value, 1)), min_size=2, max_size=6))
def test_tests_by_signs_are_those_of_scipy(values: list[float]) -> None:
    difference = np.array(values)
    flips = stats.permutation_test((difference,), np.mean, permutation_type="samples", n_resamples=np.inf)
    assert flip_test(difference) == pytest.approx(flips.pvalue, abs=1e-9)
    positive, negative = (difference > 0).sum(), (difference < 0).sum()
    if positive + negative:
        assert sign_test(difference) == pytest.approx(stats.binomtest(positive, positive + negative).pvalue)


def test_where_pilots_chose_the_rates_a_difference_is_tested_against_what_they_may_cost() -> None:
    plain, chosen = compare(TABLE, "c"), compare(TABLE, "c", pilots=4)
    allowed = np.median(plain["sd"])  # ALLOWED / sqrt(4)
    for plain_pair, allowed_pair in zip(plain.to_dict("records"), chosen.to_dict("records"), strict=True):
        apart = TABLE[allowed_pair["right"]] - TABLE[allowed_pair["left"]]
        one_sided = stats.ttest_1samp(apart, allowed, alternative="greater").pvalue
        assert allowed_pair["p"] == pytest.approx(min(1, 2 * one_sided)) and allowed_pair["p"] >= plain_pair["p"]
        assert allowed_pair["detectable"] == pytest.approx(plain_pair["detectable"] + allowed)
        at_most = stats.ttest_1samp(apart, 0.01 - allowed, alternative="less").pvalue
        assert (
            allowed_pair["p_equal"] == pytest.approx(at_most if allowed < 0.01 else 1)
            and allowed_pair["p_equal"] >= plain_pair["p_equal"]
        )


def test_tests_of_pairs_that_were_fixed_do_not_depend_on_other_rows() -> None:
    groups = ["a b c", "a elsewhere"]
    alone = compare(TABLE[["a", "b", "c"]], "c", pilots=1, primary=groups).set_index(["left", "right"])
    noisy = TABLE.assign(noisy=TABLE["a"] + [0.5, 0.1, 0.9, 0.0, 0.3])
    with_others = compare(noisy, "c", pilots=1, primary=groups).set_index(["left", "right"])
    for column in ("allowed", "p", "p_primary"):
        assert with_others.loc[alone.index, column].tolist() == alone[column].tolist()
    assert with_others["p_primary"].notna().sum() == 3
    plain = compare(TABLE[["a", "b", "c"]], "c", primary=groups).set_index(["left", "right"])
    assert alone["p_primary_at_rates"].tolist() == plain["p_primary"].tolist() != alone["p_primary"].tolist()


def test_a_pair_of_fewer_seeds_than_are_needed_is_not_tested() -> None:
    table = TABLE.assign(d=TABLE["d"].where(np.arange(5) < 2))
    pairs = compare(table, "c")
    assert (pairs["p"].isna() == (pairs["seeds"] == 2)).all() and verdict(pairs, "d", "c", "baseline") == ""
    assert verdict(compare(TABLE, "c", fewest=6), "d", "c", "baseline") == ""


def test_where_seeds_split_in_two_a_mean_decides_nothing() -> None:
    """Five of eight seeds catch on under only one scheme: p is 0.01 by the t-test and above 0.5 by signs."""
    caught_on = np.array([0.3, 0.3, 0.3, 0.3, 0.3, -0.001, -0.001, -0.001])
    table = pd.DataFrame({"early": np.full(8, 2.3), "late": 2.3 + caught_on})
    split = compare(table, "early", primary=["early late"])
    assert split["p"][0] < 0.02 and split["p_primary_at_rates"][0] < 0.02 and split["p_sign"][0] > 0.5
    assert (
        decided(split) == {} == decided(split, "primary_at_rates")
        and verdict(split, "late", "early", "baseline") == "open"
    )
    most = compare(
        pd.DataFrame({"early": np.full(8, 2.3), "late": 2.3 + np.append(caught_on[:5], [0.3] * 2 + [0])}), "early"
    )
    assert decided(most) and verdict(most, "late", "early", "baseline") == "worse"
