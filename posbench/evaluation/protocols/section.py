"""Represent a section of the report as data. A protocol decides what its section shows; reporting draws it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np
import pandas as pd

from posbench.config.units import DASH, number, plus_minus
from posbench.runs import run_at


@dataclass(frozen=True)
class ComparedRuns:
    """The runs that one report compares, and all numbers that were measured in them."""

    runs: pd.DataFrame  # rows of the summary, one per compared run
    wanted_baseline: str
    losses: pd.DataFrame  # validation loss, nats/token: one row per seed, one column per scheme, best scheme first
    cells: pd.DataFrame  # every figure: one row per scheme, protocol, length, bucket and so on (`comparison.measure`)
    holes: dict[tuple[str, str], list[str]]  # (protocol, text) -> which figures are left out, and why

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
        """Return whether any run logged when it began to use the order of tokens more than 32 back.

        Continued runs do not log it.
        """
        return bool(self.runs.get("onset_tokens", pd.Series(dtype=float)).notna().any())

    @property
    def onsets(self) -> pd.DataFrame:
        """Return the tokens trained on until a run used the order of tokens more than 32 back, infinite if never.

        It is a table with a row per seed and a column per scheme.
        """
        return self.runs.pivot(index="seed", columns="scheme", values="onset_tokens")[self.schemes].sort_index()

    def logged(self, kind: str, figures: Sequence[str]) -> pd.DataFrame:
        """Return what the runs logged during training, as `curves` does, with the scheme and seed of each row."""
        return curves(self.runs["path"], kind, figures).merge(self.runs[["path", "scheme", "seed"]], on="path")

    def at(self, protocol: str | None = None, length: int | None = None, **equal: Any) -> pd.DataFrame:
        """Return the rows of `cells`, the table of all figures, in which the columns have the values passed here.

        By default these are figures of schemes as trained, on the runs' own text.
        Arguments: protocol and length, None for any; equal, a value for each further column, or None to accept any.
        """
        conditions = {"under": "", "text": "", "protocol": protocol, "length": length, **equal}
        cells = self.cells
        for column, value in conditions.items():
            cells = cells if value is None else cells[cells[column] == value]
        return cells


@dataclass(frozen=True)
class Plot:
    """A picture of the report as data: its kind, points, labels and caption."""

    name: str  # file name without its suffix
    kind: str  # how it is drawn: a key of `posbench.reporting.figures._KINDS`
    caption: str
    points: pd.DataFrame  # scheme, x, y, or the table that this kind of picture shows
    x_label: str = ""
    y_label: str = ""
    marks: pd.DataFrame | None = None  # scheme, x, y: points at which the lines of kind "panels" reach a level


@dataclass(frozen=True)
class Section:
    """A section of a report: a heading, lines about missing figures, pictures, a table and a note, all optional."""

    title: str  # empty if the section continues the previous one
    holes: Sequence[str] = ()
    plots: Sequence[Plot] = ()
    table: pd.DataFrame | None = None  # cells of text, one row per scheme
    note: str = ""
    latex: tuple[str, str] | None = None  # the table's file name and caption in LaTeX
    level: int = 2  # level of the heading
    is_last: bool = False  # whether it comes after the sections of all protocols that are not last
    files: Mapping[str, pd.DataFrame] = field(default_factory=dict)  # CSV files by their names


def joined(sections: Iterable[Section], schemes: Sequence[str]) -> list[Section]:
    """Return all sections of a report, with successive sections of the same title joined into one.

    Their tables are put side by side. Arguments: schemes, the order of the tables' rows.
    """
    joined_sections = []
    for _, group in groupby(sections, key=lambda section: section.title):
        first, *later = group
        for section in later:
            tables = [table.set_index("scheme") for table in (first.table, section.table) if table is not None]
            table = pd.concat(tables, axis=1) if tables else None
            if table is not None:
                table = table.reindex([scheme for scheme in schemes if scheme in table.index]).fillna(DASH)
            first = replace(
                first,
                holes=[*first.holes, *section.holes],
                plots=[*first.plots, *section.plots],
                table=None if table is None else table.rename_axis("scheme").reset_index(),
                note=first.note + section.note,
                files={**first.files, **section.files},
                latex=first.latex or section.latex,
            )
        joined_sections.append(first)
    return joined_sections


def text_table(rows: list[dict[str, str]]) -> pd.DataFrame:
    """Return a table of text, with dashes for missing values. Arguments: rows, {column: text} for each table row."""
    return pd.DataFrame(rows, dtype=object).fillna(DASH)


def by_distance(cells: pd.DataFrame, schemes: Sequence[str], title: str) -> pd.DataFrame:
    """Return a table of text with one row per scheme and one column per distance.

    Arguments: cells, a row per scheme and distance, with columns scheme, first (distance) and value; schemes, the order
    of the table's rows; title, a column's title with {} for the distance.
    """
    rows = []
    for scheme in [scheme for scheme in schemes if scheme in set(cells["scheme"])]:
        places = cells[cells["scheme"] == scheme].sort_values("first")
        values = zip(places["first"], places["value"], strict=True)
        rows.append({"scheme": scheme} | {title.format(d): number(value, sign=True) for d, value in values})
    return text_table(rows)


def half(cell: Any, name: str) -> float:
    """Return half the width of the 95 % interval over seeds of the figure in column `name`; NaN if `cell` is None.

    Arguments: cell, the figures of one scheme at one place: a row of the table of all figures, or None.
    """
    return math.nan if cell is None else float(cell[f"{name}_high"] - cell[f"{name}_low"]) / 2


def with_interval(cell: Any, name: str, sign: bool = False) -> str:
    """Return the figure in column `name` as text, ± half its 95 % interval over seeds; a dash if `cell` is None.

    Arguments: cell, the figures of one scheme at one place: a row of the table of all figures, or None; sign, whether
    to write a plus before positive values.
    """
    return DASH if cell is None else plus_minus(cell[name], half(cell, name), sign)


def curves(paths: Iterable[str], kind: str, figures: Sequence[str]) -> pd.DataFrame:
    """Return what runs logged during training, as a table with columns path, step, tokens and `figures`.

    All points of a run were scored on the same validation tokens, windows or problems.
    Arguments: paths, run folders; kind, which lines of metrics.jsonl to read, such as `validation`; figures, the names
    of the numbers in them.
    """
    rows = []
    for path in paths:
        points = {row["step"]: row for row in reversed(run_at(path).logged) if row["kind"] == kind}
        rows += [{"path": path, **points[step]} for step in sorted(points)]
    numbers = ["step", "tokens", *figures]
    return pd.DataFrame(rows, columns=["path", *numbers]).astype(dict.fromkeys(numbers, float))


def crossing(places: Any, values: Any, goal: float) -> float:
    """Return where a curve first falls to `goal`, interpolated linearly between its points; infinity if it never does.

    Arguments: places and values, the coordinates of its points, x and y.
    """
    x, y = np.asarray(places), np.asarray(values)
    reached = np.flatnonzero(y <= goal)
    if not len(reached):
        return math.inf
    n = reached[0]
    return float(x[n] if n == 0 else x[n - 1] + (x[n] - x[n - 1]) * (y[n - 1] - goal) / (y[n - 1] - y[n]))
