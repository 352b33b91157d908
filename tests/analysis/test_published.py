"""Published tables beside ours."""

import pytest
from scipy import stats

from posbench.analysis.published import agreements, load_published
from posbench.runs.finding import REFERENCE
from tests.analysis.fabricate import comparison

KEXUE = load_published("kexue-10862")


def test_gaps_and_kendalls_tau():
    ours = comparison(REFERENCE / "demo_cpu")
    [agreement] = agreements(KEXUE, ours)
    theirs = KEXUE.measurements[0].values
    assert list(agreement.table.index) == sorted(theirs, key=lambda scheme: theirs[scheme])
    row = agreement.table.loc["k_rope"]
    assert row["published_gap"] == pytest.approx(2.769 - 2.712)
    assert row["gap"] == pytest.approx((ours.values["k_rope"] - ours.values["qk_rope"]).mean())
    tau = stats.kendalltau([theirs[s] for s in agreement.table.index], ours.values.mean()[agreement.table.index])
    assert (agreement.tau, agreement.p) == pytest.approx((tau.statistic, tau.pvalue)) and 0.5 < agreement.tau < 1
    assert agreement.ours == "validation at 128 tokens"


def test_lengths_are_compared_in_training_lengths(analysis):
    alibi = load_published("alibi-wikitext103")
    wheres = {agreement.theirs.length: agreement.ours for agreement in agreements(alibi, analysis)}
    assert wheres[512] == "validation at 256 tokens", "their training length, windows back to back"
    assert wheres[1012] == "nonoverlapping at 512 tokens" and wheres[3512] == "nonoverlapping at 2048 tokens"


def test_of_a_metric_that_is_no_loss_only_the_order_is_compared(analysis, experiment):
    [agreement] = agreements(load_published("kazemnejad-2023"), analysis)
    assert list(agreement.table.index) == ["nope", "alibi", "qk_rope"]
    assert agreement.table["published_gap"].isna().all() and agreement.tau == pytest.approx(-1)
