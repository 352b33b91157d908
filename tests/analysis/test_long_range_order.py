"""Order beyond 32 tokens without a threshold: recomputed from the packs' stored windows with scipy alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from posbench.analysis.comparison import Comparison, build
from posbench.analysis.long_range_order import long_range_order
from posbench.analysis.table import read
from posbench.evaluation.protocols import PROTOCOLS
from posbench.reporting.sections import losses_page
from posbench.runs import find_runs
from tests.analysis.fabricate import comparison, rescore, run_of, write_evaluation

REFERENCE = Path("runs/reference")


def stored(pack: Path, experiment: str, targets: str = "") -> pd.DataFrame:
    """Return what order beyond 32 is worth in each run of a pack, a row per seed and a column per scheme.

    Arguments: targets, `copyable_` for copyable targets only.
    """
    worth: dict[str, dict[int, float]] = {}
    for run in find_runs(pack):
        if run.manifest.experiment != experiment:
            continue
        (result,) = [result for result in run.results()[0] if result.protocol == "order"]
        windows = result.windows
        bucket = windows[(windows["bucket_start"] == 33) & (windows["bucket_end"] == 65)]
        lost = bucket[f"{targets}shuffled_nll"].sum() - bucket[f"{targets}nll"].sum()
        worth.setdefault(run.manifest.scheme, {})[run.manifest.seed] = lost / bucket[f"{targets}targets"].sum()
    return pd.DataFrame(worth).sort_index()


def test_order_beyond_32_of_the_headline_and_its_tests_as_computed_by_hand() -> None:
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


def test_on_prose_alibi_uses_order_that_no_run_brings_to_the_threshold() -> None:
    summary, rows = read([REFERENCE / "headline_prose-tune.zip"])
    at_rate = summary[(summary["experiment"] == "lr=0.001") & summary["scheme"].isin(["alibi", "qk_rope", "nope"])]
    c = build(at_rate.assign(searched=False), rows)
    assert not np.isfinite(c.onsets).any(axis=None) and c.long_range_order is not None
    worth = stored(REFERENCE / "headline_prose-tune.zip", "lr=0.001")
    p = {scheme: stats.ttest_1samp(worth[scheme], 0).pvalue for scheme in c.schemes}
    assert 3 * p["alibi"] < 0.05 < 2 * min(p["qk_rope"], p["nope"])
    assert c.long_range_order.on_all.users == ["alibi"]
    paragraph = losses_page(c, None, 0.01, False).paragraph
    assert f"worth 0.05 nats by the end, but alibi ({worth['alibi'].mean():.4f} ±0.0008 nats) uses it" in paragraph


def test_what_the_documents_decide_is_not_called_used(analysis: Comparison, experiment: Path) -> None:
    """The seeds agree, but all share their documents, whose interval reaches below 0."""
    cells = analysis.cells.assign(value_documents=9.0)
    rows = read([experiment])[1]
    order = long_range_order(rows, analysis.runs, cells)
    assert order is not None and order.on_all.users == []


def test_order_on_copyable_targets_is_a_metric_of_results_that_have_them(experiment_copy: Path) -> None:
    windows = pd.DataFrame({"document": [0, 1, 2], "bucket_start": 33, "bucket_end": 65, "targets": [32, 32, 64]})
    windows = windows.assign(nll=[60.0, 70.0, 130.0], shuffled_nll=[61.0, 72.0, 131.0], other_nll=[90.0, 90.0, 180.0])
    copied = windows.assign(copyable_targets=[3, 0, 5], copyable_nll=[1.0, 0.0, 2.0])
    copied = copied.assign(copyable_shuffled_nll=[2.5, 0.0, 4.0])
    old = {name for name, _, _ in PROTOCOLS["order"].metrics({name: windows[name].to_numpy() for name in windows})}
    assert old == {"lost_order", "lost_identity"}
    for seed in range(4):
        run = run_of(experiment_copy, "alibi", seed)
        write_evaluation(run, "order", 256, "test", copied)
        rescore(run, "order", 256, lambda table, seed=seed: table.assign(shuffled_nll=table["shuffled_nll"] + seed))  # type: ignore[misc]
    order = comparison(experiment_copy).long_range_order
    assert order is not None and order.on_copyable is not None
    copyable = order.on_copyable.figures
    assert copyable["value"].to_list() == pytest.approx([(1.5 + 2.0) / 8])
    assert copyable["targets"].to_list() == [8] and copyable["documents"].to_list() == [2]
    assert order.on_all.by_seed["alibi"].to_list() == pytest.approx([(4 + 3 * seed) / 128 for seed in range(4)])


def test_pairs_on_copyable_targets_are_a_family_of_their_own() -> None:
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


def test_on_prose_order_on_copyable_targets_is_unproven() -> None:
    c = build(*read([REFERENCE / "prose_muon.zip"]))
    assert c.long_range_order is not None and c.long_range_order.on_copyable is not None
    page = " ".join(Path("docs/results.md").read_text(encoding="utf-8").split())
    texts = {}
    for name, worth, digits in (("all", c.long_range_order.on_all, 4), ("copyable", c.long_range_order.on_copyable, 3)):
        for row in worth.figures.itertuples():
            texts[name, row.scheme] = f"{row.value:.{digits}f} ±{row.value_documents:.{digits}f}"
    copyable = c.long_range_order.on_copyable.figures
    assert copyable["targets"].to_list() == [119, 119] and c.long_range_order.on_all.figures["targets"].iloc[0] == 8192
    assert f"worth {texts['copyable', 'alibi']} nats to ALiBi and {texts['copyable', 'qk_rope']} to QK" in page
    assert f"worth {texts['all', 'alibi']} and {texts['all', 'qk_rope']}." in page
