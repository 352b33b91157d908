"""`posbench eval` over many runs: what is left out, what fails, and what it says was done."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cli.commands import Give

ASKED = ["--length", "64", "--device", "cpu", "--dtype", "float32"]


@pytest.fixture
def reference(runs: Path) -> Path:
    """Return finished runs without weights, as this repository keeps some."""
    copied = Path(shutil.copytree(runs / "demo", runs / "reference" / "demo_cpu"))
    for checkpoints in copied.glob("*/*/checkpoints"):
        shutil.rmtree(checkpoints)
    return copied


@pytest.mark.slow
def test_runs_without_weights_are_left_out_and_counted_but_refused_by_name(posbench: Give, reference: Path) -> None:
    result = posbench("eval", *ASKED)
    assert result.status == 0, result.error
    assert "skipped, since they have no checkpoint: 4 of 8 runs\n" in result.out
    assert "demo: perplexity by length" in result.out and "demo_cpu" not in result.out
    refusal = posbench("eval", "reference/demo_cpu/nope/seed=0", *ASKED).refusal
    assert "weights of step 2" in refusal and "is missing" in refusal
    assert "--jobs 0 is not a number of runs: give 1 or more, or -1" in posbench("eval", "--jobs", "0", *ASKED).refusal
    shutil.rmtree("runs/demo")
    assert "none of the finished runs has weights: train one first" in posbench("eval", *ASKED).refusal


def test_a_run_that_fails_is_told_after_the_table_of_the_others(posbench: Give, runs: Path) -> None:
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


def test_an_error_that_all_runs_share_is_told_once_without_their_names(posbench: Give, runs: Path) -> None:
    refusal = posbench("eval", "demo", "--length", "1M", "--device", "cpu").refusal
    assert "length 1048576 is longer than the text" in refusal and "seed=" not in refusal


@pytest.mark.slow
def test_it_says_what_was_scored_and_what_was_there(posbench: Give, runs: Path) -> None:
    command = ["eval", "demo/nope", "--device", "cpu", "--dtype", "float32"]
    assert "demo/nope/seed=0: scored fixed 64, 128\n" in posbench(*command, "--length", "64,128").out
    assert "demo/nope/seed=0: already there\n" in posbench(*command, "--length", "64,128").out
    assert "demo/nope/seed=1: scored fixed 128, 256\n" in posbench(*command, "--length", "128,256").out
    result = posbench(*command, "--length", "64", "--protocol", "fixed,nonoverlapping")
    assert "demo/nope/seed=0: scored fixed 64; nonoverlapping 64\n" in result.out


@pytest.mark.slow
def test_words_of_the_scheme_and_older_weights_are_said_in_the_table(posbench: Give, runs: Path) -> None:
    result = posbench("eval", "demo/vo_rope/seed=0", *ASKED, "--under", "base=1e2")
    assert result.status == 0 and "(fixed, 3,264 targets)" in result.out and "\nvo_rope · base=1e2 " in result.out
    assert (runs / "demo/vo_rope/seed=0/eval/fixed/64@anchor=64@base=1e2.json").is_file()
    dropped = posbench("eval", "demo/vo_rope/seed=0", *ASKED, "--under", "scheme=nope")
    assert dropped.status == 0 and "\nvo_rope · scheme=nope " in dropped.out
    assert (runs / "demo/vo_rope/seed=0/eval/fixed/64@anchor=64@scheme=nope.parquet").is_file()
    assert "scheme.base" in posbench("eval", *ASKED, "--under", "base").refusal
    assert (
        "weights of step 1 in runs/demo/nope/seed=0/checkpoints cannot be used: SHA256SUMS is missing"
        in posbench("eval", "demo/nope/seed=0", "--at-step", "1").refusal
    )
