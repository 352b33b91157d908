"""What loss by position says of long non-overlapping windows, by worked examples; which seeds the probes compare."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from fabricate import run_of

from posbench.evaluation.protocols import POSITION
from posbench.reporting.findings import find
from posbench.reporting.measure import Measurement
from posbench.reporting.probes import early_tokens, probe
from posbench.reporting.statistics import Interval
from posbench.runs.readings import Reading, Result

T = 64
EDGES = (0, 1, 15, 44, 63, T)
Loss = Callable[[np.ndarray, np.ndarray], np.ndarray]  # of a token and its position in the window


def result(protocol: str, length: int, rows: pd.DataFrame) -> Result:
    return Result(Reading(protocol, length), {}, True, pa.Table.from_pandas(rows, preserve_index=False))


def evaluate(
    loss: Loss, lengths: Sequence[int], scored: int = 16 * T, edges: Sequence[int] = EDGES, at: int = T
) -> list[Result]:
    """Windows over documents of 100 tokens, as evaluation cuts them, and the loss by position of those of `at` tokens.

    Without `scored` a multiple of every length, longer windows reach less far.
    """
    results = []
    for length in lengths:
        token = np.arange(scored // length * length)
        flat = pd.DataFrame({"window": token // length, "document": token // 100, "start": token + 1})
        flat["nll"] = loss(token, token % length)
        groups = flat.groupby(["window", "document"])
        rows = groups.agg(start=("start", "min"), targets=("start", "size"), nll=("nll", "sum")).reset_index()
        rows["bytes"] = rows["targets"]
        results.append(result("nonoverlapping", length, rows))
        if length == at:
            bucket = np.searchsorted(edges, token % length, side="right") - 1
            flat = flat.assign(bucket_start=np.take(edges, bucket), bucket_end=np.take(edges, bucket + 1))
            groups = flat.groupby(["document", "bucket_start", "bucket_end"])
            rows = groups.agg(targets=("start", "size"), nll=("nll", "sum")).reset_index()
            results.append(result("position", length, rows))
    return results


def early(*runs: list[Result]) -> pd.DataFrame:
    """What is said of one scheme with a run a seed, by length."""
    found = {("a", seed): results for seed, results in enumerate(runs)}
    nothing = Interval(0.0, 0.0, 0.0)
    rest: dict[str, Any] = {"losses": (), "loss": nothing, "gap": nothing, "loss_documents": 0.0, "gap_documents": 0.0}
    rest |= {"bits_per_byte": 0.0, "targets": 1, "windows": 1, "documents": 1}
    there: dict[int, dict[int, Result]] = {}
    for (_, seed), held in found.items():
        for e in held:
            if e.protocol == "nonoverlapping":
                there.setdefault(e.length, {})[seed] = e
    measurements = [
        Measurement("a", "nonoverlapping", "test", n, seeds=tuple(of), results=tuple(of.values()), **rest)
        for n, of in there.items()
    ]
    return early_tokens(measurements, probe(found, POSITION, None, []), found, T).set_index("length")


def by_curve(curve: np.ndarray) -> Loss:
    return lambda token, position: curve[position]


def test_where_longer_context_changes_nothing_all_of_the_gain_is_fewer_early_tokens() -> None:
    """Losses fall to their floor within 32 tokens and stay there, whatever the length."""
    curve = 2 + np.maximum(0, 3 - 0.1 * np.arange(1024))
    found = early(evaluate(by_curve(curve), (T, 2 * T, 16 * T)))
    for length in (2 * T, 16 * T):
        assert found.loc[length, "gain"] == pytest.approx(curve[:T].mean() - curve[:length].mean())
        assert found.loc[length, "early"] == pytest.approx(found.loc[length, "gain"], rel=1e-9)


def test_what_longer_context_gives_is_no_early_token() -> None:
    """Losses go on falling behind T: the part of fewer early tokens is less than the gain."""
    curve = 5 / np.sqrt(1 + np.arange(1024))
    results = evaluate(by_curve(curve), (T, 4 * T), edges=(0, 1, 15, 44, T))
    row = early(results).loc[4 * T]
    assert row["early"] == pytest.approx(0.75 * (curve[:T].mean() - curve[44:T].mean()))
    assert 0 < row["early"] < row["gain"]


def test_a_bucket_of_one_position_stands_for_nothing() -> None:
    curve = np.full(2 * T, 2.0)
    curve[T - 1] = 9.0
    results = evaluate(by_curve(curve), (T, 2 * T), edges=(0, 15, 63, T))
    assert early(results).loc[2 * T, "early"] == pytest.approx(0.5 * (curve[:T].mean() - 2.0))


def test_lengths_just_past_the_training_length_are_not_asked() -> None:
    results = evaluate(by_curve(np.full(2 * T, 2.0)), (T, T + 1))
    assert early(results).empty


def test_other_windows_than_those_of_the_training_length_say_nothing_of_early_tokens() -> None:
    """At the same positions they hold other text."""
    curve = 2 + np.maximum(0, 3 - 0.1 * np.arange(4 * T))
    results = evaluate(by_curve(curve), (T, 4 * T), edges=(0, 15, 32, T, 4 * T), at=4 * T)
    assert early(results).empty


def test_a_gain_is_of_the_same_tokens_at_every_length() -> None:
    """Hard text at the end, which longer windows do not reach, makes no gain."""

    def loss(token: np.ndarray, position: np.ndarray) -> np.ndarray:
        return np.where(token < 12 * T, 2.0, 9.0)

    # 5 T reach to 10 T, the shortest; of 2 T and 6 T what lies within it
    found = early(evaluate(loss, (T, 2 * T, 5 * T, 6 * T), 14 * T + 9))
    assert found["gain"].to_dict() == pytest.approx({2 * T: 0, 5 * T: 0, 6 * T: 0})


def test_a_gain_is_of_the_seeds_that_both_lengths_have() -> None:
    """Seed 1 is much worse and was evaluated at T alone."""
    both = evaluate(by_curve(np.full(2 * T, 2.0)), (T, 2 * T))
    worse = evaluate(by_curve(np.full(2 * T, 9.0)), (T,))
    assert early(both, worse).loc[2 * T, "gain"] == pytest.approx(0)


def test_the_doubt_of_the_early_part_is_that_of_drawn_documents() -> None:
    random = np.random.default_rng(0)
    scored = 60 * T
    level, slope = random.normal(3, 1, scored // 100 + 1), random.normal(1, 0.5, scored // 100 + 1)
    results = evaluate(
        lambda token, position: level[token // 100] + slope[token // 100] / (1 + position),
        (T, 2 * T),
        scored,
        (0, 15, 44, T),
    )
    row = early(results).loc[2 * T]
    (rows,) = (r.windows for r in results if r.protocol == "position")
    last = rows[rows["bucket_start"] == 44]
    documents = sorted(set(rows["document"]))
    nll, targets, nll_end, targets_end = (
        part.groupby("document")[column].sum().reindex(documents, fill_value=0).to_numpy()
        for part, column in itertools.product((rows, last), ("nll", "targets"))
    )
    drawn = random.integers(0, len(documents), (20_000, len(documents)))
    each = nll[drawn].sum(1) / targets[drawn].sum(1) - nll_end[drawn].sum(1) / targets_end[drawn].sum(1)
    assert row["early"] == pytest.approx(0.5 * (nll.sum() / targets.sum() - nll_end.sum() / targets_end.sum()))
    assert row["early_documents"] == pytest.approx(2.02 * 0.5 * each.std(), rel=0.1)  # Student's t of 39 documents


@pytest.mark.parametrize("protocol", ["retrieval", "position"])
def test_probes_compare_the_seeds_that_all_schemes_have(probed: Path, protocol: str) -> None:
    shutil.rmtree(run_of(probed, "nope", 2).path / "eval" / protocol)
    shutil.rmtree(run_of(probed, "alibi", 0).path / "eval" / protocol)
    found = find(probed)
    frame = found.probes[protocol]
    assert set(frame["scheme"]) == {"qk_rope", "nope", "alibi"} and set(frame["seeds"]) == {2}
    (note,) = [note for note in found.notes if protocol in note]
    assert note.startswith(f"Compared over seeds 1, 3, since the others lack this evaluation: {protocol} at ")
