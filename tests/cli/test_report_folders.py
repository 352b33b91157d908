"""`posbench report`: which folder it writes, what it leaves out, and what it says each row is."""

import json
from pathlib import Path

import pytest

from posbench.reporting.options import ReportOptions
from posbench.reporting.report import _default_output
from posbench.runs.finding import REFERENCE
from tests.analysis.fabricate import World, fabricate


@pytest.fixture
def reported(posbench, monkeypatch):
    """Return a function that gives a command; reports have no pictures, which take most of their time."""
    monkeypatch.setattr("posbench.reporting.figures.draw_all", lambda c, sections: {})
    return posbench


def test_the_report_of_a_reference_is_written_in_the_working_folder(reported):
    files_before = sorted(REFERENCE.rglob("*"))
    for name in ("ladder_l-rate_0.012", str(REFERENCE / "ladder_l-rate_0.012.zip")):
        result = reported("report", name)  # the folder that the first report makes must not hide the experiment
        assert result.status == 0 and "wrote runs/reports/ladder_l-rate_0.012/report/report.html" in result.out, result
    assert sorted(REFERENCE.rglob("*")) == files_before
    tasks = _default_output(REFERENCE / "tasks/copy", ReportOptions(by="train.lr"))
    assert tasks == Path("runs/reports/tasks/copy/report-by-train.lr")
    assert _default_output(Path("runs/first"), ReportOptions()) == Path("runs/first/report")


def test_a_filtered_report_leaves_the_full_one_and_names_the_experiment_without_runs(reported):
    for experiment, effects in (("first", {"qk_rope": 0.0, "nope": 0.1, "alibi": -0.1}), ("longer", {"k_rope": 0.1})):
        fabricate(Path("runs"), World(effects, (0, 1), experiment=experiment))
    assert reported("report", "first").status == 0
    page = Path("runs/first/report/report.md").read_text()
    folders = {
        ("--schemes", "qk_rope,nope"): "report-of-qk_rope,nope",
        ("--seeds", "0"): "report-seeds-0",
        ("--schemes", "nope", "--seeds", "0,1", "--by", "train.lr"): "report-by-train.lr-of-nope-seeds-0,1",
    }
    for words, folder in folders.items():
        assert reported("report", "first", *words).status == 0
        assert (Path("runs/first") / folder / "report.html").is_file()
    assert Path("runs/first/report/report.md").read_text() == page
    line = "longer is not in this report: none of its runs was chosen with --schemes or --seeds"
    assert line in reported("report", "first", "longer", "--schemes", "qk_rope").out
    assert line in Path("runs/first/report-of-qk_rope/report.md").read_text()
    data = json.loads(reported("report", "first", "longer", "--schemes", "qk_rope", "--json").out)
    assert data["left_out"] == [line]
    assert "is not in this report" not in reported("report", "first").out
    many = _default_output(Path("runs/first"), ReportOptions(schemes=[f"scheme_{n:02}" for n in range(40)]))
    assert many.name.startswith("report-of-40-") and len(many.name) < 40  # a folder's name has at most 255 bytes


def test_rows_without_a_length_are_named(reported):
    """Nope was not scored at 512 at all, alibi not with seed 1, and k_rope at no length."""
    effects = {"qk_rope": 0.0, "nope": 0.1, "alibi": -0.1, "k_rope": 0.1}
    folder = fabricate(Path("runs"), World(effects, (0, 1), lengths=(256, 512), experiment="first"))
    for file in [
        *folder.glob("nope/*/eval/fixed/512.*"),
        *folder.glob("alibi/seed=1/eval/fixed/512.*"),
        *folder.glob("k_rope/*/eval/fixed/*"),
    ]:
        file.unlink()
    lines = [
        "fixed at 512 has no result of alibi (of seeds 1), nope: not scored yet, or the scheme cannot read so far "
        "(`posbench eval first --protocol fixed --length 512` scores it).",
        "fixed at 256, 512 has no result of k_rope: not scored yet, or the scheme cannot read so far "
        "(`posbench eval first --protocol fixed --length 256,512` scores it).",
    ]
    out, page = reported("report", "first").out, Path("runs/first/report/report.md").read_text()
    assert all(line in out and line in page for line in lines) and "nonoverlapping at" not in out
    assert sorted(json.loads(reported("report", "first", "--json").out)["left_out"]) == sorted(lines)
