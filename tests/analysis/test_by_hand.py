"""One pair of the code headline and one gap at equal onset, recomputed from the packs with scipy alone."""

import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import posbench
from posbench.analysis.comparison import build
from posbench.analysis.onset import decayed_points, fit, gap_after_onset, share_of_time
from posbench.analysis.table import read

REFERENCE = Path("runs/reference")


def test_alibi_beats_qk_at_these_rates_as_computed_by_hand():
    """Holm: of the eight fixed pairs this p is the fourth smallest, so it counts five times."""
    losses = posbench.results(REFERENCE / "headline.zip").pivot(index="seed", columns="scheme", values="loss")
    groups = ["alibi vo_rope", "alibi qk_rope", "alibi qkvo_rope", "vo_rope qk_rope", "vo_rope qkvo_rope"]
    groups += ["qk_rope qkvo_rope", "qk_rope k_rope", "qk_rope nope"]
    p = {pair: stats.ttest_rel(*(losses[scheme] for scheme in pair.split())).pvalue for pair in groups}
    assert sorted(p, key=p.__getitem__).index("alibi qk_rope") == 3
    steps = [(8 - n) * value for n, value in enumerate(sorted(p.values()))]
    by_hand = max(steps[:4])
    pairs = build(*read([REFERENCE / "headline.zip"])).pairs.set_index(["left", "right"])
    assert pairs.loc[("alibi", "qk_rope"), "p_claimed"] == pytest.approx(by_hand) == pytest.approx(0.0133, abs=1e-4)


def test_the_gap_of_qk_to_alibi_at_equal_tokens_after_onset_as_computed_by_hand():
    names = ("headline", "headline-3.07M", "headline-6.14M")
    runs = {name: posbench.results(REFERENCE / f"{name}.zip").set_index(["scheme", "seed"]) for name in names}
    trunk = runs["headline"]
    points = [
        (math.log((table.loc[("alibi", seed), "tokens"] - trunk.loc[("alibi", seed), "onset_tokens"]) / 1e6), loss)
        for table in runs.values()
        for seed, loss in table.loc["alibi", "loss"].items()
        if table.loc[("alibi", seed), "tokens"] > trunk.loc[("alibi", seed), "onset_tokens"]
    ]
    x, y = np.transpose(points)
    line = stats.linregress(x, y)
    qk = trunk.loc["qk_rope"]
    since = np.log((qk["tokens"] - qk["onset_tokens"]) / 1e6)
    gaps = qk["loss"] - (line.intercept + line.slope * since)
    of_slope = line.stderr * (since.mean() - x.mean())
    of_mean = np.std(y - line.intercept - line.slope * x) * math.sqrt(len(x) / (len(x) - 2) / len(x))
    half = stats.t.ppf(0.975, 4) * math.sqrt(gaps.var() / 5 + of_slope**2 + of_mean**2)
    summary, _ = read([REFERENCE / "headline.zip"])
    fitted = fit(decayed_points(summary[summary["scheme"] == "alibi"]))
    assert fitted is not None and fitted.points == 14
    ours = gap_after_onset(summary[summary["scheme"] == "qk_rope"], fitted)
    assert ours == pytest.approx((gaps.mean(), half)) and ours == pytest.approx((0.041, 0.035), abs=5e-4)


def test_the_share_of_a_gap_that_is_time_has_an_interval_and_none_for_a_gap_that_may_be_zero():
    """A referee's own bootstrap of the headline gives 51 to 90 % for QK."""
    summary, _ = read([REFERENCE / "headline.zip"])
    of_scheme = dict(iter(summary.groupby("scheme")))
    best = of_scheme["alibi"]
    points = decayed_points(best)
    assert share_of_time(of_scheme["qk_rope"], best, points) == pytest.approx((0.51, 0.90), abs=0.02)
    alternating = best.assign(loss=best["loss"] + 0.1 * (best["seed"] % 2 - 0.4))
    assert share_of_time(alternating, best, points) is None
