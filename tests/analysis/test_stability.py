"""The pages' figures on the stability of orders and on tasks and text follow from the packs."""

import re
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import posbench
from posbench.analysis.statistics import holm
from posbench.evaluation.protocols import PROTOCOLS
from posbench.runs import find_runs

REFERENCE = Path("runs/reference")
TASKS = ("mqar", "flip_flop", "index_from_end", "copy", "count", "index")


def page(name):
    """Return a page of the documentation as one line."""
    return " ".join(Path(f"docs/{name}.md").read_text().split())


def stable(pack, schemes=(), draws=2000):
    """Return in which share of resamples of seeds and documents the first scheme, and the whole order, stay."""
    rows = posbench.results(REFERENCE / pack, tidy=True)
    rows = rows[(rows["protocol"] == "validation") & (rows["metric"] == "loss")]
    rows = rows[rows["scheme"].isin(schemes or set(rows["scheme"]))]
    sums = rows.groupby(["seed", "scheme", "document"], observed=True)["value"].sum().unstack("document")
    shared = [table for _, table in sums.groupby("seed") if len(table) == rows["scheme"].nunique()]
    nll = np.stack([table.to_numpy() for table in shared])  # [seeds, schemes, documents]
    order, random = nll.sum((0, 2)).argsort(), np.random.default_rng(0)
    same = np.zeros((draws, len(order)), bool)
    for draw in range(draws):
        seeds, documents = (random.integers(0, size, size) for size in (nll.shape[0], nll.shape[2]))
        same[draw] = nll[seeds].sum(0)[:, documents].sum(1).argsort() == order
    return float(same[:, 0].mean()), float(same.all(1).mean())


@pytest.mark.slow
def test_how_often_an_order_survives_other_seeds_and_documents():
    text = page("statistics")
    first, whole = stable("headline.zip")
    assert first == 1.0 and whole == pytest.approx(0.996, abs=0.004)
    assert "ALiBi is first in 1.000 of the resamples of `headline`" in text and "schemes holds in 0.996" in text
    assert stable("demo_cpu.zip") == pytest.approx((1.0, 0.29), abs=0.03)
    assert "first in 1.00, and the whole order of eleven holds in 0.29" in text
    _, whole = stable("kexue_25m.zip", ("qk_rope", "vo_rope", "nope"))
    assert whole == pytest.approx(0.67, abs=0.03) and "the order of QK, VO and NoPE holds in 0.67" in text


def test_the_loss_follows_the_onset():
    runs = find_runs(REFERENCE / "headline")
    onsets = [PROTOCOLS["order"].of_training(run.logged)["onset_tokens"] for run in runs]
    correlation = stats.spearmanr(onsets, [run.manifest.loss for run in runs]).statistic
    assert len(runs) == 30
    assert f"the rank correlation of onset and final loss is {correlation:.2f}" in page("results")


@pytest.mark.slow
def test_which_tasks_predict_the_loss_on_text():
    loss = posbench.results(REFERENCE / "all_schemes.zip").groupby("scheme")["loss"].mean()
    text, p = page("tasks"), []
    for task in TASKS:
        rows = posbench.results(REFERENCE / "tasks" / task, tidy=True)
        rows = rows[(rows["metric"] == "accuracy") & (rows["under"] == "")]
        sums = rows.groupby(["scheme", "length"], observed=True)[["value", "count"]].sum()
        accuracy = (sums["value"] / sums["count"]).unstack()
        shared = accuracy.index.intersection(loss.index)
        assert len(shared) == 19
        for length in (accuracy.columns[0], accuracy.columns[-1]):
            correlation, value = stats.spearmanr(accuracy.loc[shared, length], -loss[shared])
            p.append(value)
        assert re.search(rf"\b{task} {re.escape(f'{correlation:+.2f}')}[,.]", text)
    corrected = holm(np.array(p)).reshape(-1, 2)
    assert (corrected[:, 0] > 0.05).all() and [value <= 0.05 for value in corrected[:, 1]] == [True, True, *[False] * 4]
    assert f"mqar (p = {corrected[0, 1]:.3f}) and flip_flop ({corrected[1, 1]:.3f})" in text
