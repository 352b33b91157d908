"""What loss by position says of long non-overlapping windows, by worked examples; which seeds the probes compare."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from fabricate import run_of

from posbench.reporting import probes
from posbench.reporting.evaluations import Evaluation, evaluations
from posbench.reporting.findings import find
from posbench.reporting.measure import Measurement
from posbench.reporting.statistics import Interval

T = 64
EDGES = (0, 1, 15, 44, 63, T)
Loss = Callable[[np.ndarray, np.ndarray], np.ndarray]  # of a token and its position in the window


def write(file: Path, rows: pd.DataFrame) -> Evaluation:
    file.parent.mkdir(parents=True, exist_ok=True)
    rows.to_parquet(file, index=False)
    file.with_suffix(".json").write_text("{}")
    return Evaluation(file)


def evaluate(
    run: Path, loss: Loss, lengths: Sequence[int], scored: int = 16 * T, edges: Sequence[int] = EDGES, at: int = T
) -> None:
    """Windows over documents of 100 tokens, as evaluation cuts them, and the loss by position of those of `at` tokens.

    Without `scored` a multiple of every length, longer windows reach less far.
    """
    for length in lengths:
        token = np.arange(scored // length * length)
        flat = pd.DataFrame({"window": token // length, "document": token // 100, "start": token + 1})
        flat["nll"] = loss(token, token % length)
        groups = flat.groupby(["window", "document"])
        rows = groups.agg(start=("start", "min"), targets=("start", "size"), nll=("nll", "sum")).reset_index()
        rows["bytes"] = rows["targets"]
        write(run / "eval" / "nonoverlapping" / f"{length}.parquet", rows)
        if length == at:
            bucket = np.searchsorted(edges, token % length, side="right") - 1
            flat = flat.assign(bucket_start=np.take(edges, bucket), bucket_end=np.take(edges, bucket + 1))
            groups = flat.groupby(["document", "bucket_start", "bucket_end"])
            rows = groups.agg(targets=("start", "size"), nll=("nll", "sum")).reset_index()
            write(run / "eval" / "position" / f"{length}.parquet", rows)


def early(*runs: Path) -> pd.DataFrame:
    """What is said of one scheme with a run a seed, by length."""
    found = {("a", seed): evaluations(run) for seed, run in enumerate(runs)}
    nothing = Interval(0.0, 0.0, 0.0)
    rest: dict[str, Any] = {"losses": (), "loss": nothing, "gap": nothing, "loss_documents": 0.0, "gap_documents": 0.0}
    rest |= {"bits_per_byte": 0.0, "targets": 1, "windows": 1, "documents": 1}
    there: dict[int, dict[int, Evaluation]] = {}
    for (_, seed), held in found.items():
        for e in held:
            if e.protocol == "nonoverlapping":
                there.setdefault(e.length, {})[seed] = e
    measurements = [
        Measurement("a", "nonoverlapping", "test", n, seeds=tuple(of), evaluations=tuple(of.values()), **rest)
        for n, of in there.items()
    ]
    return probes.early_tokens(measurements, probes.position(found, []), T).set_index("length")


def by_curve(curve: np.ndarray) -> Loss:
    return lambda token, position: curve[position]


def test_where_longer_context_changes_nothing_all_of_the_gain_is_fewer_early_tokens(tmp_path: Path) -> None:
    """Losses fall to their floor within 32 tokens and stay there, whatever the length."""
    curve = 2 + np.maximum(0, 3 - 0.1 * np.arange(1024))
    evaluate(tmp_path, by_curve(curve), (T, 2 * T, 16 * T))
    found = early(tmp_path)
    for length in (2 * T, 16 * T):
        assert found.loc[length, "gain"] == pytest.approx(curve[:T].mean() - curve[:length].mean())
        assert found.loc[length, "early"] == pytest.approx(found.loc[length, "gain"], rel=1e-9)


def test_what_longer_context_gives_is_no_early_token(tmp_path: Path) -> None:
    """Losses go on falling behind T: the part of fewer early tokens is less than the gain."""
    curve = 5 / np.sqrt(1 + np.arange(1024))
    evaluate(tmp_path, by_curve(curve), (T, 4 * T), edges=(0, 1, 15, 44, T))
    row = early(tmp_path).loc[4 * T]
    assert row["early"] == pytest.approx(0.75 * (curve[:T].mean() - curve[44:T].mean()))
    assert 0 < row["early"] < row["gain"]


def test_a_bucket_of_one_position_stands_for_nothing(tmp_path: Path) -> None:
    curve = np.full(2 * T, 2.0)
    curve[T - 1] = 9.0
    evaluate(tmp_path, by_curve(curve), (T, 2 * T), edges=(0, 15, 63, T))
    assert early(tmp_path).loc[2 * T, "early"] == pytest.approx(0.5 * (curve[:T].mean() - 2.0))


def test_lengths_just_past_the_training_length_are_not_asked(tmp_path: Path) -> None:
    evaluate(tmp_path, by_curve(np.full(2 * T, 2.0)), (T, T + 1))
    assert early(tmp_path).empty


def test_other_windows_than_those_of_the_training_length_say_nothing_of_early_tokens(tmp_path: Path) -> None:
    """At the same positions they hold other text."""
    curve = 2 + np.maximum(0, 3 - 0.1 * np.arange(4 * T))
    evaluate(tmp_path, by_curve(curve), (T, 4 * T), edges=(0, 15, 32, T, 4 * T), at=4 * T)
    assert early(tmp_path).empty


def test_a_gain_is_of_the_same_tokens_at_every_length(tmp_path: Path) -> None:
    """Hard text at the end, which longer windows do not reach, makes no gain."""
    evaluate(tmp_path, lambda token, position: np.where(token < 12 * T, 2.0, 9.0), (T, 2 * T, 5 * T, 6 * T), 14 * T + 9)
    found = early(tmp_path)  # 5 T reach to 10 T, the shortest; of 2 T and 6 T what lies within it
    assert found["gain"].to_dict() == pytest.approx({2 * T: 0, 5 * T: 0, 6 * T: 0})


def test_a_gain_is_of_the_seeds_that_both_lengths_have(tmp_path: Path) -> None:
    """Seed 1 is much worse and was evaluated at T alone."""
    evaluate(tmp_path / "0", by_curve(np.full(2 * T, 2.0)), (T, 2 * T))
    evaluate(tmp_path / "1", by_curve(np.full(2 * T, 9.0)), (T,))
    assert early(tmp_path / "0", tmp_path / "1").loc[2 * T, "gain"] == pytest.approx(0)


def test_the_doubt_of_the_early_part_is_that_of_drawn_documents(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    scored = 60 * T
    level, slope = random.normal(3, 1, scored // 100 + 1), random.normal(1, 0.5, scored // 100 + 1)
    evaluate(
        tmp_path,
        lambda token, position: level[token // 100] + slope[token // 100] / (1 + position),
        (T, 2 * T),
        scored,
        (0, 15, 44, T),
    )
    row = early(tmp_path).loc[2 * T]
    rows = pd.read_parquet(tmp_path / "eval" / "position" / f"{T}.parquet")
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
def test_probes_compare_the_seeds_that_all_schemes_have(experiment: Path, tmp_path: Path, protocol: str) -> None:
    folder = Path(shutil.copytree(experiment, tmp_path / "demo"))
    shutil.rmtree(run_of(folder, "nope", 2).path / "eval" / protocol)
    shutil.rmtree(run_of(folder, "alibi", 0).path / "eval" / protocol)
    found = find(folder)
    frame: pd.DataFrame = getattr(found, protocol)
    assert set(frame["scheme"]) == {"qk_rope", "qkvo_rope", "nope", "alibi"} and set(frame["seeds"]) == {2}
    (note,) = [note for note in found.notes if protocol in note]
    assert note.startswith(f"Compared over seeds 1, 3, since the others lack this evaluation: {protocol} at ")
