"""What a report says of findings, where its pictures and files are not the point."""

from __future__ import annotations

import io

from rich.console import Console

from posbench.reporting.findings import Findings
from posbench.reporting.report import as_markdown, print_sections
from posbench.reporting.sections import sections


def on_terminal(findings: Findings, width: int = 100) -> str:
    """What a terminal of that width shows."""
    console = Console(file=io.StringIO(), width=width)
    print_sections(sections(findings, []), console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def in_markdown(findings: Findings) -> str:
    """What report.md holds."""
    return as_markdown(findings.experiment, sections(findings, []))
