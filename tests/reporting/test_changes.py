"""The change of a loss with length where two lengths did not score the same targets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from posbench.reporting.changes import with_changes
from posbench.reporting.measure import Measurement
from posbench.reporting.statistics import NOTHING
from posbench.runs.readings import Reading, Result

AT, DOCUMENTS = 64, 60
REST: dict[str, Any] = {"loss": NOTHING, "gap": NOTHING, "loss_documents": 0.0, "gap_documents": 0.0}
REST |= {"bits_per_byte": 0.0, "targets": 1, "windows": 1, "documents": DOCUMENTS}


def measurement(length: int, nll: np.ndarray, targets: np.ndarray, seeds: tuple[int, ...] = (0, 1)) -> Measurement:
    """`seeds` that differ by 0.1 nats/token; documents without targets have no row."""
    results = []
    for seed in seeds:
        rows = pd.DataFrame({"document": np.arange(DOCUMENTS), "nll": nll + 0.1 * seed * targets, "targets": targets})
        table = pa.Table.from_pandas(rows[targets > 0], preserve_index=False)
        results.append(Result(Reading("sliding", length), {}, True, table))
    losses = tuple(result.loss for result in results)
    return Measurement("a", "sliding", "test", length, seeds, losses, results=tuple(results), **REST)


def test_a_change_over_other_targets_has_the_doubt_of_drawn_documents() -> None:
    random = np.random.default_rng(2)
    level, rise = random.normal(3, 0.5, DOCUMENTS), random.normal(0.05, 0.02, DOCUMENTS)
    targets = random.integers(50, 100, DOCUMENTS)
    fewer = np.where(np.arange(DOCUMENTS) < 3, 0, targets - random.integers(0, 20, DOCUMENTS))
    at, longer = measurement(AT, level * targets, targets), measurement(2 * AT, (level + rise) * fewer, fewer)
    here, there = with_changes([at, longer], AT)
    assert (here.change.mean, here.change_documents) == (0, 0)
    assert there.change.mean == pytest.approx(
        np.average(level + rise, weights=fewer) - np.average(level, weights=targets)
    )
    assert there.change.half_width == pytest.approx(0, abs=1e-9)  # what a seed does to both lengths drops out
    drawn = random.integers(0, DOCUMENTS, (20_000, DOCUMENTS))
    after, before = (level + rise) * fewer, level * targets
    each = after[drawn].sum(1) / fewer[drawn].sum(1) - before[drawn].sum(1) / targets[drawn].sum(1)
    assert there.change_documents == pytest.approx(2.0 * each.std(), rel=0.05)


def test_a_change_is_of_the_seeds_that_both_lengths_have() -> None:
    targets = np.full(DOCUMENTS, 10)
    at, longer = (
        measurement(AT, 30.0 * np.ones(DOCUMENTS), targets, (0, 1, 5)),
        measurement(2 * AT, 31.0 * np.ones(DOCUMENTS), targets, (1, 2)),
    )
    assert with_changes([at, longer], AT)[1].change.mean == pytest.approx(0.1)
    assert np.isnan(with_changes([longer], AT)[0].change.mean)
