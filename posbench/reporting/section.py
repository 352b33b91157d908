"""Represent a section of the report as data. A protocol decides what its section shows; reporting draws it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np
import pandas as pd


@dataclass(frozen=True)
class Plot:
    """A picture of the report as data: its kind, points, labels and caption."""

    name: str  # file name without its suffix
    kind: str  # how it is drawn: a key of `posbench.reporting.figures.KINDS`
    caption: str
    points: pd.DataFrame  # scheme, x, y, or the table that this kind of picture shows
    x_label: str = ""
    y_label: str = ""
    marks: pd.DataFrame | None = None  # further points, which the kind draws as dots
    line: float = math.nan  # where a vertical line is drawn, such as the training length; NaN means none
    level: float = math.nan  # where a horizontal line is drawn
    x_scale: str = "log"  # of `lines`: tokens, lengths, rates or log; of `heads`: log or pairs
    y_scale: str = "linear"  # of `lines` and `heads`: linear, log or symlog


@dataclass(frozen=True)
class Format:
    """A format that turns the numbers of a table's column into text. Text is not changed."""

    kind: str = "number"  # number, perplexity, or a key of `posbench.reporting.text.SPECS`
    digits: int = 3  # decimals of a number without an interval
    sign: bool = False  # whether positive numbers get a plus
    half: str = ""  # column with half of the 95 % interval, which decides the decimals
    after: str = ""  # column with text that follows the number
    bold: str = ""  # column that says which cells are bold

    @property
    def columns(self) -> dict[str, str]:
        """Return the columns that this format reads besides its own, by field; they are not shown."""
        columns = {"half": self.half, "after": self.after, "bold": self.bold}
        return {field: column for field, column in columns.items() if column}


@dataclass(frozen=True)
class Table:
    """A table of a report as data. Missing cells become dashes."""

    frame: pd.DataFrame  # a row per scheme, or whatever the first column names
    formats: dict[str, Format] = field(default_factory=dict)  # of columns with numbers; the default without one

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]], formats: dict[str, Format] | None = None) -> Table:
        """Return a table of these rows, {column: cell} each."""
        return cls(pd.DataFrame(rows, dtype=object), formats or {})

    def __len__(self) -> int:
        return len(self.frame)

    def add(self, title: str, values: Any, half: Any, **format: Any) -> None:
        """Append a column of numbers with half their 95 % intervals, in the order of the rows."""
        self.frame[title], self.frame[f"{title}: half"] = np.asarray(values), np.asarray(half)
        self.formats[title] = Format(half=f"{title}: half", **format)

    def beside(self, table: Table, schemes: Sequence[str]) -> Table:
        """Return this table and another of the same schemes side by side, with rows in this order."""
        frame = pd.concat([self.frame.set_index("scheme"), table.frame.set_index("scheme")], axis=1)
        frame = frame.reindex([scheme for scheme in schemes if scheme in frame.index])
        return Table(frame.rename_axis("scheme").reset_index(), {**self.formats, **table.formats})


@dataclass(frozen=True)
class Section:
    """A section of a report: a heading, lines about missing figures, pictures, a table and a note, all optional."""

    title: str  # empty if the section continues the previous one
    holes: Sequence[str] = ()
    plots: Sequence[Plot] = ()
    table: Table | None = None
    note: str = ""
    latex: tuple[str, str] | None = None  # the table's file name and caption in LaTeX
    level: int = 2  # level of the heading
    after_protocols: bool = False  # whether it comes after the other sections of all protocols
    files: Mapping[str, pd.DataFrame] = field(default_factory=dict)  # CSV files by their names


def joined(sections: Iterable[Section], schemes: Sequence[str]) -> list[Section]:
    """Return a report's sections, with successive ones of the same title joined, tables side by side."""
    joined_sections = []
    for _, group in groupby(sections, key=lambda section: section.title):
        joined_section, *later = group
        for section in later:
            table = section.table if joined_section.table is None else joined_section.table
            if joined_section.table is not None and section.table is not None:
                table = joined_section.table.beside(section.table, schemes)
            joined_section = replace(
                joined_section,
                holes=[*joined_section.holes, *section.holes],
                plots=[*joined_section.plots, *section.plots],
                table=table,
                note=joined_section.note + section.note,
                files={**joined_section.files, **section.files},
                latex=joined_section.latex or section.latex,
            )
        joined_sections.append(joined_section)
    return joined_sections


def pivot(
    cells: pd.DataFrame, titles: Mapping[Any, str], column: str, value: str = "value", format: Format | None = None
) -> Table:
    """Return a table with a row per scheme, in the order of `cells`, and a column per title.

    Arguments: titles, {value of `column`: title}, in the order to show; value, the column of the figures; format, whose
    `half`, `after` and `bold` name columns of `cells`.
    """
    format = format or Format()
    schemes = list(dict.fromkeys(cells["scheme"]))
    columns: dict[str, Any] = {"scheme": schemes}
    formats = {}
    for key, title in titles.items():
        of_title = cells[cells[column] == key].set_index("scheme").reindex(schemes)
        # What the format reads becomes a hidden column beside the figures.
        hidden: dict[str, Any] = {role: f"{title}: {role}" for role in format.columns}
        columns[title] = of_title[value].to_numpy()
        for role, source in format.columns.items():
            columns[hidden[role]] = of_title[source].to_numpy()
        formats[title] = replace(format, **hidden)
    return Table(pd.DataFrame(columns), formats)


def in_order(cells: pd.DataFrame, schemes: Sequence[str], *then: str) -> pd.DataFrame:
    """Return the cells with the schemes in this order, each sorted by the columns `then`."""
    rank = {scheme: n for n, scheme in enumerate(schemes)}
    cells = cells[cells["scheme"].isin(rank)]
    placed = cells.assign(place=cells["scheme"].map(rank))
    return placed.sort_values(["place", *then], kind="stable").drop(columns="place")


def by_distance(cells: pd.DataFrame, schemes: Sequence[str], title: str) -> Table:
    """Return a table with one row per scheme and one column per distance.

    Arguments: cells, with columns scheme, first (distance) and value; title, of a column, with {} for the distance.
    """
    titles = {distance: title.format(distance) for distance in sorted(set(cells["first"]))}
    return pivot(in_order(cells, schemes), titles, "first", format=Format(sign=True))


def half(cell: Any, name: str) -> Any:
    """Return half the width of the 95 % interval over seeds of the figure in column `name`."""
    return (cell[f"{name}_high"] - cell[f"{name}_low"]) / 2
