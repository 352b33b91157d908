"""Make the page about tasks: which schemes learn which, and up to which length they stay accurate."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd

from posbench.analysis.search import choose_rates
from posbench.analysis.table import config_of
from posbench.analysis.tasks import KEPT, TaskScores, measure
from posbench.config.units import count_of, number, short_count
from posbench.evaluation.protocols import PROTOCOLS
from posbench.evaluation.protocols.section import Format, Plot, Section, Table
from posbench.reporting.page import Page, paragraph, prose
from posbench.reporting.sections import rate_table
from posbench.reporting.setup import continued, setup
from posbench.reporting.text import group_text

TWO_DIGITS = Format(digits=2)
Tasks = Mapping[str, TaskScores]  # name of a task -> its scores


def tasks_page(runs: pd.DataFrame, notes: list[str], rows: pd.DataFrame, group_by: str | None) -> Page:
    """Return the page about the tasks of these runs.

    Arguments: runs, a row per run; notes, lines about runs that are left out; rows, the tidy table; group_by, a setting
    such as train.lr: the report is then one table with a column per value of it.
    """
    names = ", ".join(dict.fromkeys(config_of(path)["experiment"]["name"] for path in _first_paths(runs)))
    lede, notes, sections, files = _lede(runs), list(notes), list[Section](), dict[str, pd.DataFrame]()
    if group_by:
        groups = {group_text(value): measure(of, rows, notes, group_by) for value, of in runs.groupby(group_by)}
        tasks: Tasks = {}  # the paragraph and the numbers of --json are not about groups
        note = (
            "Median accuracy over all seeds, at the longest trained length → at twice that length. Rates are chosen "
            "only by the loss at trained lengths."
        )
        sections += [Section("", note=note), Section("", table=by_table(groups))]
    # Without groups, each scheme is shown at its best rate.
    else:
        runs, searches = _at_best_rates(runs)
        tasks = measure(runs, rows, notes)
        groups = {"": tasks}  # one group, of all runs
        sections += summary_sections(tasks)
        for scores in tasks.values():
            sections += [*task_sections(scores), *sections_of_protocols(scores, runs)]
        if searches:
            sections += rate_sections(searches)
            files["rates.csv"] = pd.concat(search.table.assign(data=name) for name, search in searches.items())
    seeds = sorted(set(runs["seed"]))
    title = f"{names} by {group_by}" if group_by else names
    return Page(
        title=title,
        lede=lede,
        paragraph=paragraph("tasks_paragraph", list(tasks.values()), seeds, continued(runs)),
        sections=sections,
        runs=runs,
        setup=setup(runs),
        notes=notes,
        numbers=numbers(tasks),
        files={"accuracy.csv": accuracies(groups), **files},
        closing="All numbers are in accuracy.csv (a row per seed and length) and runs.csv; columns.csv explains their "
        "columns.",
    )


def _first_paths(runs: pd.DataFrame) -> list[str]:
    # The path of each task's first run.
    return runs.groupby("data.name", sort=False)["path"].first().to_list()


def _lede(runs: pd.DataFrame) -> str:
    counted = {"scheme": "position scheme", "data.name": "task", "seed": "seed"}
    counts = ", ".join(count_of(runs[name].nunique(), noun) for name, noun in counted.items())
    parameters, tokens = (short_count(runs[name].median()) for name in ("parameters", "tokens"))
    return (
        f"{counts}; models of {parameters} parameters after {tokens} tokens. Accuracy is the share of answers right; "
        "lengths are in items."
    )


def _at_best_rates(runs: pd.DataFrame) -> tuple[pd.DataFrame, dict[str, Any]]:
    # Return the runs at each scheme's best rate by task, and the learning-rate search of each task that has one.
    parts, searches = [], {}
    for name, of_task in runs.groupby("data.name", sort=False):
        # Each task has a search of its own.
        at_best, search = choose_rates(of_task)
        parts.append(at_best)
        if search:
            searches[str(name)] = search
    return pd.concat(parts), searches


def numbers(tasks: Tasks) -> list[dict[str, Any]]:
    """Return the numbers of the first table for `posbench report --json`, a dict per task and scheme."""
    rows = []
    for t in tasks.values():
        for scheme in t.schemes:
            seeds: Any = t.learners.loc[scheme]
            row = {"task": t.name, "scheme": scheme, "seeds": int(seeds["seeds"]), "learnt": int(seeds["learnt"])}
            # accurate_to is in items. Infinite: at every tested length; NaN: no seed learnt the task.
            rows.append({**row, "accurate_to": t.limits.get(scheme, math.nan), "trained_to": t.trained})
    return rows


def accuracies(groups: Mapping[str, Tasks]) -> pd.DataFrame:
    """Return all scores, a row per group, task, scheme, seed, evaluation option and length."""
    parts = []
    for value, tasks in groups.items():
        for t in tasks.values():
            parts.append(t.scores.assign(data=t.name, chance=t.chance, trained=t.trained, group=value))
    return pd.concat(parts)


# ---------------------------------------------------------------- all tasks


def summary_sections(tasks: Tasks) -> list[Section]:
    """Return the first sections: the length up to which each scheme stays accurate, for all tasks."""
    table = summary_table(tasks)
    latex = ("summary", f"Length at which accuracy falls below {KEPT}, items.")
    plots = [summary_map(tasks, table)] if len(tasks) > 1 else []
    return [Section("", plots=plots, note=prose("tasks_summary", KEPT)), Section("", table=table, latex=latex)]


def summary_table(tasks: Tasks) -> Table:
    """Return a row per scheme and a column per task: the length up to which the scheme stays accurate.

    If not all seeds learnt the task, their number is in brackets: `≥64 (2/3)`.
    """
    schemes = set(chain.from_iterable(t.schemes for t in tasks.values()))
    rows = []
    for scheme in sorted(schemes, key=lambda scheme: sort_key(tasks, scheme)):
        row = {"scheme": scheme}
        for t in tasks.values():
            row[_title(t)] = _limit(t, scheme) if scheme in t.learners.index else ""  # "" if it has no run of the task
        rows.append(row)
    return Table.of(rows)


def _title(t: TaskScores) -> str:
    return t.name.replace("_", " ")


def _limit(t: TaskScores, scheme: str) -> str:
    # The number of seeds is shown only if not all have learnt the task.
    seeds = t.learners.loc[scheme]
    if seeds["learnt"] == seeds["seeds"]:
        return t.limit_text(scheme)
    return f"{t.limit_text(scheme)} ({t.learnt_text(scheme)})"


def sort_key(tasks: Tasks, scheme: str) -> tuple[float, str]:
    """Return a key that sorts schemes by the length up to which they stay accurate, mean over tasks."""
    # Lengths are multiples of each task's trained length, so that tasks weigh alike; 0 for a task that was not learnt.
    multiples = []
    for t in tasks.values():
        is_learnt = scheme in t.limits
        multiples.append(t.kept_to(scheme) / t.trained if is_learnt else 0.0)
    return -float(np.mean(multiples)), scheme


def summary_map(tasks: Tasks, table: Table) -> Plot:
    """Return a picture of coloured cells, schemes by tasks: the length up to which each scheme stays accurate."""
    greatest_multiple = max(t.lengths[-1] / t.trained for t in tasks.values())
    points = []
    for row in table.frame.to_dict("records"):
        for t in tasks.values():
            scheme, shade = row["scheme"], math.nan
            # The length as a multiple of the trained one, on a log scale; 0.1 keeps learnt tasks apart from white
            # cells.
            if scheme in t.limits:
                shade = 0.1 + 0.9 * math.log2(t.kept_to(scheme) / t.trained) / math.log2(greatest_multiple)
            column = f"{_title(t)}\ntrained: {t.trained}"
            points.append({"row": scheme, "column": column, "shade": shade, "text": row[_title(t)]})
    caption = (
        "Length up to which single answers (letters, bits, pairs) stay right, each after the true ones before it; not "
        "whole problems. Darker: a larger multiple of the trained length, which stands below the task's name."
    )
    x_label = f"length at which the share of right letters, bits\nor pairs falls below {KEPT}; not of whole problems"
    return Plot("summary", "cells", caption, pd.DataFrame(points).assign(panel="", note=""), x_label)


def rate_sections(searches: Mapping[str, Any]) -> list[Section]:
    """Return the section on the losses at all learning rates that were tried, by task."""
    frames: list[pd.DataFrame] = []
    formats: dict[str, Format] = {}
    for name, search in searches.items():
        table = rate_table(search)
        frames.append(table.frame.assign(task=name))
        formats |= table.formats
    return [Section("Learning rates", table=Table(pd.concat(frames), formats), note=prose("tasks_rates"))]


def by_table(groups: Mapping[str, Tasks]) -> Table:
    """Return the median accuracy over all seeds: a row per scheme and task, a column per group of runs.

    A cell reads `at the trained length → at twice that length`, or at the next longer one tested.
    """
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for value, tasks in groups.items():
        for t in tasks.values():
            # The longest tested length, if none is twice the trained one.
            length_beyond = next((n for n in t.lengths if n >= 2 * t.trained), t.lengths[-1])
            as_trained = t.scores[t.scores["under"] == ""]
            medians = as_trained.groupby(["scheme", "length"])["accuracy"].median()
            for scheme in t.schemes:
                texts = [number(medians.get((scheme, n), math.nan), 2) for n in (t.trained, length_beyond)]
                row = rows.setdefault((t.name, scheme), {"scheme": scheme, "task": t.name})
                row[value] = " → ".join(texts)
    return Table.of(list(rows.values()))


# ---------------------------------------------------------------- one task


def task_sections(t: TaskScores) -> list[Section]:
    """Return the sections about one task."""
    sections = [Section(t.name, plots=[task_map(t)], note=prose("task", t, KEPT)), Section("", table=task_table(t))]
    if len(t.option_scores):
        sections.append(Section("", plots=[option_maps(t)]))
    return sections


def sections_of_protocols(t: TaskScores, runs: pd.DataFrame) -> list[Section]:
    """Return what protocols show about one task. Arguments: runs, a row per run."""
    of_task = runs[runs["data.name"] == t.name]
    sections: list[Section] = []
    for protocol in PROTOCOLS.values():
        sections += protocol.task_sections(t.name, of_task, t.schemes, t.trained)
    return sections


def task_table(t: TaskScores) -> Table:
    """Return a row per scheme: seeds that learnt, longest accurate length, steps, and accuracy by length.

    Steps are the median number after which seeds had learnt, and accuracy is the median of these seeds.
    """
    steps = t.steps.groupby("scheme")["steps"].median()
    frame = pd.DataFrame({"scheme": t.schemes})
    frame["learnt"] = [t.learnt_text(scheme) for scheme in t.schemes]
    frame[f"below {KEPT}"] = [t.limit_text(scheme) for scheme in t.schemes]
    frame["steps"] = frame["scheme"].map(steps)
    formats = {"steps": Format("count")}
    for length in t.lengths:
        title = str(length)
        if length == t.trained:
            title += " (trained)"
        frame[title] = frame["scheme"].map(t.medians.get(length, pd.Series(dtype=float)))
        formats[title] = TWO_DIGITS
    return Table(frame, formats)


def task_map(t: TaskScores) -> Plot:
    """Return a picture of coloured cells, schemes by lengths: the median accuracy of the seeds that learnt."""
    points = _cells(t, t.medians.reindex(index=t.schemes, columns=t.lengths))
    notes = {scheme: f"{t.learnt_text(scheme)} learnt" for scheme in t.limits}
    points["note"] = points["row"].map(notes).fillna("not learnt")
    seeds = t.scores[t.scores["under"] == ""]
    marks = pd.DataFrame({"row": seeds["scheme"], "column": seeds["length"].map(str)})
    # A dot per seed is further right for a higher accuracy, from chance (left) to 1.
    marks = marks.assign(share=t.share(seeds["accuracy"]), is_filled=seeds["learnt"])
    caption = (
        "Median accuracy by length, over the seeds that learnt. A dot is a seed, from chance at the left of a cell to "
        "1 at its right; open: it has not learnt."
    )
    x_label = f"length, items (trained up to {t.trained}, the line; chance {t.chance:.2g}: white)"
    line = t.lengths.index(t.trained) + 1  # after the column of the trained length
    return Plot(f"task-{t.name}", "cells", caption, points, x_label, marks=marks, line=line)


def option_maps(t: TaskScores) -> Plot:
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
    return option.partition("=")[0], [float(text) for text in re.findall(r"[0-9.]+", option)]


def _cells(t: TaskScores, accuracy: pd.DataFrame) -> pd.DataFrame:
    # Return a picture's cells, shaded from chance (white) to 1. Arguments: accuracy, the value of each cell.
    points = []
    for row, values in accuracy.iterrows():
        for column, value in values.items():
            cell = {"row": str(row), "column": str(column), "shade": t.share(value), "text": number(value, 2)}
            points.append({"panel": "", **cell, "note": ""})
    return pd.DataFrame(points)
