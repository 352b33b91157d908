"""`posbench ls`: what has become of every run."""

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from posbench.runs import DIED, FINISHED, INTERRUPTED, RUNNING, UNREADABLE, Run, find_runs
from posbench.runs.finding import REFERENCE, pack_experiment
from posbench.system.console import json_text
from posbench.system.files import locked
from posbench.tools.listing import _lengths, as_data, exit_status, show, summarise, without_packed
from posbench.training import train
from tests.json_schema import faults


@pytest.fixture
def experiment(config, tmp_path):
    """Write runs of five seeds: finished and evaluated, being trained, cut off, failed, damaged."""
    first = train(config("scheme=vo_rope", "train.steps=6"))
    folder = first.path.parent
    for seed in range(1, 5):
        shutil.copytree(first.path, folder / f"seed={seed}")
    (first.path / "eval" / "fixed").mkdir()
    for name in ("16.json", "16.parquet", "64@factor=2@rescale=pi.parquet", "notes.txt"):
        (first.path / "eval" / "fixed" / name).touch()
    (first.path / "eval" / "validation" / "32@data=pg19.parquet").touch()
    for seed, status in ((1, RUNNING), (2, RUNNING), (3, DIED)):
        run = Run(folder / f"seed={seed}")
        changed = {"status": status, "seed": seed, "loss": None, "ended": None}
        run.write_manifest(replace(run.manifest, **changed, reason="the loss is NaN" if status == DIED else None))
        lines = (run.path / "metrics.jsonl").read_text().splitlines(keepends=True)
        (run.path / "metrics.jsonl").write_text("".join(line for line in lines if json.loads(line)["step"] <= 3))
    (folder / "seed=4" / "run.json").write_text("{")
    return folder.parent


def test_every_run_says_what_has_become_of_it(experiment):
    with locked(experiment / "vo_rope" / "seed=1"):
        rows = list(map(summarise, find_runs(experiment)))
    assert [row.state for row in rows] == [FINISHED, RUNNING, INTERRUPTED, DIED, UNREADABLE]
    assert [row.tokens for row in rows[:4]] == [768, 384, 384, 384]
    assert [row.share for row in rows[1:4]] == [0.5, 0.5, 0.5]
    assert rows[0].loss == Run(experiment / "vo_rope" / "seed=0").manifest.loss
    evaluated = [(key.length, key.under) for key in rows[0].evaluated if key.protocol == "fixed"]
    assert evaluated == [(16, ()), (64, ("factor=2", "rescale=pi"))]
    assert _lengths(rows[0].evaluated) == "fixed 16-64 (2), validation 32 on pg19"
    assert rows[0].changed
    assert rows[3].reason == "the loss is NaN" and "run.json" in str(rows[4].reason)


def test_the_exit_status_tells_finished_from_failed_from_unfinished(experiment):
    rows = list(map(summarise, find_runs(experiment)))
    assert [exit_status(rows[:n]) for n in (1, 3, 4, 5)] == [0, 3, 1, 1]


@pytest.mark.parametrize("width", [80, 120])
def test_a_terminal_shows_it_in_lines_that_fit(experiment, width):
    console = Console(width=width, record=True, file=io.StringIO())
    show(list(map(summarise, find_runs(experiment))), console)
    text = console.export_text()
    assert "5 runs: 1 finished, 2 cut off, 1 failed, 1 unreadable" in text
    assert "seed=3: the loss is NaN" in text and "cut off 50%" in text and "running 50%" not in text
    table = [line for line in text.splitlines() if line.startswith("vo_rope")]
    assert len(table) == 5 and all(len(line.rstrip()) <= width for line in table)


def test_packed_runs_are_listed_where_there_are_no_others(config, tmp_path):
    whole = [train(config("scheme=vo_rope", "train.steps=6"))]
    pack_experiment(whole[0].path.parents[1], tmp_path / "packed.zip", print)
    packed = find_runs(tmp_path / "packed.zip")
    assert packed and without_packed([*whole, *packed]) == whole and without_packed(packed) == packed


# Every kind of run: what its manifest says, the last of its logged steps, and (state, share, tokens) as listed.
# The fixture's run is of 6 steps of 128 tokens, logged at steps 0, 3 and 6.
KINDS = {
    "finished": ({}, 6, (FINISHED, 1.0, 768)),
    "cut_off": ({"status": "stopped", "loss": None, "reason": "SIGTERM"}, 3, ("stopped", 0.5, 384)),
    "killed": ({"status": RUNNING, "loss": None}, 3, (INTERRUPTED, 0.5, 384)),
    "killed_at_once": ({"status": RUNNING, "loss": None}, None, (INTERRUPTED, 0.0, 0)),
    "dead": ({"status": DIED, "loss": None, "reason": "the loss is NaN"}, 3, (DIED, 0.5, 384)),
    "branch": ({"branched_at": 3}, 6, (FINISHED, 1.0, 768)),
    "continued": ({"tokens": 1000 * 128, "continued": {"tokens": 994 * 128}}, 6, (FINISHED, 1.0, 128_000)),
    "without_a_loss": ({"loss": None}, 6, (FINISHED, 1.0, 768)),
    # As posbench.evaluation.subjects writes it: no step was taken here, and its training tokens are not known.
    "subject": ({"num_steps": 0, "tokens": 0, "loss": None, "subject": {"path": "gone"}}, None, (FINISHED, 1.0, None)),
}


def test_every_kind_of_run_is_listed(config, tmp_path, monkeypatch):
    source = train(config("scheme=vo_rope", "train.steps=6"))
    for kind, (changes, last_step, _) in KINDS.items():
        run = Run(shutil.copytree(source.path, tmp_path / "kinds" / kind / "seed=0"))
        run.update_manifest(**{"scheme": kind, **changes})
        lines = (run.path / "metrics.jsonl").read_text().splitlines(keepends=True)
        (run.path / "metrics.jsonl").write_text("".join(x for x in lines if json.loads(x)["step"] <= (last_step or -1)))
        if last_step is None:
            (run.path / "metrics.jsonl").unlink()
    rows = list(map(summarise, find_runs(tmp_path / "kinds")))
    data = {row["scheme"]: (row["state"], row["share"], row["tokens"]) for row in as_data(rows)}
    assert data == {kind: listed for kind, (*_, listed) in KINDS.items()}
    console = Console(width=100, record=True, file=io.StringIO())
    show(rows, console)
    text = console.export_text()
    assert "9 runs: 5 finished, 3 cut off, 1 failed" in text
    assert len([line for line in text.splitlines() if line.startswith(tuple(KINDS))]) == len(KINDS)
    monkeypatch.chdir(tmp_path / "kinds")
    Path("dead/seed=0").rename("dead/copy")
    [listed] = as_data(list(map(summarise, find_runs(Path("dead")))))
    assert (listed["experiment"], listed["scheme"], listed["seed"]) == ("kinds", "dead", None)


@pytest.mark.slow
def test_every_run_of_the_packs_is_listed():
    """The packs of this repository hold branches, tasks, continued runs, subjects and runs of a search."""
    runs = find_runs(REFERENCE)
    rows = list(map(summarise, runs))
    kinds = [run.manifest for run in runs]
    assert any(m.subject for m in kinds) and any(m.continued for m in kinds) and any(m.branched_at for m in kinds)
    assert exit_status(rows) == 0 and {row.share for row in rows} == {1.0}
    assert not faults(json.loads(json_text({"runs": as_data(rows)})), "ls")
