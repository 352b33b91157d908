"""`posbench eval` over many runs: what is left out, what fails, and what it says was done."""

import shutil
from pathlib import Path

import pytest

ASKED = ["--length", "64", "--device", "cpu", "--dtype", "float32"]


@pytest.fixture
def reference(runs):
    """Return finished runs without weights, as this repository keeps some."""
    copied = Path(shutil.copytree(runs / "demo", runs / "reference" / "demo_cpu"))
    for checkpoints in copied.glob("*/*/checkpoints"):
        shutil.rmtree(checkpoints)
    return copied


@pytest.mark.slow
def test_runs_without_weights_are_left_out_and_counted_but_refused_by_name(posbench, reference):
    result = posbench("eval", *ASKED)
    assert result.status == 0, result.error
    assert "skipped, since they have no checkpoint: 4 of 8 runs\n" in result.out
    assert "demo: perplexity by length" in result.out and "demo_cpu" not in result.out
    refusal = posbench("eval", "reference/demo_cpu/nope/seed=0", *ASKED).refusal
    assert "weights of step 2" in refusal and "is missing" in refusal
    assert "--jobs 0 is not a number of runs: give 1 or more, or -1" in posbench("eval", "--jobs", "0", *ASKED).refusal
    shutil.rmtree("runs/demo")
    assert "none of the finished runs has weights: train one first" in posbench("eval", *ASKED).refusal


def test_a_run_that_fails_is_told_after_the_table_of_the_others(posbench, runs):
    shutil.rmtree(runs / "demo/nope/seed=0/checkpoints")
    (runs / "demo/nope/seed=1/run.json").write_text("{")
    result = posbench("eval", "demo", *ASKED)
    assert result.status == 2 and "Traceback" not in result.error
    assert "demo/nope/seed=0: failed\n" in result.out and "demo/vo_rope/seed=1: scored fixed 64\n" in result.out
    assert "demo: perplexity by length" in result.out and "\nvo_rope" in result.out
    lines = result.error.splitlines()
    assert lines[0] == "posbench: not all runs could be scored" and len(lines) == 3
    assert lines[1].startswith("  demo/nope/seed=0: ") and "model.safetensors is missing" in lines[1]
    assert lines[2].startswith("  demo/nope/seed=1: ") and "run.json" in lines[2]


def test_an_error_that_all_runs_share_is_told_once_without_their_names(posbench, runs):
    refusal = posbench("eval", "demo", "--length", "1M", "--device", "cpu").refusal
    assert "length 1048576 is longer than the text" in refusal and "seed=" not in refusal
