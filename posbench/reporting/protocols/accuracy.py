"""Show how accurate schemes stay on a task: a table and pictures by length in items."""

from __future__ import annotations

import re

import pandas as pd

from posbench.analysis.comparison import Comparison
from posbench.analysis.tasks import KEPT, TaskComparison
from posbench.config.units import number
from posbench.reporting.page import prose
from posbench.reporting.section import Format, Plot, Section, Table

TWO_DIGITS = Format(digits=2)


def sections(t: Comparison) -> list[Section]:
    """Return the section about a task, and one on options changed at evaluation; [] if `t` compares no task."""
    if not isinstance(t, TaskComparison):
        return []
    plots = [task_map(t)]
    if len(t.option_scores):
        plots.append(option_maps(t))
    return [Section(t.name, plots=plots, table=task_table(t), note=prose("task", t, KEPT))]


def task_table(t: TaskComparison) -> Table:
    """Return a row per scheme: seeds that learnt, longest accurate length, steps, and accuracy by length.

    Steps are the median number after which seeds had learnt, and accuracy is the median of these seeds.
    """
    frame = pd.DataFrame({"scheme": t.schemes})
    frame["learnt"] = [t.learnt_text(scheme) for scheme in t.schemes]
    frame[f"below {KEPT}"] = [t.limit_text(scheme) for scheme in t.schemes]
    frame["steps"] = frame["scheme"].map(t.steps.groupby("scheme")["steps"].median())
    formats = {"steps": Format("count")}
    for length in t.lengths:
        title = str(length)
        if length == t.trained:
            title += " (trained)"
        frame[title] = frame["scheme"].map(t.medians.get(length, pd.Series(dtype=float)))
        formats[title] = TWO_DIGITS
    return Table(frame, formats)


def task_map(t: TaskComparison) -> Plot:
    """Return a picture of coloured cells, schemes by lengths: the median accuracy of the seeds that learnt."""
    points = _cells(t, t.medians.reindex(index=t.schemes, columns=t.lengths))
    notes = {scheme: f"{t.learnt_text(scheme)} learnt" for scheme in t.limits}
    points["note"] = [notes.get(scheme, "not learnt") for scheme in points["row"]]
    seeds = t.scores[t.scores["under"] == ""]
    marks = pd.DataFrame({"row": seeds["scheme"], "column": seeds["length"].map(str)})
    # A dot per seed is further right for a higher accuracy, from chance (left) to 1.
    marks = marks.assign(share=t.share(seeds["accuracy"]), is_filled=seeds["learnt"])
    caption = (
        "Median accuracy by length, over the seeds that learnt. A dot is a seed, from chance at the left of a cell to "
        "1 at its right; open: it has not learnt."
    )
    x_label = f"length, items (trained up to {t.trained}, the line; chance {t.chance:.2g}: clear)"
    line = t.lengths.index(t.trained) + 1  # after the column of the trained length
    return Plot(f"task-{t.name}", "cells", caption, points, x_label, marks=marks, line=line)


def option_maps(t: TaskComparison) -> Plot:
    """Return a picture with a panel per scheme: median accuracy of seeds that learnt, evaluation options by lengths."""
    scores = t.option_scores
    lengths, options = sorted(set(scores["length"])), sorted(set(scores["under"]), key=_by_number)
    panels = []
    for scheme in t.schemes:
        of_scheme = scores[scores["scheme"] == scheme]
        if len(of_scheme):
            medians = of_scheme.pivot_table(index="under", columns="length", values="accuracy", aggfunc="median")
            panels.append(_cells(t, medians.reindex(index=options, columns=lengths)).assign(panel=scheme))
    caption = "Median accuracy by length, with options changed for evaluation."
    return Plot(f"options-{t.name}", "cells", caption, pd.concat(panels), "length, items")


def _by_number(option: str) -> tuple[str, list[float]]:
    # A sort key: by name, then by the numbers in the value, so that 10 comes after 9.
    return option.partition("=")[0], [float(text) for text in re.findall(r"\d+(?:\.\d+)?", option)]


def _cells(t: TaskComparison, accuracy: pd.DataFrame) -> pd.DataFrame:
    # Return a picture's cells, shaded from chance (clear) to 1. Arguments: accuracy, the value of each cell.
    points = []
    for row, values in accuracy.iterrows():
        for column, value in values.items():
            cell = {"row": str(row), "column": str(column), "shade": t.share(value), "text": number(value, 2)}
            points.append({"panel": "", **cell, "note": ""})
    return pd.DataFrame(points)
