"""Where commands are given: terminals that go away or know few letters, and environments that say odd things."""

from __future__ import annotations

import io
import os
import re
import sys
from pathlib import Path

import pytest

from posbench.console import console, say
from tests.cli.commands import Give


def unread() -> io.TextIOWrapper:
    """A pipe whose reader is gone, as in `| head -1`."""
    read, write = os.pipe()
    os.close(read)
    return os.fdopen(write, "w")


def test_a_report_that_nobody_reads_is_written(posbench: Give, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", unread())
    assert posbench("report", "demo").status == 1
    assert (runs / "demo/report/report.html").is_file()


def test_json_that_nobody_reads_ends_quietly(posbench: Give, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", unread())
    said = posbench("ls", "--json")
    assert (said.status, said.error) == (1, "")


def test_work_goes_on_where_nobody_reads_its_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """`posbench train -m ... 2>&1 | head -1` trains every run of the sweep."""
    monkeypatch.setattr(sys, "stderr", unread())
    lines = console(stderr=True)
    for _ in range(2):
        say("12 runs")
        lines.out("12 runs")


def test_text_is_shown_as_it_is_and_colours_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    for no_color, codes in (("", True), ("1", False)):
        monkeypatch.setenv("NO_COLOR", no_color)
        shown = io.StringIO()
        console(file=shown, force_terminal=True, width=20).out("[red]12[/] runs :smile: of a long line", style="red")
        assert "[red]12[/] runs :smile: of a long line" in shown.getvalue(), "no markup, no emoji, not wrapped"
        assert ("\x1b[31m" in shown.getvalue()) == codes


def test_an_ascii_terminal_shows_what_it_can(posbench: Give, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii", write_through=True))
    said = posbench("report", "demo")
    assert said.status == 0 and said.error == "" and b"vo_rope" in shown.getvalue()


@pytest.mark.parametrize("value", ["abc", "0"])
def test_a_number_of_processes_that_is_none_is_named(
    posbench: Give, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", value)
    assert f"WORLD_SIZE={value!r} in the environment is not a number" in posbench("schemes").refusal


def test_where_there_is_no_home_a_cache_is_asked_for(
    posbench: Give, short: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody(path: Path) -> Path:
        if str(path).startswith("~"):
            raise RuntimeError("Could not determine home directory.")
        return path

    monkeypatch.setattr(Path, "expanduser", nobody)
    monkeypatch.delenv("POSBENCH_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    refusal = posbench("prepare", *(word for word in short if not word.startswith("data.cache_dir"))).refusal
    assert re.search(r"'~/\.cache/posbench' cannot be looked up: .*set data\.cache_dir or POSBENCH_CACHE", refusal)


def test_a_full_disk_of_no_named_file_is_told_as_one(posbench: Give, monkeypatch: pytest.MonkeyPatch) -> None:
    from posbench import verify

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(verify, "list_schemes", full)
    assert posbench("schemes").refusal.startswith("posbench: No space left on device: make room, or name other folders")


def test_a_traceback_is_not_asked_for_by_0(posbench: Give, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSBENCH_TRACEBACK", "0")
    assert "runs/demo" in posbench("eval", "nosuch").refusal
    assert "POSBENCH_TRACEBACK" in posbench("--help").out
