"""Setups: the design by hand, planted effects that are found again, and what a missing run does."""

from itertools import product
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from scipy.stats import t, ttest_rel

from posbench.analysis.setups import SetupComparison, compare_setups, paired_effects
from posbench.composition.compose import compose
from posbench.composition.setups import design, setup_words, with_setup
from tests.refusals import refuses

FACTORS = {name: [[f"train.{name}=1"], [f"train.{name}=2"]] for name in "abcdefg"}


def test_the_design_of_sixteen_has_no_main_effect_in_a_pair_of_factors():
    levels = np.where(design(7), 1, -1)
    assert levels.shape == (16, 7) and (levels.sum(0) == 0).all()
    assert (levels.T @ levels == 16 * np.eye(7)).all(), "columns are orthogonal"
    for a in range(7):
        for b in range(a):
            assert (levels.T @ (levels[:, a] * levels[:, b]) == 0).all(), "resolution IV"
    block = levels[:8]
    assert (block.T @ block == 8 * np.eye(7)).all(), "the first eight estimate main effects"
    assert len(np.unique(levels, axis=0)) == 16


def test_few_factors_have_all_combinations_and_other_numbers_are_refused():
    assert design(2).tolist() == [[False, False], [False, True], [True, False], [True, True]]
    assert [len(design(n)) for n in range(1, 8)] == [2, 4, 8, 16, 16, 16, 16]
    refuses("has 8 factors: give 1 to 7, such as 7", design, 8)
    refuses("has 0 factors", design, 0)


def test_a_run_has_the_levels_of_its_seed():
    assert setup_words({"a": FACTORS["a"], "b": FACTORS["b"]}, 6) == ["train.a=2", "train.b=1"]
    refuses("setups.a must have two levels", setup_words, {"a": [["x=1"]]}, 0)
    words = ["experiment=mine", "seed=1"]
    assert with_setup(words, {"a": FACTORS["a"]}) == [*words, "train.a=2"]
    assert with_setup(["seed=0,1"], FACTORS) == ["seed=0,1"], "Hydra says that -m is missing"
    refuses("train.a=3 is given, and a factor", with_setup, [*words, "train.a=3"], {"a": FACTORS["a"]})


def compared(gaps, factors=FACTORS, margin=0.01):
    """Return a comparison with these gaps of `alibi`, a column per replicate and a row per setup."""
    table = pd.DataFrame(gaps).rename_axis("setup").reset_index().melt("setup", value_name="gap").dropna()
    table["scheme"] = "alibi"
    nothing = SimpleNamespace()
    return SetupComparison(
        runs=nothing,
        schemes=["alibi", "qk_rope"],
        wanted_baseline="qk_rope",
        cells=nothing,
        holes={},
        left_out=[],
        notes=[],
        factors=factors,
        gaps=table,
        branches=table[:0],
        unit="nats per token",
        margin=margin,
    ).of("alibi")


def test_planted_effects_are_found_again():
    effects = np.array([0.1, -0.05, 0, 0.02, 0.3, 0, -0.01])
    gaps = compared((-0.04 + np.where(design(7), 0.5, -0.5) @ effects)[:, None])
    assert gaps.effects["effect"].to_numpy() == pytest.approx(effects, abs=1e-9)
    assert gaps.mean[0] == pytest.approx(-0.04, abs=1e-9) and gaps.moved_most_by == "e"
    assert gaps.effects["half"].isna().all() and np.isnan(gaps.p) and gaps.verdict == "open", "no replicates"
    assert gaps.residual == pytest.approx(0, abs=1e-9)
    assert gaps.summary["ahead"] == (gaps.means < 0).sum()


def test_errors_come_from_replicated_setups_by_hand():
    """Two of four setups have two seeds: the pooled variance is (0.02 + 0.08) / 2, with 0.65 x 2 degrees of freedom."""
    factors = {name: FACTORS[name] for name in "ab"}
    gaps = compared([[-1.0, -1.2], [-2.0, -2.4], [-1.0, np.nan], [-2.0, np.nan]], factors)
    assert gaps.freedom == 2 and gaps.variance == pytest.approx(0.05)
    mean, half = gaps.mean
    assert mean == pytest.approx(-(1.1 + 2.2 + 1 + 2) / 4)
    assert half == pytest.approx(t.ppf(0.975, 1.3) * np.sqrt(0.05 * (0.5 + 0.5 + 1 + 1) / 16), rel=1e-5)
    of_a = gaps.effects.set_index("factor").loc["a"]
    assert of_a["effect"] == pytest.approx((1.1 + 2.2) / 2 - (1 + 2) / 2) and of_a["half"] == pytest.approx(2 * half)


def test_one_replicated_setup_that_is_certainly_worse_leaves_the_verdict_open():
    factors = {"a": FACTORS["a"]}
    better = compared([[-1.0, -1.01, -0.99], [-0.5, -0.51, -0.49]], factors)
    assert better.verdict == "better" and not better.worse_setups
    mixed = compared([[-1.0, -1.01, -0.99], [0.1, 0.11, 0.09]], factors)
    assert mixed.p < 0.05 and mixed.worse_setups == [1] and mixed.verdict == "open"
    assert compared([[1.0, 1.01], [0.5, 0.51]], factors).verdict == "worse"


def test_a_setup_without_one_of_its_runs_has_no_gap(monkeypatch):
    setups = {"a": FACTORS["a"]}
    monkeypatch.setattr("posbench.analysis.setups.config_of", lambda path: {"experiment": {"setups": setups}})
    rows = []
    for seed, scheme, loss in ((0, "qk_rope", 2.0), (0, "alibi", 1.9), (1, "qk_rope", 2.1), (2, "alibi", 1.5)):
        prints = {f"fingerprint.{name}": f"{name} {seed}" for name in ("config", "data", "batches")}
        row = {"scheme": scheme, "seed": seed, "loss": loss, "bits_per_byte": 1.0, "status": "finished", "path": "x"}
        rows.append(row | prints | {"tokens": 100, "fingerprint.tokenizer": "t", "damaged": None, "diverged": None})
    runs = pd.DataFrame(rows)
    branches = runs.assign(tokens=50, loss=runs["loss"] * 2)
    monkeypatch.setattr("posbench.analysis.setups.measure", lambda *arguments: pd.DataFrame())
    monkeypatch.setattr("posbench.analysis.setups.decayed_points", lambda runs: pd.concat([runs, branches]))
    c = compare_setups(runs, pd.DataFrame(), "qk_rope")
    assert c.gaps[["setup", "seed"]].to_numpy().tolist() == [[0, 0]] and c.gaps["gap"].tolist() == pytest.approx([-0.1])
    assert c.branches["gap"].tolist() == pytest.approx([-0.2]) and c.unit == "nats per token"
    assert c.left_out == [
        "alibi seed 1: no finished run, so its setup has no gap",
        "qk_rope seed 2: no finished run, so its setup has no gap",
    ]
    assert compose([]).experiment.setups == {}


def test_the_difference_of_gaps_is_a_paired_t_test_over_common_seeds():
    """Two groups of runs: seeds 0 to 4 and 1 to 5; the gap of each is taken within a seed."""
    random = np.random.default_rng(5)
    first = pd.DataFrame(random.normal(2, 0.1, (5, 3)), columns=["a", "b", "c"])
    second = pd.DataFrame(random.normal(2, 0.1, (5, 3)), columns=["c", "a", "b"], index=range(1, 6))
    groups = {("x",): first, ("y",): second}
    table = paired_effects(groups, ["letter"], [("a", "b"), ("c", "b")])
    gaps = [[group["b"] - group[left] for group in (first, second)] for left in ("a", "c")]
    tests = [ttest_rel(x.loc[1:4], y.loc[1:4]) for x, y in gaps]
    assert table["seeds"].tolist() == [4, 4]
    assert table["first_gap"].tolist() == pytest.approx([x.loc[1:4].mean() for x, _ in gaps])
    assert table["difference"].tolist() == pytest.approx([(x - y).mean() for x, y in gaps])
    low, high = tests[0].confidence_interval()
    assert table.loc[0, ["difference_low", "difference_high"]].tolist() == pytest.approx([low, high])
    smaller, larger = sorted(test.pvalue for test in tests)
    assert sorted(table["p"]) == pytest.approx(sorted([min(1, 2 * smaller), max(2 * smaller, larger)]))
    assert paired_effects({**groups, ("x",): first.loc[:1]}, ["letter"], [("a", "b")])["p"].isna().all(), (
        "one common seed"
    )


def test_effects_of_two_factors_are_found_within_each_seed():
    """Gaps of 0.3 with the second value of `heads`, 0.1 with that of `width`, and a noise that all groups share."""
    noise = pd.Series([0.5, -0.2, 0.1], index=[3, 4, 5])
    groups = {}
    for heads, width in product((0, 1), (0, 1)):
        gap = 0.3 * heads + 0.1 * width + noise
        groups[str(heads), str(width)] = pd.DataFrame({"a": 2.0, "b": 2.0 + gap})
    table = paired_effects(groups, ["heads", "width"], [("a", "b")])
    assert table["factor"].tolist() == ["heads", "width"]
    assert table["difference"].tolist() == pytest.approx([-0.3, -0.1])
    assert table["second_gap"].tolist() == pytest.approx([0.3 + 0.05 + noise.mean(), 0.15 + 0.1 + noise.mean()])
