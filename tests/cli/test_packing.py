"""`posbench pack`, and the other commands on what it wrote."""

from __future__ import annotations

from pathlib import Path

from tests.cli.commands import Give, left


def test_an_experiment_is_packed_and_read_by_its_name(posbench: Give, runs: Path, short: list[str]) -> None:
    said = posbench("pack", "demo", "runs/reference/demo_cpu")
    packed = runs / "reference" / "demo_cpu"
    assert said.status == 0 and f"bytes in {len(list(packed.iterdir()))} files" in said.out
    assert "runs/reference/demo_cpu/windows-validation.parquet\n" in said.out
    content = left(packed)
    assert "is not an empty folder" in posbench("pack", "demo", "runs/reference/demo_cpu").refusal
    refusal = posbench("eval", "reference/demo_cpu/nope/seed=0", "--length", "64").refusal
    assert "has results but no weights" in refusal
    assert "4 of 8 runs" in posbench("eval", "--length", "64", "--device", "cpu", "--dtype", "float32").out
    words = [*short, "runs_dir=runs/reference", "experiment_name=demo_cpu"]
    assert "so no runs can be added to it" in posbench("train", *words).refusal
    assert left(packed) == content
    assert posbench("compare", "runs/reference/demo_cpu/nope", "demo/nope/seed=0").status == 0
    assert "is one run" in posbench("report", "runs/reference/demo_cpu/nope/seed=0").refusal
    assert posbench("report", "demo_cpu").status == 0 and (packed / "report" / "report.md").is_file()
