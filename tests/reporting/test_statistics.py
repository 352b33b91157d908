"""The statistics against scipy's own answers, hand-made examples, brute force and simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from posbench.reporting.chains import blockers, chain, chain_without, letters
from posbench.reporting.power import Spread, power, sd_range, seeds_to_decide, smallest_visible
from posbench.reporting.statistics import LEVEL, compare_all, holm, t_interval


@st.composite
def some_losses(draw: st.DrawFn) -> np.ndarray:
    """[seeds, schemes] of a few levels with noise of a scheme's own size: some pairs are decided, some are not."""
    schemes, seeds = draw(st.integers(2, 6)), draw(st.integers(1, 6))
    levels = np.array(draw(st.lists(st.integers(0, 4), min_size=schemes, max_size=schemes)))
    noise = np.array(draw(st.lists(st.sampled_from([1e-4, 1e-2, 0.3]), min_size=schemes, max_size=schemes)))
    random = np.random.default_rng(draw(st.integers(0, 1000)))
    return 3 + 0.1 * levels + noise * random.normal(size=(seeds, schemes))


losses_of_schemes = some_losses()


def names(count: int) -> list[str]:
    return [f"s{n}" for n in range(count)]


def noisy(levels: list[float], seeds: int, sd: float = 0.001, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    return 3 + random.normal(0, 0.05, (seeds, 1)) + np.array(levels) + random.normal(0, sd, (seeds, len(levels)))


def test_an_interval_is_scipys() -> None:
    values = np.array([2.1, 2.4, 2.2, 2.9])
    ours, theirs = t_interval(values), stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), rel=1e-12)


def test_one_value_has_no_interval() -> None:
    one = t_interval(np.array([2.0]))
    assert one.mean == 2.0 and math.isnan(one.low) and math.isnan(one.high)


def test_holm_by_a_worked_example() -> None:
    assert holm(np.array([0.01, 0.04, 0.03, 0.005])) == pytest.approx([0.03, 0.06, 0.06, 0.02])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_is_its_definition(p: list[float]) -> None:
    m = len(p)

    def adjusted(x: float) -> float:  # Holm 1979: the largest (m - how many are smaller) times q over all q up to x
        return min(1.0, max((m - sum(r < q for r in p)) * q for q in p if q <= x))

    assert holm(np.array(p)) == pytest.approx([adjusted(x) for x in p])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_corrects_upwards_and_less_than_bonferroni(p: list[float]) -> None:
    adjusted = holm(np.array(p))
    assert (adjusted >= np.array(p) - 1e-15).all()
    assert (adjusted <= np.minimum(1, len(p) * np.array(p)) + 1e-15).all()


def test_a_pair_is_scipys_paired_t_test() -> None:
    losses = noisy([0, 0.002], 6)
    (pair,) = compare_all(losses, ["a", "b"])
    theirs = stats.ttest_rel(losses[:, 1], losses[:, 0])
    assert pair.p == pytest.approx(theirs.pvalue, rel=1e-12)
    assert (pair.interval.low, pair.interval.high) == pytest.approx(tuple(theirs.confidence_interval(0.95)))


def test_what_seeds_have_in_common_does_not_hide_a_difference() -> None:
    losses = noisy([0, 0.01], 5)  # seeds move both by 0.05
    assert stats.ttest_ind(losses[:, 0], losses[:, 1]).pvalue > 0.5
    assert compare_all(losses, ["a", "b"])[0].is_decided


@given(losses_of_schemes)
def test_a_chain_names_every_scheme_once_in_the_order_of_the_means(losses: np.ndarray) -> None:
    made = chain(compare_all(losses, names(losses.shape[1])))
    assert sorted(made.order) == names(losses.shape[1])
    means = dict(zip(names(losses.shape[1]), losses.mean(axis=0), strict=True))
    ordered = [means[name] for name in made.order]
    assert ordered == sorted(ordered)
    assert [name for group in made.groups() for name in group] == made.order


@given(losses_of_schemes)
def test_every_reading_of_a_chain_is_a_decided_pair(losses: np.ndarray) -> None:
    pairs = compare_all(losses, names(losses.shape[1]))
    made = chain(pairs)
    decided = {(p.left, p.right) for p in pairs if p.is_decided}
    for n, a in enumerate(made.order):
        for m, b in enumerate(made.order[n + 1 :], n + 1):
            if ">" in made.signs[n:m]:
                assert (a, b) in decided
            else:
                assert ((a, b) in decided) == any((p.left, p.right) == (a, b) for p in made.inside)


@given(losses_of_schemes, st.sampled_from([-0.5, 0.25, 2.0]))
@settings(max_examples=50)
def test_a_constant_on_all_losses_changes_nothing(losses: np.ndarray, constant: float) -> None:
    rounded = np.round(losses * 1024) / 1024  # so that adding is exact
    before = compare_all(rounded, names(losses.shape[1]))
    after = compare_all(rounded + constant, names(losses.shape[1]))
    assert chain(before).text == chain(after).text
    assert [p.p for p in before] == pytest.approx([p.p for p in after], nan_ok=True, abs=1e-9)


@given(losses_of_schemes, st.randoms())
@settings(max_examples=50)
def test_the_order_of_seeds_and_schemes_does_not_matter(losses: np.ndarray, random: object) -> None:
    generator = np.random.default_rng(random.getrandbits(32))  # type: ignore[attr-defined]
    rows, columns = generator.permutation(losses.shape[0]), generator.permutation(losses.shape[1])
    named = names(losses.shape[1])
    shuffled = compare_all(losses[rows][:, columns], [named[n] for n in columns])
    before = {frozenset((p.left, p.right)): p.p for p in compare_all(losses, named)}
    after = {frozenset((p.left, p.right)): p.p for p in shuffled}
    assert before == pytest.approx(after, nan_ok=True, abs=1e-9)


@given(losses_of_schemes)
def test_two_schemes_share_a_letter_if_and_only_if_they_are_not_told_apart(losses: np.ndarray) -> None:
    pairs = compare_all(losses, names(losses.shape[1]))
    given_letters = letters(pairs)
    for pair in pairs:
        assert bool(set(given_letters[pair.left]) & set(given_letters[pair.right])) != pair.is_decided
    assert "a" in given_letters[pairs[0].left]


def test_neighbours_that_differ_are_no_cut_where_others_across_it_do_not() -> None:
    """b and c are told apart, a (noisy) and c are not: `a ~ b > c` would say that a is better than c."""
    losses = noisy([0.0, 0.01, 0.02], 6, sd=0.0005)
    losses[:, 0] += np.array([0.1, -0.1, 0.1, -0.1, 0.1, -0.1])
    made = chain(compare_all(losses, ["a", "b", "c"]))
    assert made.order == ["a", "b", "c"] and made.text == "a ~ b ~ c"
    assert [(p.left, p.right) for p in made.inside] == [("b", "c")]


def test_letters_by_a_worked_example() -> None:
    losses = noisy([0.0, 0.005, 0.01], 6, sd=0.0005)
    losses[:, 1] += np.array([0.04, -0.04, 0.03, -0.03, 0.02, -0.02])
    assert letters(compare_all(losses, ["a", "b", "c"])) == {"a": "a", "b": "ab", "c": "b"}


def test_a_clear_order_is_written_with_greater_signs() -> None:
    made = chain(compare_all(noisy([0, 0.1, 0.1002, 0.3], 6), ["a", "b", "c", "d"]))
    assert made.text in ("a > b ≈ c > d", "a > c ≈ b > d") and not made.inside


def test_a_noisy_scheme_between_two_that_differ_makes_no_false_cut() -> None:
    """a > c is decided, b is neither: no way of writing groups may claim b > c or a > b."""
    losses = noisy([0.0, 0.005, 0.01], 6, sd=0.0005)
    losses[:, 1] += np.array([0.04, -0.04, 0.03, -0.03, 0.02, -0.02])
    made = chain(compare_all(losses, ["a", "b", "c"]))
    assert made.text == "a ~ b ~ c"
    assert [(p.left, p.right) for p in made.inside] == [("a", "c")]


def test_one_seed_claims_no_order() -> None:
    pairs = compare_all(noisy([0, 0.5, 1.0], 1), ["a", "b", "c"])
    made = chain(pairs)
    assert made.text == "a, b, c" and not made.is_tested
    assert not any(p.is_decided for p in pairs)
    assert math.isnan(pairs[0].smallest_visible) and math.isnan(pairs[0].seeds_to_decide)


def test_equal_losses_are_not_told_apart() -> None:
    same = np.repeat(noisy([0.0], 4), 2, axis=1)
    (pair,) = compare_all(same, ["a", "b"])
    assert pair.p == 1.0 and not pair.is_decided


@pytest.mark.parametrize(("seeds", "effect", "level"), [(3, 4.0, 0.05), (5, 1.7, 0.05), (5, 3.0, 0.005)])
def test_power_is_what_simulation_finds(seeds: int, effect: float, level: float) -> None:
    trials = np.random.default_rng(0).normal(effect, 1.0, (seeds, 20_000))
    found = (stats.ttest_1samp(trials, 0, alternative="greater").pvalue < level / 2).mean()
    assert power(effect, Spread(1.0), seeds, level) == pytest.approx(found, abs=0.012)


@given(st.integers(2, 30), st.floats(1e-4, 0.05), st.floats(1e-5, 10.0))
@settings(max_examples=30)
def test_the_smallest_visible_difference_has_the_promised_power(seeds: int, level: float, sd: float) -> None:
    effect = smallest_visible(Spread(sd), seeds, level)
    assert power(effect, Spread(sd), seeds, level) == pytest.approx(0.8, abs=1e-6)


@given(st.floats(0.2, 5.0), st.sampled_from([0.05, 0.01, 0.05 / 55]))
@settings(max_examples=30)
def test_as_many_seeds_as_it_takes_and_no_more(effect: float, level: float) -> None:
    enough = int(seeds_to_decide(effect, Spread(1.0), level))
    assert power(effect, Spread(1.0), enough, level) >= 0.8
    assert enough == 2 or power(effect, Spread(1.0), enough - 1, level) < 0.8


def test_hopeless_differences_are_said_to_be_so() -> None:
    assert math.isinf(seeds_to_decide(1e-6, Spread(1.0), 0.05)) and math.isinf(seeds_to_decide(0.0, Spread(1.0), 0.05))


def test_an_open_pair_is_held_to_the_level_at_which_holm_would_decide_it() -> None:
    pairs = compare_all(noisy([0, 0.0001, 0.5], 8), ["a", "b", "c"])
    assert [p.is_decided for p in pairs] == [False, True, True]
    assert pairs[0].level == LEVEL  # two of three are decided: the last is tested at the full level


def test_the_spread_of_a_spread() -> None:
    random = np.random.default_rng(0)
    sds = random.normal(size=(5, 20_000)).std(axis=0, ddof=1)
    low, high = sd_range(5)
    assert np.mean((sds * low < 1) & (sds * high > 1)) == pytest.approx(0.95, abs=0.005)


@given(losses_of_schemes)
def test_a_chain_without_one_says_nothing_but_what_was_decided_of_all(losses: np.ndarray) -> None:
    pairs = compare_all(losses, names(losses.shape[1]))
    decided = {(p.left, p.right) for p in pairs if p.is_decided}
    for name, other in blockers(pairs).items():
        assert name not in other.order and other.signs.count(">") > chain(pairs).signs.count(">")
        assert other.signs == chain_without(pairs, name).signs
        for cut, sign in enumerate(other.signs, 1):
            if sign == ">":
                assert all((a, b) in decided for a in other.order[:cut] for b in other.order[cut:])


@given(losses_of_schemes, st.sampled_from([0.001, 0.02, 1.0]))
def test_every_reading_of_a_row_of_equals_is_an_equivalent_pair(losses: np.ndarray, margin: float) -> None:
    pairs = compare_all(losses, names(losses.shape[1]), margin=margin)
    made, equal = chain(pairs), {(p.left, p.right) for p in pairs if p.is_equivalent}
    for n, a in enumerate(made.order):
        for m, b in enumerate(made.order[n + 1 :], n + 1):
            if set(made.signs[n:m]) == {"≈"}:
                assert (a, b) in equal
