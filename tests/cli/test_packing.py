"""`posbench pack`, and the other commands on what it wrote."""

import pytest


@pytest.mark.slow
def test_a_pack_is_read_in_place_by_every_command(posbench, runs, short):
    result = posbench("pack", "demo", "runs/reference/demo_cpu.zip")
    file = runs / "reference" / "demo_cpu.zip"
    assert result.status == 0 and result.out == f"runs/reference/demo_cpu.zip: {file.stat().st_size:,} bytes\n"
    content = file.read_bytes()
    packed_again = posbench("pack", "demo_cpu", "other.zip", "--runs-dir", "runs/reference")
    assert packed_again.status == 2 and "has no finished run to pack" in packed_again.error
    assert "4 of 8 runs" in posbench("eval", "--length", "64", "--device", "cpu", "--dtype", "float32").out
    words = [*short, "runs_dir=runs/reference", "experiment_name=demo_cpu", "scheme=nope", "seed=0"]
    assert "is finished" in posbench("train", *words).error
    assert "4 packed runs" in posbench("ls").error
    assert posbench("ls", "demo_cpu").out.startswith("runs/reference/demo_cpu, 4 runs: 4 finished")
    assert posbench("report", "demo_cpu").status == 0
    assert (runs / "reference/demo_cpu/report/report.md").is_file() and file.read_bytes() == content
