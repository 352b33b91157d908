"""Where commands are given: terminals that go away or know few letters, and environments that say odd things."""

from __future__ import annotations

import io
import os
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
