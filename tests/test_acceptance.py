"""Half an hour on a GPU, rehearsed: what is begun, stopped, resumed and recorded, and every stage in seconds."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.acceptance import fast, mps, reference, right, tables, text
from benchmarks.acceptance import items as items_module
from benchmarks.acceptance import runner as runner_module
from benchmarks.acceptance.__main__ import CORES, STAGES, chosen
from benchmarks.acceptance.items import CUT_OFF, DONE, FAILED, KILLED, Item, Results
from benchmarks.acceptance.place import CHECKOUT, SLOW, Place, place_of, schemes
from benchmarks.acceptance.prepare import texts
from benchmarks.acceptance.runner import Runner, Started
from benchmarks.shapes import SHAPES, config_of
from posbench.verify import measures
from tests.conftest import write_documents

FAKE = """
import json, sys, time
name, seconds, status = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
log = open("log", "a")
log.write(f"{name} begins\\n"); log.flush()
print("chatter"); print(json.dumps({"half": name}), flush=True)
print(f"{name} warns", file=sys.stderr, flush=True)
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

    def run(items, seconds=60.0, code="today", cores=2, python_path=""):
        results = Results(tmp_path / "stage.jsonl")
        of_machine, variables = (
            Results(tmp_path / "machine.jsonl"),
            {"PATH": os.environ["PATH"], "PYTHONPATH": python_path},
        )
        until = time.monotonic() + seconds + runner_module.GRACE_SECONDS
        said = []
        runner = Runner(results, of_machine, until, cores, code, tmp_path, variables, said.append)
        left = runner.run(items)
        return Results(tmp_path / "stage.jsonl").rows, [item.name for item in left]

    return run


def runner_of(tmp_path, cores=CORES, seconds=60.0):
    results = Results(tmp_path / "stage.jsonl")
    return Runner(results, results, time.monotonic() + seconds, cores, "today", tmp_path, {})


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


def test_what_a_kill_would_lose_is_brought_home_now_and_then(tmp_path, monkeypatch):
    monkeypatch.setattr(runner_module, "KEEP_SECONDS", 0.0)
    (tmp_path / "fake_item.py").write_text(FAKE)
    runner, kept = runner_of(tmp_path, cores=1), []
    runner.variables, runner.keep = {"PATH": os.environ["PATH"]}, lambda: kept.append(list(runner.results.rows))
    runner.run([fake("a"), fake("b")])
    assert kept == [["a"], ["a", "b"]]
    monkeypatch.setattr(runner_module, "KEEP_SECONDS", 60.0)
    runner.run([fake("c")])
    assert len(kept) == 2


def test_how_long_items_take_is_learned_from_those_of_their_kind(run):
    first = [fake("a", takes=0.5, seconds=0.01), fake("other", kind="other")]
    rows, left = run([*first, fake("b", seconds=1.0, after=("a",))], seconds=10)
    assert set(rows) == {"a", "other"} and left == ["b"]


def test_what_still_runs_at_the_end_is_stopped_and_begun_again(run, tmp_path):
    began = time.monotonic()
    rows, left = run([fake("a", takes=60)], seconds=1.5)
    assert time.monotonic() - began < 10 and left == ["a"]
    assert rows["a"]["status"] == CUT_OFF and rows["a"]["result"] == {"half": "a"} and rows["a"]["said"] == "a warns"
    rows, left = run([fake("a")], seconds=1.0)
    assert rows["a"]["status"] == CUT_OFF and left == ["a"]  # it was seen to take longer
    rows, left = run([fake("a")])
    assert rows["a"]["status"] == DONE and left == []


def test_an_item_that_hangs_is_killed_long_before_the_end(run, monkeypatch):
    monkeypatch.setattr(items_module.Item, "limit", 0.5)
    rows, _ = run([fake("a", takes=60)])
    assert rows["a"]["status"] == FAILED and "killed after" in rows["a"]["error"]


def test_a_process_that_survives_its_kill_holds_up_nothing(monkeypatch):
    class Stuck:  # in the driver of a GPU, say
        pid, returncode = 1 << 30, None

        def wait(self, timeout=None):
            assert timeout is not None, "for ever"
            raise subprocess.TimeoutExpired("item", timeout)

    Started(fake("a"), Stuck(), None, None, 0.0).kill()


def test_an_item_that_is_killed_says_where_it_was(run, tmp_path, monkeypatch):
    code = "import time\nfrom benchmarks.acceptance.items import run_part\n"
    code += "def hangs():\n    time.sleep(60)\nrun_part({'hangs': hangs})\n"
    (tmp_path / "hanging_item.py").write_text(code)
    monkeypatch.setattr(items_module.Item, "limit", 2.0)
    rows, _ = run([Item("a", "fake", "hanging_item", ("hangs",))], python_path=str(CHECKOUT))
    assert rows["a"]["error"].startswith(KILLED) and "in hangs" in rows["a"]["error"]


def test_the_cause_of_a_failure_is_shown_and_not_what_a_compiler_adds():
    advice = "Set TORCHDYNAMO_VERBOSE=1 for the internal stack trace"
    error = "exit status 1\nTraceback:\n  File\ntorch.InductorError: OutOfResources: shared memory\n  target: flex\n"
    assert runner_module._cause(error + advice) == "torch.InductorError: OutOfResources: shared memory"
    assert runner_module._cause("exit status 1\nx: warning\nt5: beyond the limit") == "t5: beyond the limit"


def test_side_by_side_but_alone_where_speed_is_measured(tmp_path):
    runner = runner_of(tmp_path, cores=3)
    a, b, large, alone = fake("a"), fake("b"), fake("large", cores=3), fake("alone", alone=True)
    after = fake("after", after=("a",))

    def begun(waiting, running):
        return [item.name for item in runner.startable(waiting, running)]

    assert begun([a, after, b, alone], []) == ["a", "b"]
    assert begun([a, large, b], []) == ["a"]  # what has no room yet is not passed by smaller ones
    assert begun([large, after, alone], [a, b]) == []
    assert begun([after, alone, large], []) == ["after"]
    assert begun([alone, a], [b]) == []  # it holds up those behind it
    assert begun([alone, a], []) == ["alone"]
    assert begun([a], [alone]) == []
    assert begun([fake("larger", cores=9)], []) == ["larger"]


def test_what_ends_before_one_that_is_alone_has_its_turn_may_begin(tmp_path):
    runner = runner_of(tmp_path)
    running, short, long = fake("running", seconds=30.0), fake("short", seconds=5.0), fake("long", seconds=20.0)
    for alone in (fake("alone", alone=True), fake("alone", alone=True, after=("running",))):
        begun = runner.startable([alone, long, short], [running], lasting=10.0)
        assert begun == [short]
    assert runner.startable([fake("alone", alone=True, after=("long",)), short, long], [running], 10.0) == [short, long]
    late = Started(fake("late", seconds=5.0), None, None, None, time.monotonic() - 25)
    assert 19 < runner.lasting([late]) < 21 and runner.lasting([]) == 0.0


def test_the_learning_rate_is_searched_beside_all_that_is_compiled(tmp_path):
    items = STAGES["reference"](Place(tmp_path, tmp_path, tmp_path))
    runner = runner_of(tmp_path, seconds=600.0)
    begun = runner.startable(items, [])
    assert begun[0].name == text.NAME and sum(item.name.startswith("compile ") for item in begun) > 8
    waiting = [item for item in items if item not in begun]
    assert runner.startable(waiting, begun[1:])[0].name == reference.RATE


def test_what_compiles_for_minutes_holds_up_no_measurement(tmp_path):
    place = Place(tmp_path, tmp_path, tmp_path)
    items = {item.name: item for item in fast.items(place)}
    for scheme in SLOW:
        warm = items[f"compile {scheme} 125m"]
        assert warm.seconds > items["compile nope 125m"].seconds
        without = {name for name, item in items.items() if name.startswith("all 125m") and warm.name not in item.after}
        assert without and without == set(warm.after)
    warm = items["compile fire 125m"]
    Results(place.of_machine).add(warm, FAILED, 900, "today", error=f"{KILLED} after 900 s\nstack")
    Results(place.of_machine).add(items["compile t5 125m"], FAILED, 9, "today", error="exit status 1")
    names, left_out = fast.compiled_in_time(("nope", "t5", "fire"), "125m", place)
    assert names == ["nope", "t5"] and left_out == {"posbench fire": "not measured: compiling was killed after 900 s"}


def test_long_windows_that_run_side_by_side_fit_into_80_percent_of_a_gpu(tmp_path):
    items = [item for item in right.items(Place(tmp_path, tmp_path, tmp_path)) if item.name.startswith("long ")]
    for item in items:
        most = right.MOST_BYTES + int(item.name.split()[2]) * right.MOST_BYTES_A_TOKEN
        assert most * min(CORES // item.cores, len(right.LONG)) < 0.8 * 139 * 2**30


def test_without_the_text_nothing_is_begun_and_what_a_machine_prepared_comes_home(tmp_path):
    place = Place(tmp_path / "from", tmp_path, tmp_path / "out")
    with pytest.raises(SystemExit, match="is missing: bring"):
        place.check()
    place.out.mkdir()
    Results(place.of_machine).add(fake("compile t5"), FAILED, 9, "today", error="out of shared memory")
    place.bring_home()
    assert "out of shared memory" in (place.out / f"machine-{place.mark}.jsonl").read_text()


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


def test_a_format_that_crashes_leaves_the_other_measured(monkeypatch, capsys):
    def path_errors(specimen, dtype, *more):
        yield "cuda fused", 1.0
        if dtype == torch.float32:
            raise RuntimeError("no kernel")

    monkeypatch.setattr(measures, "path_errors", path_errors)
    with pytest.raises(SystemExit, match="nope: stopped: fp32 after cuda fused: RuntimeError: no kernel"):
        right.paths("nope", "fp32,bf16", "0", "cpu")
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()][-1]["bf16"]["paths"] == {
        "cuda fused": 1.0
    }


CONTROL = """#!/bin/sh
read word
echo "$1$word $CUDA_MPS_PIPE_DIRECTORY" >> "$0.log"
echo said so
exit STATUS
"""


def control(tmp_path, monkeypatch, status=0):
    """Put a fake MPS control program on the path, which logs its arguments and input."""
    file = tmp_path / mps.CONTROL
    file.write_text(CONTROL.replace("STATUS", str(status)))
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")


def test_mps_runs_while_it_is_used_and_ends_also_where_its_user_fails(tmp_path, monkeypatch):
    control(tmp_path, monkeypatch)
    with pytest.raises(ZeroDivisionError), mps.service() as variables:
        folder = variables["CUDA_MPS_PIPE_DIRECTORY"]
        assert Path(folder).is_dir() and len(folder) < 60
        raise ZeroDivisionError
    assert (tmp_path / f"{mps.CONTROL}.log").read_text().splitlines() == [f"-d {folder}", f"quit {folder}"]
    assert not Path(folder).exists() and "CUDA_MPS_PIPE_DIRECTORY" not in os.environ


def test_without_mps_it_is_said_why_and_nothing_is_trained(tmp_path, monkeypatch, capsys):
    place = Place(tmp_path, tmp_path, tmp_path, shrunk=True)
    monkeypatch.setattr(fast, "_sweep", None)
    fast.with_mps(*place.words)
    control(tmp_path, monkeypatch, status=3)
    fast.with_mps(*place.words)
    why = [json.loads(line)["no_mps"] for line in capsys.readouterr().out.splitlines()]
    assert why == [f"{mps.CONTROL} is not installed", f"{mps.CONTROL} -d ended with 3: said so"]


def test_small_runs_at_once_stand_in_the_tables(tmp_path):
    results = Results(tmp_path / "fast.jsonl")
    of = {fast.ONE_BY_ONE: {"seconds": 60.0, "runs": 4}, fast.AT_ONCE: {"seconds": 50.0}}
    items = {item.name: item for item in fast.items(Place(tmp_path, tmp_path, tmp_path))}
    results.add(items["several"], DONE, 110, "today", result=of)
    for more, said in (
        ({fast.WITH_MPS: {"seconds": 30.0}}, "At once with MPS: 30 s, 2.00 times as fast (met)."),
        ({"no_mps": "it is not there"}, "At once with MPS: not measured, it is not there."),
    ):
        results.add(items[fast.WITH_MPS], DONE, 30, "today", result=more)
        shown = list(tables.fast_tables(results.rows))
        assert shown[-2:] == ["At once: 50 s, 1.20 times as fast (**missed**).", said]


def test_the_learning_rate_is_found_once_on_a_machine_and_stands_in_the_tables(tmp_path):
    place = Place(tmp_path, tmp_path, tmp_path / "out")
    place.out.mkdir()
    assert reference._settled_rate(place) == reference.USUAL_RATE
    item = next(item for item in right.items(place) if item.name == reference.RATE)
    assert item in reference.items(place)
    result = {"lr": 2e-3, "losses": {"0.002": [4.0]}}
    Results(place.of_machine).add(item, DONE, 60, "today", result=result)
    place.bring_home()
    assert reference._settled_rate(place) == 2e-3
    assert "Learning rate 0.002" in "".join(tables.reference_tables(tables._rates(place.out)))


def test_what_runs_share_travels_once(tmp_path):
    place, shared = Place(tmp_path, tmp_path, tmp_path / "out"), os.urandom(200_000)
    for scheme in ("nope", "alibi", "t5"):
        folder = place.runs / reference.EXPERIMENT / scheme / "seed=0"
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "tokenizer.json").write_bytes(shared)
        (folder / "checkpoints" / "weights").write_bytes(os.urandom(100_000))
    place.out.mkdir()
    reference.pack(place)
    (packed,) = place.out.iterdir()
    assert packed.stat().st_size < 250_000


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


@pytest.mark.parametrize("plain", [True, False])
def test_every_step_of_every_item_may_be_taken_without_a_cuda_graph(plain, tmp_path):
    place = Place(tmp_path, tmp_path, tmp_path / "out", plain_steps=plain)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "texts.json").write_text(json.dumps({"main": {"words": []}}))
    assert place_of(*place.words) == place
    assert ("train.cuda_graph=false" in place.run_words("main")) == plain
    assert config_of(SHAPES["A"], "nope", "float32", True, place.step_words).train.cuda_graph is (
        False if plain else None
    )


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
    command = [
        sys.executable,
        "-m",
        "benchmarks.acceptance.tables",
        tmp_path / "out",
        "--reference",
        tmp_path / "packs",
    ]
    shown = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    for heading in ("### Right", "### Fast", "### The reference", "small runs"):
        assert heading in shown.stdout
    assert "**" not in shown.stdout.replace("**Bold**", "").replace("**missed**", "")
    rows = {stage: Results(tmp_path / "out" / f"{stage}.jsonl").rows for stage in stages}
    assert json.loads(json.dumps(rows)) and all(row["status"] == DONE for of in rows.values() for row in of.values())
    assert all(
        "rates_so_far" in row["result"] for name, row in rows["fast"].items() if name.startswith(("bench", "peers"))
    )
    assert (tmp_path / "packs" / "books_25m-0M" / "report" / "report.md").exists()
