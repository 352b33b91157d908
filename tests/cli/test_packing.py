"""`posbench pack`, and the other commands on what it wrote."""

from __future__ import annotations

import shutil
from pathlib import Path

import pandas as pd
import pytest

from tests.cli.commands import Give, snapshot


@pytest.mark.slow
def test_a_pack_is_read_in_place_by_every_command(posbench: Give, runs: Path, short: list[str]) -> None:
    result = posbench("pack", "demo", "runs/reference/demo_cpu.zip")
    file = runs / "reference" / "demo_cpu.zip"
    assert result.status == 0 and result.out == f"runs/reference/demo_cpu.zip: {file.stat().st_size:,} bytes\n"
    content = file.read_bytes()
    refusal = posbench("pack", "demo", "runs/reference/demo_cpu.zip").refusal
    assert "exists, and packs are never rewritten: name a new one, such as runs/reference/demo_cpu.2.zip" in refusal
    assert "results but no weights" in posbench("eval", "reference/demo_cpu/nope/seed=0", "--length", "64").error
    assert "4 of 8 runs" in posbench("eval", "--length", "64", "--device", "cpu", "--dtype", "float32").out
    words = [*short, "runs_dir=runs/reference", "experiment_name=demo_cpu", "scheme=nope", "seed=0"]
    assert "is finished" in posbench("train", *words).error
    assert "4 packed runs" in posbench("ls").error
    assert posbench("ls", "demo_cpu").out.startswith("runs/reference/demo_cpu, 4 runs: 4 finished")
    assert posbench("report", "demo_cpu").status == 0
    assert (runs / "reference/demo_cpu/report/report.md").is_file() and file.read_bytes() == content


@pytest.mark.slow
def test_the_default_is_the_next_free_name_and_packs_alone_are_enough(posbench: Give, runs: Path) -> None:
    assert posbench("pack", "demo", "--weights").out.startswith("runs/demo.zip: ")
    assert "has no finished run to pack" in posbench("pack", "demo").error
    shutil.rmtree(runs / "demo")
    files_before = snapshot(runs)
    assert posbench("report", "--output", "out").status == 0 and Path("out/report.md").is_file()
    assert posbench("sample", "demo/nope/seed=0", "--tokens", "3").status == 0
    assert posbench("export", "demo/nope/seed=0", "hf").status == 0
    assert snapshot(runs) == files_before
    result = posbench("eval", "runs/demo.zip", "--length", "64", "--device", "cpu", "--dtype", "float32")
    assert result.status == 0 and "weights=bfloat16" in result.out
    assert (runs / "demo/nope/seed=0/eval/fixed/64@anchor=64@weights=bfloat16.parquet").is_file()


@pytest.mark.slow
def test_a_search_is_reported_at_best_rates_and_packed_in_one_file(
    posbench: Give, runs: Path, short: list[str]
) -> None:
    words = [*short, "runs_dir=runs/demo-tune", "experiment_name='lr=${scheme.lr}'", "scheme=nope,alibi", "seed=0,1"]
    assert posbench("train", "-m", *words, "scheme.lr=1e-3,1e-2").status == 0
    shutil.rmtree(runs / "demo")
    assert posbench("report", "demo", "--output", "out").status == 0
    text = Path("out/report.md").read_text(encoding="utf-8")
    assert "The search for learning rates is not finished" in text and "experiment: demo" in text
    rates = pd.read_csv("out/rates.csv")
    assert len(rates) == 8 and not rates["is_kept"].any()
    best = rates.groupby(["scheme", "train.lr"])["loss"].mean().unstack().idxmin(axis=1)
    table = pd.read_csv("out/table.csv").query("protocol == 'validation' and metric == 'loss'").set_index("scheme")
    for scheme, rate in best.items():
        losses = rates[(rates["scheme"] == scheme) & (rates["train.lr"] == rate)]["loss"]
        assert table.loc[scheme, "value"] == pytest.approx(losses.mean())
    assert posbench("pack", "demo").out.startswith("runs/demo-tune.zip: ")
    shutil.rmtree(runs / "demo-tune")
    assert posbench("report", "demo", "--output", "packed").status == 0
    assert Path("packed/table.csv").read_bytes() == Path("out/table.csv").read_bytes()
    assert posbench("report", "demo", "--by", "train.lr", "--output", "by").status == 0
    assert "0.001, 0.01" in Path("by/report.md").read_text(encoding="utf-8")
    assert "nope" in posbench("ls", "demo-tune/lr=0.01").out
