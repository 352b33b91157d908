"""Represent a section of the report as data. A protocol decides what its section shows; reporting draws it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np
import pandas as pd

from posbench.runs import run_at


@dataclass(frozen=True)
class ComparedRuns:
    """The runs that one report compares, and all numbers that were measured in them."""

    runs: pd.DataFrame  # rows of the summary, one per compared run
    wanted_baseline: str
    losses: pd.DataFrame  # validation loss, nats/token: one row per seed, one column per scheme, best scheme first
    cells: pd.DataFrame  # every figure: one row per scheme, protocol, length, bucket and so on (`cells.measure`)
    holes: dict[tuple[str, str], list[str]]  # (protocol, text) -> which figures are left out, and why
    doubt: str  # what intervals are over: seeds, or documents if there is only one seed

    @property
    def schemes(self) -> list[str]:
        """Return the names of the schemes, best first."""
        return list(self.losses.columns)

    @property
    def baseline(self) -> str:
        """Return the scheme that gaps are measured against: the requested one, or the best one if that has no run."""
        return self.wanted_baseline if self.wanted_baseline in self.schemes else self.schemes[0]

    @property
    def training_length(self) -> int:
        return int(self.runs["train.context_length"].iloc[0])

    @property
    def has_onsets(self) -> bool:
        """Return whether any run logged when it began to use long-range order. Continued runs do not log it."""
        return bool(self.runs.get("onset_tokens", pd.Series(dtype=float)).notna().any())

    @property
    def onsets(self) -> pd.DataFrame:
        """Return the tokens until each run used long-range order, infinite if never: seeds by schemes."""
        return self.runs.pivot(index="seed", columns="scheme", values="onset_tokens")[self.schemes].sort_index()

    def logged(self, kind: str, figures: Sequence[str]) -> pd.DataFrame:
        """Return what the runs logged during training, as `curves` does, with scheme and seed."""
        return curves(self.runs["path"], kind, figures).merge(self.runs[["path", "scheme", "seed"]], on="path")

    def at(self, protocol: str | None = None, length: int | None = None, **equal: Any) -> pd.DataFrame:
        """Return the rows of `cells`, the table of all figures, with these values. None accepts any."""
        # By default figures of schemes as trained, on the runs' own text.
        return where(self.cells, **{"under": "", "text": "", "protocol": protocol, "length": length, **equal})


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
    line: float = math.nan  # where a line is drawn, such as the training length; NaN means none


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
        named = {"half": self.half, "after": self.after, "bold": self.bold}
        return {field: column for field, column in named.items() if column}


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

    def beside(self, other: Table, schemes: Sequence[str]) -> Table:
        """Return this table and another of the same schemes side by side, with rows in this order."""
        frame = pd.concat([self.frame.set_index("scheme"), other.frame.set_index("scheme")], axis=1)
        frame = frame.reindex([scheme for scheme in schemes if scheme in frame.index])
        return Table(frame.rename_axis("scheme").reset_index(), {**self.formats, **other.formats})


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


def where(table: pd.DataFrame, **equal: Any) -> pd.DataFrame:
    """Return the rows of a table in which the columns have the values passed here; None allows any value."""
    for column, value in equal.items():
        table = table if value is None else table[table[column] == value]
    return table


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


def curves(paths: Iterable[str], kind: str, figures: Sequence[str]) -> pd.DataFrame:
    """Return what runs logged during training: columns path, step, tokens and `figures`.

    Arguments: kind, of lines of metrics.jsonl, such as `validation`.
    """
    rows = []
    for path in paths:
        # If a step was logged twice, its first line counts: reversed, because a later entry of a dict replaces others.
        rows_by_step = {row["step"]: row for row in reversed(run_at(path).logged) if row["kind"] == kind}
        rows += [{"path": path, **rows_by_step[step]} for step in sorted(rows_by_step)]
    numbers = ["step", "tokens", *figures]
    return pd.DataFrame(rows, columns=["path", *numbers]).astype(dict.fromkeys(numbers, float))


def crossing(places: Any, values: Any, goal: float) -> float:
    """Return where a curve first falls to `goal`, linear between its points; infinity if never."""
    x, y = np.asarray(places), np.asarray(values)
    at_or_below = np.flatnonzero(y <= goal)
    if not len(at_or_below):
        return math.inf
    n = at_or_below[0]
    # Nothing is known before the first point.
    if n == 0:
        return float(x[0])
    return float(x[n - 1] + (x[n] - x[n - 1]) * (y[n - 1] - goal) / (y[n - 1] - y[n]))
