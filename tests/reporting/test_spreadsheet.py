"""table.csv: every cell recomputed from the stored windows by a few lines that share nothing with the report."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from fabricate import World, fabricate, rename, run_of
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from posbench.reporting import spreadsheet
from posbench.reporting.findings import find
from posbench.reporting.tables import csv_text

SEEDS = (0, 1, 2, 3)


def read(file: Path) -> list[dict[str, str]]:
    with file.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def windows(experiment: Path, row: dict[str, str], scheme: str, seed: int) -> dict[str, np.ndarray]:
    file = experiment / scheme / f"seed={seed}" / "eval" / row["protocol"] / f"{row['length']}.parquet"
    return {name: column.to_numpy() for name, column in zip(*_columns(pq.read_table(file)), strict=True)}


def _columns(table):  # type: ignore[no-untyped-def]
    return table.column_names, table.columns


def loss(w: dict[str, np.ndarray]) -> float:
    return math.fsum(w["nll"]) / int(w["targets"].sum())


def by_documents(per_seed: list[dict[str, np.ndarray]], base: list[dict[str, np.ndarray]] | None) -> float:
    """Half of a 95% interval over documents, residuals made unbiased, and a quantile by draws of our own."""
    first = per_seed[0]
    documents = np.unique(first["document"])
    nll = np.mean([[w["nll"][w["document"] == d].sum() for d in documents] for w in per_seed], axis=0)
    if base is not None:
        nll = nll - np.mean([[w["nll"][w["document"] == d].sum() for d in documents] for w in base], axis=0)
    targets = np.array([first["targets"][first["document"] == d].sum() for d in documents])
    weights = targets / targets.sum()
    _, error = mean_and_error(nll / targets, weights)
    return float(error) * _quantile(tuple(weights))


def mean_and_error(values: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The weighted mean of values [..., documents], and the root of its variance."""
    mean = np.average(values, weights=w, axis=-1)
    unbiased = (1 - w) ** 2 + sum(w**2) - w**2
    return mean, np.sqrt(((w * (values - mean[..., None])) ** 2 / unbiased).sum(-1))


@cache
def _quantile(weights: tuple[float, ...]) -> float:
    mean, error = mean_and_error(np.random.default_rng(99).normal(size=(20_000, len(weights))), np.array(weights))
    return float(np.quantile(np.abs(mean) / error, 0.95))


def test_every_cell_is_recomputed_from_the_stored_windows(experiment: Path, written: Path) -> None:
    rows = read(written / "table.csv")
    assert len(rows) == 4 * (1 + 5 + 5)  # schemes x (validation + fixed + nonoverlapping)
    for row in rows:
        own = [windows(experiment, row, row["scheme"], seed) for seed in SEEDS]
        base = [windows(experiment, row, "qk_rope", seed) for seed in SEEDS]
        losses, gaps = (
            np.array([loss(w) for w in own]),
            np.array([loss(w) - loss(b) for w, b in zip(own, base, strict=True)]),
        )
        half = stats.t.ppf(0.975, 3) * losses.std(ddof=1) / 2
        gap_half = stats.t.ppf(0.975, 3) * gaps.std(ddof=1) / 2
        bits = [w["nll"].sum() / math.log(2) / w["bytes"].sum() for w in own]
        expected = {
            "seeds": 4,
            "loss": losses.mean(),
            "loss_low": losses.mean() - half,
            "loss_high": losses.mean() + half,
            "gap": gaps.mean(),
            "gap_low": gaps.mean() - gap_half,
            "gap_high": gaps.mean() + gap_half,
            "bits_per_byte": np.mean(bits),
            "perplexity": math.exp(losses.mean()),
            "targets": own[0]["targets"].sum(),
            "windows": len(own[0]["nll"]),
            "documents": len(set(own[0]["document"])),
        }
        for name, value in expected.items():
            assert float(row[name]) == pytest.approx(value, rel=1e-9, abs=1e-12), (row["scheme"], name)
        assert float(row["loss_documents"]) == pytest.approx(by_documents(own, None), rel=0.03)
        assert float(row["gap_documents"]) == pytest.approx(by_documents(own, base), rel=0.03, abs=1e-12)
        trained = [windows(experiment, {**row, "length": "256"}, row["scheme"], seed) for seed in SEEDS]
        changes = np.array([loss(w) - loss(b) for w, b in zip(own, trained, strict=True)])
        change_half = stats.t.ppf(0.975, 3) * changes.std(ddof=1) / 2
        for name, value in (("", 0), ("_low", -change_half), ("_high", change_half)):
            assert float(row[f"change{name}"]) == pytest.approx(changes.mean() + value, rel=1e-9, abs=1e-12)
        assert float(row["change_documents"]) == pytest.approx(by_documents(own, trained), rel=0.03, abs=1e-12)
        assert row["gap_joint"] == ""  # four seeds are too few
        is_pair = row["protocol"] == "validation" and row["scheme"] != "qk_rope"
        plain = stats.ttest_1samp(gaps, 0).pvalue if is_pair else math.nan  # four schemes: the plain test
        for name in ("gap_p", "gap_p_plain"):
            assert float(row[name] or "nan") == pytest.approx(plain, rel=1e-6, nan_ok=True)
        assert (row["gap_p_holm"] != "") == is_pair
        told = (
            {"gap_p", "gap_p_plain", "gap_p_holm"}
            | set(expected)
            | {"change", "change_low", "change_high", "change_documents", "gap_joint"}
            | {"loss_documents", "gap_documents", "scheme", "protocol", "split", "length"}
        )
        assert set(row) == told  # no cell is left unchecked
        assert row["split"] == ("validation" if row["protocol"] == "validation" else "test")


def test_probes_are_recomputed_too(experiment: Path, written: Path) -> None:
    for row in read(written / "retrieval.csv"):
        place = {"protocol": "retrieval", "length": row["length"]}
        each = [windows(experiment, place, row["scheme"], seed) for seed in SEEDS]
        drops = [(w["control_nll"].sum() - w["second_nll"].sum()) / w["targets"].sum() for w in each]
        assert float(row["drop"]) == pytest.approx(np.mean(drops))
        orders = [(w["shuffled_nll"].sum() - w["second_nll"].sum()) / w["targets"].sum() for w in each]
        half = stats.t.ppf(0.975, 3) * np.std(orders, ddof=1) / 2
        assert float(row["by_order"]) == pytest.approx(np.mean(orders))
        assert float(row["by_order_high"]) == pytest.approx(np.mean(orders) + half)
        drop = [{**w, "document": w["start"], "nll": w["control_nll"] - w["second_nll"]} for w in each]
        assert float(row["drop_texts"]) == pytest.approx(by_documents(drop, None), rel=0.03)
        assert (row["trials"], row["targets"]) == (str(len(each[0]["gap"])), str(each[0]["targets"].sum()))
    for row in read(written / "order.csv"):
        place = {"protocol": "order", "length": row["length"]}
        each = [windows(experiment, place, row["scheme"], seed) for seed in SEEDS]
        each = [{name: column[w["bucket_end"] == int(row["bucket_end"])] for name, column in w.items()} for w in each]
        for score, column in (("lost_order", "shuffled_nll"), ("lost_identity", "other_nll")):
            lost = [{"document": w["document"], "targets": w["targets"], "nll": w[column] - w["nll"]} for w in each]
            assert float(row[score]) == pytest.approx(np.mean([loss(w) for w in lost]))
            assert float(row[f"{score}_texts"]) == pytest.approx(by_documents(lost, None), rel=0.03)
        half = (
            stats.t.ppf(0.975, 3) * np.std([loss({**w, "nll": w["shuffled_nll"] - w["nll"]}) for w in each], ddof=1) / 2
        )
        assert float(row["high"]) - float(row["low"]) == pytest.approx(2 * half)
        assert (row["documents"], row["targets"]) == (str(len(each[0]["document"])), str(each[0]["targets"].sum()))
    for row in read(written / "position.csv"):
        place = {"protocol": "position", "length": row["length"]}
        each = [windows(experiment, place, row["scheme"], seed) for seed in SEEDS]
        inside = [w["bucket_start"] == int(row["bucket_start"]) for w in each]
        each = [{name: column[i] for name, column in w.items()} for w, i in zip(each, inside, strict=True)]
        assert float(row["loss"]) == pytest.approx(np.mean([loss(w) for w in each]))
        assert float(row["loss_texts"]) == pytest.approx(by_documents(each, None), rel=0.03)
        if row["scheme"] == "qk_rope":
            assert row["gap"] == row["gap_low"] == row["gap_texts"] == ""
            continue
        base = [windows(experiment, place, "qk_rope", seed) for seed in SEEDS]
        base = [{name: column[i] for name, column in w.items()} for w, i in zip(base, inside, strict=True)]
        gaps = np.array([loss(w) - loss(b) for w, b in zip(each, base, strict=True)])
        assert float(row["gap"]) == pytest.approx(gaps.mean(), abs=1e-12)
        assert float(row["gap_high"]) == pytest.approx(gaps.mean() + stats.t.ppf(0.975, 3) * gaps.std(ddof=1) / 2)
        assert float(row["gap_texts"]) == pytest.approx(by_documents(each, base), rel=0.03, abs=1e-9)


def test_pairs_hold_the_tests_of_the_chain(experiment: Path, written: Path) -> None:
    frame = {(r["left"], r["right"]): r for r in read(written / "pairs.csv")}
    assert len(frame) == 6
    runs = {(r["scheme"], r["seed"]): float(r["loss"]) for r in read(written / "runs.csv")}
    for (left, right), row in frame.items():
        test = stats.ttest_rel([runs[right, str(s)] for s in SEEDS], [runs[left, str(s)] for s in SEEDS])
        assert float(row["p"]) == pytest.approx(test.pvalue)


def test_a_name_that_is_a_formula_is_neutralised(tmp_path: Path, world: Callable[..., World]) -> None:
    evil = '=HYPERLINK("http://x","y")'
    folder = fabricate(tmp_path, world({"qk_rope": 0.0, "nope": 0.1}, seeds=(0, 1), lengths=()))
    for seed in (0, 1):
        rename(run_of(folder, "nope", seed), scheme=evil)
    found = spreadsheet.frames(find(folder))
    for name, frame in found.items():
        cells = [cell for line in csv.reader(spreadsheet.encode(frame).decode().splitlines()) for cell in line]
        assert f"'{evil}" in cells or name == "against.csv", name
        assert not any(cell.startswith(("=", "@", "+")) for cell in cells)


@given(st.text(max_size=12))
def test_no_text_begins_like_a_formula(text: str) -> None:
    safe = csv_text(text)
    assert not safe.lstrip().startswith(("=", "+", "-", "@")) and safe.removeprefix("'") in (
        text,
        text.removeprefix("'"),
    )


def test_negative_numbers_stay_numbers(written: Path) -> None:
    lowest = min(float(row["gap_low"]) for row in read(written / "table.csv"))
    assert lowest < 0
