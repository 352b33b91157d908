"""Figures beyond the training length say how much seeds differ: recomputed from the stored windows of the packs."""

from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import posbench
from posbench.analysis.comparison import build
from posbench.analysis.table import read
from posbench.reporting.protocols import sections_of_protocols
from posbench.reporting.text import as_text
from posbench.runs import find_runs

REFERENCE = Path("runs/reference")


def losses_at(pack, experiment, scheme, length):
    """Return the losses of a scheme's seeds at this length of the protocol `fixed`."""
    losses = []
    for run in find_runs(REFERENCE / pack):
        if (run.manifest.experiment, run.manifest.scheme) == (experiment, scheme):
            results = [r for r in run.results()[0] if (r.protocol, r.length) == ("fixed", length) and not r.key.options]
            windows = results[0].windows
            losses.append(windows["nll"].sum() / windows["targets"].sum())
    return np.array(losses)


def lengths(c):
    """Return the table by length as text, {scheme: {column: cell}}."""
    section = next(s for s in sections_of_protocols(c, False) if s.title == "Perplexity by length: fixed")
    assert section.table is not None
    shown = as_text(section.table).set_index("scheme")
    return {str(scheme): {str(column): str(cell) for column, cell in row.items()} for scheme, row in shown.iterrows()}


def test_perplexities_beyond_the_training_length_have_the_interval_of_their_seeds():
    rows = lengths(build(*read([REFERENCE / "headline.zip"])))
    losses = losses_at("headline.zip", "headline", "nope", 2048)
    half = stats.t.ppf(0.975, 4) * losses.std(ddof=1) / 5**0.5 * np.exp(losses.mean())
    assert rows["nope"]["2k"] == f"{np.exp(losses.mean()):.2f} ±{half:.2f}" == "32.71 ±0.72"
    gaps = losses - losses_at("headline.zip", "headline", "qk_rope", 2048)
    half = stats.t.ppf(0.975, 4) * gaps.std(ddof=1) / 5**0.5
    assert rows["nope"]["gap at 2k"] == f"{gaps.mean():+.3f} ±{half:.3f}"
    assert "±" not in rows["nope"]["256 (trained)"] and rows["qk_rope"]["gap at 2k"] == "0"


def test_seeds_that_differ_by_more_than_a_nat_are_shown_as_a_range():
    """NoPE on prose at 5e-4 has a seed that explodes at eight times the training length."""
    summary, rows = read([REFERENCE / "headline_prose-tune.zip"])
    at_rate = summary[(summary["experiment"] == "lr=0.0005") & summary["scheme"].isin(["vo_rope", "nope", "alibi"])]
    table = lengths(build(at_rate.assign(searched=False), rows, baseline="nope"))
    losses = losses_at("headline_prose-tune.zip", "lr=0.0005", "nope", 2048)
    assert len(losses) == 3 and np.ptp(losses) > 1
    low, high = table["nope"]["2k"].split("–")
    assert float(low) == pytest.approx(np.exp(losses.min()), rel=1e-2)
    assert float(high.replace(",", "")) == pytest.approx(np.exp(losses.max()), rel=1e-2)
    two = losses_at("headline_prose-tune.zip", "lr=0.0005", "alibi", 2048)
    assert len(two) == 2 and table["alibi"]["2k"] == f"{np.exp(two.min()):.2f}–{np.exp(two.max()):.2f}"


def test_the_line_of_judge_has_the_interval_or_the_range_beyond_the_training_length():
    judgement = posbench.judge(REFERENCE / "headline", scheme="alibi")
    gaps = losses_at("headline.zip", "headline", "alibi", 2048) - losses_at("headline.zip", "headline", "qk_rope", 2048)
    half = stats.t.ppf(0.975, 4) * gaps.std(ddof=1) / 5**0.5
    ends = f"{gaps.mean() - half:+.3f} to {gaps.mean() + half:+.3f}"
    assert f"; at 2k tokens better, {gaps.mean():+.3f} (95 %: {ends}); stop" in str(judgement)
    assert judgement.beyond is not None
    judgement.beyond["gap_most"] = judgement.beyond["gap_least"] + 1.5
    least = f"{gaps.min():+.3f}"
    assert f"at 2k tokens better, {least} to {gaps.min() + 1.5:+.3f} (range of seeds)" in str(judgement)
