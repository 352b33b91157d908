"""A report in wandb: its folder as an artifact."""

from __future__ import annotations

from pathlib import Path

import pytest
from recorded import inspect

from posbench.tracking import log_report


@pytest.mark.slow
def test_the_folder_of_a_report_is_an_artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("report.html", "table.csv", "latex/loss.tex"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"this is {name}")
    said = log_report(tmp_path, "demo", {"project": "ours", "entity": None})
    assert "artifact report-demo of project ours" in said and "wandb sync" in said
    [recording] = (tmp_path / "wandb").glob("offline-run-*")
    records = inspect(recording)
    [header] = [record["run"] for record in records if record["type"] == "run"]
    assert (header["run_group"], header["job_type"]) == ("demo", "report")
    assert "latex/loss.tex" in str(records) or list(recording.rglob("*.tex")), "the files are in it"


def test_what_wandb_cannot_do_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wandb.init", lambda **_: 1 / 0)
    assert log_report(tmp_path, "demo", {}).startswith("the report was not sent to wandb (division by zero)")
