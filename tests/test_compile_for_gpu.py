"""The table of what compiles for a GPU: which cells are compiled again, and what of a result is a failure."""

import pytest

from benchmarks.compile_for_gpu import __main__ as command
from benchmarks.compile_for_gpu.cells import Cell, add, cells, results
from benchmarks.compile_for_gpu.table import tabulate

PART = {
    "launches": 1234,
    "cpu_seconds": 9.0,
    "shared_bytes": 1024,
    "forward": {"graphs": 1, "triton": 9, "other": 5},
    "backward": {"graphs": 1, "triton": 8, "other": 9},
}
WHOLE = {"torch": "2.11.0", "training": PART, "evaluation": PART}
ONE, OTHER = cells(["nope", "t5"], ["25m"], ["bfloat16"], [1024])


@pytest.fixture
def compiled(monkeypatch):
    """The cells that were compiled, in order; `t5` fails in training."""
    names = []

    def compile_one(cell, words):
        names.append(cell.scheme)
        return WHOLE if cell.scheme == "nope" else {**WHOLE, "training": {**PART, "error": "OutOfResources"}}

    monkeypatch.setattr(command, "compile_one", compile_one)
    return names


def test_what_has_a_result_by_this_code_is_not_compiled_again(tmp_path, compiled, monkeypatch):
    file = tmp_path / "sm90.jsonl"
    assert command.compile_cells([ONE], file, 1, []) == []
    file.write_text(file.read_text() + '{"cell": {"scheme": "t5", "mo')  # as a kill leaves it
    assert command.compile_cells([ONE, OTHER], file, 2, []) == [OTHER]
    assert compiled == ["nope", "t5"] and set(results(file)) == {ONE, OTHER}
    monkeypatch.setattr(command, "code_fingerprint", lambda: "of tomorrow")
    command.compile_cells([ONE], file, 1, [])
    assert compiled == ["nope", "t5", "nope"]


def test_the_table_names_what_failed(tmp_path, compiled):
    file = tmp_path / "sm90.jsonl"
    command.compile_cells([ONE, OTHER], file, 1, [])
    add(file, Cell("t5", "25m", "float32", 32768), {"error": "not done after 1800 seconds"})
    assert tabulate(results(file)).splitlines() == [
        "| scheme | 25m bf16 1k | 25m fp32 32k |",
        "|---|---|---|",
        "| nope | 14 + 17; 1,234, 1,234 | – |",
        "| t5 | **failed**, 1,234 | **failed** |",
    ]


@pytest.mark.parametrize("scheme, length, defined", [("xpos", 1024, True), ("xpos", 32768, False), ("t5", 32768, True)])
def test_a_length_that_the_scheme_does_not_reach_is_no_cell(scheme, length, defined):
    assert command.is_defined(Cell(scheme, "25m", "bfloat16", length)) is defined
