"""Runs are found below folders, packs and links; damaged runs do not hide the others."""

import shutil
from pathlib import Path

from posbench.runs import find_runs, load_run
from posbench.runs.finding import REFERENCE, place_named
from tests.refusals import refuses


def test_links_are_followed_but_in_no_circle(runs, tmp_path):
    shutil.copytree(runs / "demo/vo_rope", tmp_path / "nope")
    (runs / "demo/nope").symlink_to(tmp_path / "nope")  # kept on another disk
    (runs / "demo/vo_rope/circle").symlink_to(runs)
    (runs / "gone.zip").symlink_to(tmp_path / "gone.zip")  # leads nowhere
    names = [str(run.path.relative_to(runs)) for run in find_runs(runs)]
    assert names == [f"demo/{scheme}/seed={seed}" for scheme in ("nope", "vo_rope") for seed in (0, 1)]


def test_fields_of_a_manifest_that_are_not_known_are_passed_over(run):
    manifest = run.manifest
    content = (run.path / "run.json").read_text()
    (run.path / "run.json").write_text('{"later": 1,' + content.lstrip("{ \n"))
    assert load_run(run.path).manifest == manifest


def test_a_name_is_a_run_of_the_runs_folder_before_a_folder_here(runs, tmp_path, monkeypatch):
    (tmp_path / "text" / "demo").mkdir(parents=True)  # a folder of text that is called as the experiment
    monkeypatch.chdir(tmp_path / "text")
    assert place_named("demo", runs) == runs / "demo"


def test_reference_experiments_are_found_from_anywhere_after_ones_own(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("headline", "tasks/copy", "demo_cpu/alibi/seed=0"):
        assert place_named(name, runs) == REFERENCE / name and find_runs(REFERENCE / name)
    refuses("did you mean 'demo_cpu'", place_named, "demo_cp", Path("nowhere"))
    shutil.move(runs / "demo", runs / "headline")
    assert place_named("headline", runs) == runs / "headline"
