"""A report in wandb: a run beside those that it compares, whose gaps stand in their summaries and stay there."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from recorded import a_run, evaluate, history, inspect, recordings, rows, rows_of, store, summary_of, train
from rich.console import Console

from posbench.config import TrackingConfig
from posbench.evaluation.charts import log_evaluations
from posbench.reporting import report
from posbench.runs import FINISHED, Run, append_metrics
from posbench.tracking import LoggedReport, log_report
from posbench.tracking.recordings import report_id

LOSSES = {"qk_rope": (2.5, 2.52), "vo_rope": (2.6, 2.63)}
GAP = {"gap_to_qk_rope": pytest.approx(0.105), "gap_seeds": 2}
PAGE, TABLE = "<p>a page</p>", (["a", "b"], [[1.5, "word"], [None, "text"]])
LOGGED = LoggedReport("demo", {"of": "demo"}, {"comparison/report": PAGE}, {"report/costs": TABLE}, {})


def finished(root: Path, scheme: str, seed: int, loss: float, tracked: bool) -> Run:
    """A finished run with its validation windows and two lengths, in wandb or not."""
    config, run = a_run(root, f"scheme={scheme}", f"seed={seed}")
    if tracked:
        train(config, run, 0, 3, print)
    for row in () if tracked else rows(0, 3):
        append_metrics(run.path / "metrics.jsonl", row)
    prints = replace(run.manifest.fingerprints, batches=f"of {seed}", initial_weights={"norms": f"of {seed}"})
    run.update_manifest(status=FINISHED, loss=loss, bits_per_byte=1.0, weights="fed", fingerprints=prints)
    windows = {"document": [0, 1], "start": [1, 99], "targets": [64, 64], "nll": [64 * loss] * 2, "bytes": [90, 90]}
    header = {"split": "validation", "length": config.train.context_length, "nll_mean": loss, "bits_per_byte": 1.0}
    store(run, {"protocol": "validation", **header, "documents": 2, "windows": 2}, pd.DataFrame(windows))
    evaluate(run, 256, 512)
    return run


def by_job(root: Path) -> dict[str, tuple[Path, list[dict[str, Any]]]]:
    """The recordings and their records, by job type."""
    found = {}
    for recording in recordings(root):
        records = inspect(recording)
        [header] = [record["run"] for record in records if record["type"] == "run"]
        assert header["run_group"] == "demo"
        found[header["job_type"]] = recording, records
    return found


@pytest.mark.slow
def test_a_report_and_its_gaps_are_in_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    root, texts = tmp_path / "runs", tmp_path / "terminal.txt"
    runs = {
        (scheme, seed): finished(root, scheme, seed, losses[seed], tracked=(scheme, seed) == ("vo_rope", 1))
        for scheme, losses in LOSSES.items()
        for seed in (0, 1)
    }
    with texts.open("w") as file:
        report(root / "demo", console=Console(file=file, width=100), wandb=True)
    assert "the report is in wandb: run report of group demo, project posbench\n" in texts.read_text()
    assert "gaps to qk_rope are in wandb, in the summaries of 1 of the 4 compared runs\n" in texts.read_text()
    found = by_job(root)
    assert set(found) == {"train", "report"}
    recording, records = found["report"]
    [logged] = history(records)
    first = {"comparison/report", "comparison/schemes", "comparison/gaps", "comparison/perplexity_fixed"}
    assert {key.split(".")[0] for key in logged if key.startswith("comparison/")} == first
    [page] = recording.glob("files/media/html/comparison/report_*.html")
    assert page.read_text() == (root / "demo/report/report.html").read_text()
    table = {row["scheme"]: row for row in rows_of(recording, "comparison/schemes")}
    assert list(table) == ["qk_rope", "vo_rope"]
    assert {key: table["vo_rope"][key] for key in GAP} == GAP
    assert table["vo_rope"]["fixed/perplexity@512"] == pytest.approx(math.exp(1 / 640))  # of the windows
    assert {row["scheme"] for row in rows_of(recording, "report/costs")} == set(LOSSES)
    assert not list(recording.glob("files/media/table/report/runs_*")), "paths of this machine"

    summary = summary_of(found["train"][1])
    assert {key: summary[key] for key in GAP} == GAP
    assert summary["gap_to_qk_rope_low"] < summary["gap_to_qk_rope"] < summary["gap_to_qk_rope_high"]
    evaluate(runs["vo_rope", 1], 1024)
    log_evaluations(runs["vo_rope", 1], print)
    later = summary_of(by_job(root)["train"][1])
    single = {
        key for key in summary if "@" in key or key.startswith("gap") or key in runs["vo_rope", 1].manifest.figures
    }
    assert len(single) > 12
    assert {key: later.get(key) for key in single} == {key: summary[key] for key in single}
    assert "eval/fixed/perplexity@1024" in later


def test_a_later_report_takes_the_place_of_one_that_was_not_uploaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    for _ in range(2):
        assert log_report(LOGGED, TrackingConfig(backend="wandb"), tmp_path / "runs/demo/wandb", print)
    [recording] = recordings(tmp_path / "runs")
    records = inspect(recording)
    assert len(history(records)) == 1
    assert rows_of(recording, "report/costs") == [{"a": 1.5, "b": "word"}, {"a": None, "b": "text"}]


def test_the_run_of_a_report_is_known_by_its_newest_recording(tmp_path: Path) -> None:
    first, second = report_id(tmp_path / "none"), report_id(tmp_path)
    assert first != second
    for name in (f"run-20261122_100000-{first}", f"offline-run-20261122_100001-{second}-1", "run-20261122_100002-3f2a"):
        (tmp_path / name).mkdir()
    assert report_id(tmp_path) == second


def test_a_disabled_wandb_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    said: list[str] = []
    assert not log_report(LOGGED, TrackingConfig(backend="wandb"), tmp_path / "wandb", said.append)
    assert said == ["wandb is disabled (WANDB_MODE, or `wandb disabled`): the report was not sent to it"]
