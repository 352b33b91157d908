"""docs/how-far-a-small-result-carries.md: each row of its table follows from published.yaml and the packs."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import rankdata, t

from posbench.analysis.published import Published, PublishedMeasurement, all_published
from posbench.config.units import plus_minus
from posbench.runs import find_runs

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "runs/reference"
PAGE = ROOT / "docs/how-far-a-small-result-carries.md"
# A pair is compared in the first of these that has both schemes. The last has two seeds, so it decides nothing.
EXPERIMENTS = {"headline": "0.43M", "ladder_m": "0.43M", "all_schemes": "0.17M"}
TASKS = ("copy", "count", "flip_flop", "index", "index_from_end", "mqar")


@cache
def losses(experiment: str) -> pd.DataFrame:
    """Return the loss in nats per token of each run: columns scheme, seed, ratio (length / training length), loss."""
    cells = []
    for run in find_runs(REFERENCE / experiment):
        for result in run.results()[0]:
            if result.key.options or result.key.data or result.protocol not in ("validation", "fixed"):
                continue
            ratio = result.length / run.config.train.context_length
            if (ratio == 1) == (result.protocol == "validation"):
                cells.append((run.config.scheme.name, run.config.seed, ratio, result.loss))
    return pd.DataFrame(cells, columns=["scheme", "seed", "ratio", "loss"])


@cache
def reciprocal_ranks(schemes: tuple[str, ...]) -> pd.DataFrame:
    """Return each seed's mean over tasks of 1 / rank of accuracy at twice the trained length, negated, by scheme."""
    cells = []
    for task in TASKS:
        for run in find_runs(REFERENCE / "tasks" / task):
            if run.config.scheme.name in schemes:
                length = 2 * max(run.config.data.lengths)
                [accuracy] = {
                    r.header["accuracy"]
                    for r in run.results()[0]
                    if (r.protocol, r.length) == ("accuracy", length) and not r.key.options
                }
                cells.append((task, run.config.scheme.name, run.config.seed, accuracy))
    frame = pd.DataFrame(cells, columns=["task", "scheme", "seed", "accuracy"])
    table = frame.pivot_table(index=["seed", "task"], columns="scheme", values="accuracy")
    ranks = pd.DataFrame(rankdata(-table, axis=1, method="min"), table.index, table.columns)
    return -(1 / ranks).groupby("seed").mean()


def ours(measurement: PublishedMeasurement, scheme: str, baseline: str) -> tuple[str, np.ndarray] | None:
    """Return where the pair was measured, and each seed's gap, which is below 0 if `scheme` is better."""
    if measurement.metric == "mean reciprocal rank":
        table = reciprocal_ranks(tuple(sorted(measurement.values)))
        return "tasks, 2 layers of 64", (table[scheme] - table[baseline]).to_numpy()
    for experiment, size in EXPERIMENTS.items():
        cells = losses(experiment)
        of_pair = cells[cells["scheme"].isin([scheme, baseline])]
        has_both = of_pair.groupby("ratio")["scheme"].nunique() == 2
        ratios = has_both.index[has_both].to_numpy()
        distances = np.abs(np.log2(ratios / measurement.ratio))
        if len(ratios) and distances.min() <= math.log2(1.25):
            at_nearest = of_pair[of_pair["ratio"] == ratios[distances.argmin()]]
            table = at_nearest.pivot(index="seed", columns="scheme", values="loss")  # refuses two losses of one run
            return f"{experiment}, {size}", (table[scheme] - table[baseline]).dropna().to_numpy()
    return None


def rows() -> list[tuple[str, str]]:
    """Return (outcome, line) of each published pair, in the order of the page's table."""
    entries = [
        (outcome, axis, line)
        for published in all_published().values()
        for measurement in published.measurements
        for scheme in measurement.values
        if scheme != published.baseline
        for outcome, axis, line in [row(published, measurement, scheme)]
        if outcome
    ]
    order = ["disagree", "undecided, opposite sign", "undecided, same sign", "agree"]
    entries.sort(key=lambda entry: (order.index(entry[0]), ["within", "beyond", "tasks"].index(entry[1])))
    return [(outcome, line) for outcome, _, line in entries]


def row(published: Published, measurement: PublishedMeasurement, scheme: str) -> tuple[str, str, str]:
    """Return outcome, axis and Markdown of one published pair; "" as the outcome if no pack has it."""
    pair = ours(measurement, scheme, published.baseline)
    if pair is None:
        return "", "", ""
    place, gaps = pair
    theirs = measurement.losses[scheme] - measurement.losses[published.baseline]
    half = t.ppf(0.975, len(gaps) - 1) * gaps.std(ddof=1) / math.sqrt(len(gaps))
    axis = "tasks" if measurement.metric == "mean reciprocal rank" else "beyond" if measurement.ratio > 1 else "within"
    decided = len(gaps) > 2 and abs(gaps.mean()) > half
    same = theirs * gaps.mean() > 0
    outcome = ("agree" if same else "disagree") if decided else f"undecided, {'same' if same else 'opposite'} sign"
    size = measurement.model or published.setup.get("parameters", "")
    size = size.removesuffix(" parameters").replace("about ", "")
    where = f"{axis}, {measurement.ratio:.2g}x" if axis == "beyond" else axis
    shown = f"{plus_minus(gaps.mean(), half if len(gaps) > 2 else math.nan, sign=True)} ({place}, {len(gaps)} seeds)"
    cells = [f"[{published.name}]({published.source})", size, where, f"{scheme} - {published.baseline}"]
    return outcome, axis, "| " + " | ".join([outcome, *cells, f"{theirs:+.3f}", shown]) + " |"


def lines_of_the_page() -> list[str]:
    return [line for line in PAGE.read_text(encoding="utf-8").splitlines() if "](http" in line and line[0] == "|"]


@pytest.mark.slow
def test_the_table_of_the_page_follows_from_the_packs() -> None:
    assert lines_of_the_page() == [line for _, line in rows()]
