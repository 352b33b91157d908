"""Order beyond 32 tokens without a threshold: recomputed from the packs' stored windows with scipy alone."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from posbench.analysis.comparison import build
from posbench.analysis.long_range_order import long_range_order
from posbench.analysis.table import read
from posbench.runs import find_runs
from tests.analysis.fabricate import paragraph

REFERENCE = Path("runs/reference")


def stored(pack, experiment, targets=""):
    """Return what order beyond 32 is worth in each run of a pack, a row per seed and a column per scheme.

    Arguments: targets, `copyable_` for copyable targets only.
    """
    worth = {}
    for run in find_runs(pack):
        if run.manifest.experiment != experiment:
            continue
        (result,) = [result for result in run.results()[0] if result.protocol == "order"]
        windows = result.windows
        bucket = windows[(windows["bucket_start"] == 33) & (windows["bucket_end"] == 65)]
        lost = bucket[f"{targets}shuffled_nll"].sum() - bucket[f"{targets}nll"].sum()
        worth.setdefault(run.manifest.scheme, {})[run.manifest.seed] = lost / bucket[f"{targets}targets"].sum()
    return pd.DataFrame(worth).sort_index()


def test_order_beyond_32_of_the_headline_and_its_tests_as_computed_by_hand():
    worth = stored(REFERENCE / "headline.zip", "headline")
    measured = build(*read([REFERENCE / "headline.zip"])).long_range_order
    assert measured is not None and measured.length == 256 and measured.on_copyable is None
    order = measured.on_all
    pd.testing.assert_frame_equal(order.by_seed, worth[list(order.by_seed)], check_names=False)
    figures = order.figures.set_index("scheme")
    mean, half = worth["qk_rope"].mean(), stats.t.ppf(0.975, 4) * worth["qk_rope"].std() / 5**0.5
    qk = figures.loc["qk_rope"]
    assert (qk["value"], qk["value_low"], qk["value_high"]) == pytest.approx((mean, mean - half, mean + half))
    by_hand = {scheme: stats.ttest_1samp(worth[scheme], 0).pvalue for scheme in worth}
    assert max(by_hand, key=by_hand.__getitem__) == "k_rope", "the largest of six p counts once"
    assert figures.loc["k_rope", "p"] == pytest.approx(by_hand["k_rope"])
    assert min(by_hand, key=by_hand.__getitem__) == "alibi", "the smallest of six p counts six times"
    assert figures.loc["alibi", "p"] == pytest.approx(6 * by_hand["alibi"])
    assert order.users == [scheme for scheme in figures.index if scheme != "k_rope"]
    pairs = order.pairs.set_index(["more", "less"])
    p = {pair: stats.ttest_rel(worth[pair[0]], worth[pair[1]]).pvalue for pair in pairs.index}
    assert pairs["order_p"].to_dict() == pytest.approx(p)
    claimed = pairs["order_p_claimed"].dropna()
    smallest = min(claimed.index, key=p.__getitem__)
    assert len(claimed) == 8 and claimed[smallest] == pytest.approx(8 * p[smallest])


def test_on_prose_alibi_uses_order_that_no_run_brings_to_the_threshold():
    summary, rows = read([REFERENCE / "headline_prose-tune.zip"])
    at_rate = summary[(summary["experiment"] == "lr=0.001") & summary["scheme"].isin(["alibi", "qk_rope", "nope"])]
    c = build(at_rate.assign(searched=False), rows)
    assert not np.isfinite(c.onsets).any(axis=None) and c.long_range_order is not None
    worth = stored(REFERENCE / "headline_prose-tune.zip", "lr=0.001")
    p = {scheme: stats.ttest_1samp(worth[scheme], 0).pvalue for scheme in c.schemes}
    assert 3 * p["alibi"] < 0.05 < 2 * min(p["qk_rope"], p["nope"])
    assert c.long_range_order.on_all.users == ["alibi"]
    assert f"worth 0.05 nats by the end, but alibi ({worth['alibi'].mean():.4f} ±0.0008 nats) uses it" in paragraph(c)


def test_what_the_documents_decide_is_not_called_used(analysis, experiment):
    """The seeds agree, but all share their documents, whose interval reaches below 0."""
    cells = analysis.cells.assign(value_documents=9.0)
    rows = read([experiment])[1]
    order = long_range_order(rows, analysis.runs, cells)
    assert order is not None and order.on_all.users == []


def test_a_pair_that_documents_leave_open_is_not_called_worth_more(experiment, analysis):
    """Alibi's order is worth more with every seed; the documents are made to contradict each other."""
    rows = read([experiment])[1]
    order = long_range_order(rows, analysis.runs, analysis.cells)
    assert order is not None
    more, _ = order.on_all.decided("alibi")
    far = (rows["protocol"] == "order") & (rows["scheme"] == "alibi") & (rows["first"] == 33)
    of_document = rows.loc[far, "document"] % 2 * 2 - 1  # -1 or 1
    noisy = rows.assign(value=rows["value"].where(~far, rows["value"] + 50 * of_document.reindex(rows.index).fillna(0)))
    unsure = long_range_order(noisy, analysis.runs, analysis.cells)
    assert unsure is not None
    pairs = unsure.on_all.pairs
    of_alibi = pairs[(pairs["more"] == "alibi") | (pairs["less"] == "alibi")]
    assert (of_alibi["order_difference_documents"] > of_alibi["order_difference"]).all()
    assert (of_alibi["order_p"] == 1).all() and unsure.on_all.decided("alibi")[0] == 0 <= more


def test_pairs_on_copyable_targets_are_a_family_of_their_own():
    pack = REFERENCE / "headline_gpu_muon-tune" / "lr=0.004.zip"
    summary, rows = read([pack])
    c = build(summary.assign(searched=False), rows)
    assert c.long_range_order is not None and c.long_range_order.on_copyable is not None
    copyable = c.long_range_order.on_copyable
    worth = stored(pack, "lr=0.004", "copyable_")
    pd.testing.assert_frame_equal(copyable.by_seed, worth[list(copyable.by_seed)], check_names=False)
    [pair] = copyable.pairs.itertuples()
    gap = worth[pair.more] - worth[pair.less]
    assert gap.mean() > 0 and pair.order_difference == pytest.approx(gap.mean())
    assert pair.order_p == pytest.approx(stats.ttest_1samp(gap.dropna(), 0).pvalue)
    [pair_on_all] = c.long_range_order.on_all.pairs.itertuples()
    assert pair.order_p != pair_on_all.order_p


def test_on_prose_order_on_copyable_targets_is_unproven():
    c = build(*read([REFERENCE / "prose_muon.zip"]))
    assert c.long_range_order is not None and c.long_range_order.on_copyable is not None
    page = " ".join(Path("docs/results.md").read_text(encoding="utf-8").split())
    copyable = c.long_range_order.on_copyable.figures
    texts = {row.scheme: f"{row.value:.3f} ±{row.value_documents:.3f}" for row in copyable.itertuples()}
    assert set(copyable["targets"]) == {119} and c.long_range_order.on_all.figures["targets"].iloc[0] == 8192
    assert f"worth {texts['alibi']} nats to ALiBi and {texts['qk_rope']} to QK" in page
    alibi = (c.values["alibi"] - c.values["qk_rope"]).dropna().to_list()
    assert f"ALiBi is {alibi[0]:.3f} and {alibi[1]:.3f} behind" in page and len(alibi) == 2
