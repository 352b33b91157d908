"""Half an hour on a GPU, rehearsed: what is begun, stopped, resumed and recorded, and every stage in seconds."""

import json
import os
import subprocess
import sys
import time

import pytest

from benchmarks.acceptance import items as items_module
from benchmarks.acceptance import runner as runner_module
from benchmarks.acceptance.__main__ import CORES, STAGES, chosen
from benchmarks.acceptance.items import CUT_OFF, DONE, FAILED, Item, Results
from benchmarks.acceptance.place import CHECKOUT, Place, schemes
from benchmarks.acceptance.prepare import texts
from benchmarks.acceptance.runner import Runner
from tests.conftest import write_documents

FAKE = """
import json, sys, time
name, seconds, status = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
log = open("log", "a")
log.write(f"{name} begins\\n"); log.flush()
print("chatter"); print(json.dumps({"half": name}), flush=True)
time.sleep(seconds)
print(json.dumps({"whole": name}))
log.write(f"{name} ends\\n")
sys.exit(f"{name} went wrong" if status else 0)
"""


def fake(name, takes=0.0, fails=False, **more):
    words = (name, str(takes), str(int(fails)))
    return Item(name, more.pop("kind", "fake"), "fake_item", words, **{"seconds": 0.1, **more})


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs items for so many seconds; returns the rows by name and what was left."""
    (tmp_path / "fake_item.py").write_text(FAKE)
    monkeypatch.setattr(runner_module, "GRACE_SECONDS", 2.5)

    def run(items, seconds=60.0, code="today", cores=2):
        results = Results(tmp_path / "stage.jsonl")
        of_machine, variables = Results(tmp_path / "machine.jsonl"), {"PATH": os.environ["PATH"]}
        until = time.monotonic() + seconds + runner_module.GRACE_SECONDS
        said = []
        runner = Runner(results, of_machine, until, cores, code, tmp_path, variables, said.append)
        left = runner.run(items)
        return Results(tmp_path / "stage.jsonl").rows, [item.name for item in left]

    return run


def log(tmp_path):
    return (tmp_path / "log").read_text().splitlines()


def test_a_failure_keeps_no_other_item_from_running_and_is_tried_again_under_other_code(run, tmp_path):
    items = [fake("a", fails=True), fake("b")]
    rows, left = run(items)
    assert (rows["a"]["status"], rows["b"]["status"], left) == (FAILED, DONE, [])
    assert "a went wrong" in rows["a"]["error"] and rows["a"]["result"] == {"half": "a", "whole": "a"}
    run(items)
    assert len(log(tmp_path)) == 4
    run(items, code="tomorrow")
    assert log(tmp_path)[4:] == ["a begins", "a ends"]


def test_what_would_not_be_done_in_time_is_not_begun_and_the_rest_is(run, tmp_path):
    rows, left = run([fake("long", seconds=100), fake("short"), fake("waits", after=("long",))], seconds=20)
    assert set(rows) == {"short"} and left == ["long", "waits"]


def test_how_long_items_take_is_learned_from_those_of_their_kind(run):
    first = [fake("a", takes=0.5, seconds=0.01), fake("other", kind="other")]
    rows, left = run([*first, fake("b", seconds=1.0, after=("a",))], seconds=10)
    assert set(rows) == {"a", "other"} and left == ["b"]


def test_what_still_runs_at_the_end_is_stopped_and_begun_again(run, tmp_path):
    began = time.monotonic()
    rows, left = run([fake("a", takes=60)], seconds=1.5)
    assert time.monotonic() - began < 10 and left == ["a"]
    assert rows["a"]["status"] == CUT_OFF and rows["a"]["result"] == {"half": "a"}
    rows, left = run([fake("a")], seconds=1.0)
    assert rows["a"]["status"] == CUT_OFF and left == ["a"]  # it was seen to take longer
    rows, left = run([fake("a")])
    assert rows["a"]["status"] == DONE and left == []


def test_an_item_that_hangs_is_killed_long_before_the_end(run, monkeypatch):
    monkeypatch.setattr(items_module.Item, "limit", 0.5)
    rows, _ = run([fake("a", takes=60)])
    assert rows["a"]["status"] == FAILED and "killed after" in rows["a"]["error"]


def test_side_by_side_but_alone_where_speed_is_measured(tmp_path):
    results = Results(tmp_path / "stage.jsonl")
    runner = Runner(results, results, time.monotonic() + 60, 3, "today", tmp_path, {})
    a, b, large, alone = fake("a"), fake("b"), fake("large", cores=3), fake("alone", alone=True)
    after = fake("after", after=("a",))

    def begun(waiting, running):
        return [item.name for item in runner.startable(waiting, running)]

    assert begun([a, large, after, b, alone], []) == ["a", "b"]  # what has no room yet lets smaller ones pass
    assert begun([large, after, alone], [a, b]) == []
    assert begun([after, alone, large], []) == ["after"]
    assert begun([alone, a], [b]) == []  # it holds up those behind it
    assert begun([alone, a], []) == ["alone"]
    assert begun([a], [alone]) == []
    assert begun([fake("larger", cores=9)], []) == ["larger"]


def test_what_prepares_a_machine_is_done_once_on_each(run, tmp_path):
    items = [fake("text", is_of_machine=True), fake("a", after=("text",))]
    rows, _ = run(items)
    assert set(rows) == {"a"} and set(Results(tmp_path / "machine.jsonl").rows) == {"text"}
    (tmp_path / "machine.jsonl").unlink()  # another machine, with the results of the first
    run(items)
    assert [line for line in log(tmp_path) if line.endswith("begins")] == ["text begins", "a begins", "text begins"]


def test_a_torn_last_line_costs_its_item_alone(run, tmp_path):
    run([fake("a"), fake("b")], cores=1)
    file = tmp_path / "stage.jsonl"
    file.write_bytes(file.read_bytes()[:-20])
    assert set(Results(file).rows) == {"a"}
    rows, _ = run([fake("a"), fake("b")])
    assert set(rows) == {"a", "b"}


@pytest.mark.parametrize("shrunk", [True, False])
@pytest.mark.parametrize("stage", STAGES)
def test_items_have_names_of_their_own_and_wait_for_none_behind_them(stage, shrunk, tmp_path):
    names = []
    for item in STAGES[stage](Place(tmp_path, tmp_path, tmp_path, shrunk)):
        assert item.name not in names and item.cores <= CORES
        assert all(name in names or name.startswith("compile ") for name in item.after)
        names.append(item.name)
    if stage == "right" and not shrunk:
        assert all({f"uncompiled {name} fp32,bf16", f"compiled {name} bf16"} <= set(names) for name in schemes())


def test_what_chosen_items_wait_for_is_chosen_too(tmp_path):
    items = STAGES["reference"](Place(tmp_path, tmp_path, tmp_path))
    assert [item.name for item in chosen(items, "train 30M nope 1")] == ["text", "rate", "train 30M nope 1"]


@pytest.mark.slow
def test_all_stages_shrunken(tmp_path):
    texts(
        tmp_path / "from/text",
        {split: write_documents(tmp_path / split) for split in ("train", "validation", "test")},
        tokens=100_000,
        tuning_tokens=100_000,
        fraction=0.3,
        words=["tokenizer=bytes", "tokenizer.vocab_size=16384"],  # which is of the request, used or not
    )
    folders = ["--from", tmp_path / "from", "--out", tmp_path / "out", "--work", tmp_path / "work"]
    command = [sys.executable, "-m", "benchmarks.acceptance", "--shrunk", "--cores", "2", *folders]
    stages = ["right", "fast", "reference"]
    done = subprocess.run([*command, *stages], cwd=CHECKOUT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    tables = [sys.executable, "-m", "benchmarks.acceptance.tables", tmp_path / "out", "--reference", tmp_path / "packs"]
    shown = subprocess.run(tables, cwd=CHECKOUT, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    for heading in ("### Right", "### Fast", "### The reference", "small runs"):
        assert heading in shown.stdout
    assert "**" not in shown.stdout.replace("**Bold**", "").replace("**missed**", "")
    rows = {stage: Results(tmp_path / "out" / f"{stage}.jsonl").rows for stage in stages}
    assert json.loads(json.dumps(rows)) and all(row["status"] == DONE for of in rows.values() for row in of.values())
    assert (tmp_path / "packs" / "books_25m-0M" / "report" / "report.md").exists()
