"""A part of a report, before it is shown on a terminal, in Markdown or in HTML."""

from __future__ import annotations

from dataclasses import dataclass, field

from posbench.reporting.chains import Chain
from posbench.reporting.tables import Table


@dataclass
class Section:
    """A heading with what stands under it: sentences, tables, pictures."""

    title: str
    words: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    pictures: list[tuple[str, str]] = field(default_factory=list)  # file stem, caption
    on_terminal: bool = True
    chain: Chain | None = None  # then the first sentence is its text
    commands: list[tuple[str, str]] = field(default_factory=list)  # what for, a command to paste
    lead: str = ""  # a line that stands above all else
    short: str = ""  # the title where there is little room


def pictures(drawn: list[str], stem: str, caption: str) -> list[tuple[str, str]]:
    """The picture with its caption, if it was drawn."""
    return [(stem, caption)] if stem in drawn else []
