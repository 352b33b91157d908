"""Write the report of tasks: its tables and its pictures."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from posbench.analysis.search import choose_rates
from posbench.analysis.table import config_of
from posbench.analysis.tasks import KEPT, TaskScores, measure
from posbench.config.units import DASH, count_of, number, short_count
from posbench.evaluation.protocols import PROTOCOLS
from posbench.evaluation.protocols.section import text_table
from posbench.reporting import tables
from posbench.reporting.figures import INK, WIDTH, new_figure, style
from posbench.reporting.figures import draw_all as draw_sections


def content_of_tasks(
    runs: pd.DataFrame, rows: pd.DataFrame, group_by: str | None, notes: list[str]
) -> tuple[dict[str, Any], dict[str, pd.DataFrame]]:
    """Return the values that fill the templates of a report of tasks, and the tables to write as CSV, by file name.

    Arguments: runs, a row per run; rows, the tidy table, a row per scored window and metric; group_by, a setting such
    as train.lr: the report is then one table with a column per value of it; notes gets a line for everything that is
    left out.
    """
    counted = {"scheme": "position scheme", "data.name": "task", "seed": "seed"}
    counts = ", ".join(count_of(runs[name].nunique(), noun) for name, noun in counted.items())
    parameters, tokens = (short_count(runs[name].median()) for name in ("parameters", "tokens"))
    configs = map(config_of, runs.groupby("data.name", sort=False)["path"].first())
    names = ", ".join(dict.fromkeys(config["experiment"]["name"] for config in configs))
    rates: list[pd.DataFrame] = []
    tried: list[pd.DataFrame] = []
    if not group_by:
        chosen = {name: choose_rates(of_task) for name, of_task in runs.groupby("data.name", sort=False)}
        runs = pd.concat([at_best for at_best, _ in chosen.values()])
        for name, (_, search) in chosen.items():
            if search:
                rates.append(tables.rate_table(search).assign(task=str(name)))
                tried.append(search.table.assign(data=str(name)))
    grouped = runs.groupby(group_by or (lambda _: ""))
    groups = {value: measure(group, rows, notes, group_by or "") for value, group in grouped}
    tasks = {} if group_by else groups[""]
    summary = by_table(groups) if group_by else summary_table(tasks)
    sections = {
        t.name: [
            section
            for protocol in PROTOCOLS.values()
            for section in protocol.task_sections(t.name, runs[runs["data.name"] == t.name], t.schemes, t.trained)
        ]
        for t in tasks.values()
    }
    brought = list(chain.from_iterable(sections.values()))
    files = {name: [s.files[name] for s in brought if name in s.files] for s in brought for name in s.files}
    scores = [
        t.scores.assign(data=t.name, chance=t.chance, trained=t.trained, group=tables.text_of(value))
        for value, scored_tasks in groups.items()
        for t in scored_tasks.values()
    ]
    return {
        "page": "tasks.md.j2",
        "paragraph": "tasks_conclusions.j2",
        "names": f"{names} by {group_by}" if group_by else names,
        "lede": f"{counts}; models of {parameters} parameters after {tokens} tokens. Accuracy is the share of answers "
        "right; lengths are in items.",
        "KEPT": KEPT,
        "group_by": group_by,
        "tasks": list(tasks.values()),
        "seeds": sorted(set(runs["seed"])),
        "tables": {
            "summary": summary,
            "rates": pd.concat(rates) if rates else None,
            **{t.name: task_table(t) for t in tasks.values()},
        },
        "sections": sections,
        "figures": draw_all(tasks) | draw_sections(None, brought),
        "notes": notes,
        "numbers": [
            {
                "task": t.name,
                "scheme": scheme,
                **{name: int(t.learners[name][scheme]) for name in ("seeds", "learnt")},
                "accurate_to": t.limits.get(scheme, math.nan),  # items; infinite: at every tested length
                "trained_to": t.trained,
            }
            for t in tasks.values()
            for scheme in t.schemes
        ],
        "latex": {"summary": (summary, f"Length at which accuracy falls below {KEPT}, items.")},
    }, {
        "accuracy.csv": pd.concat(scores),
        **({"rates.csv": pd.concat(tried)} if tried else {}),
        **{name: pd.concat(frames) for name, frames in files.items()},
    }


def summary_table(tasks: Mapping[str, TaskScores]) -> pd.DataFrame:
    """Return a row per scheme and a column per task: the length up to which the scheme stays accurate.

    If not all seeds learnt the task, their number is in brackets: `≥64 (2/3)`. Arguments: tasks, {name of a task: its
    scores}.
    """
    rows = []
    for scheme in sorted({s for t in tasks.values() for s in t.schemes}, key=lambda s: sort_key(tasks, s)):
        row = {"scheme": scheme} | {t.name.replace("_", " "): "" for t in tasks.values()}
        for t in tasks.values():
            if scheme in t.learners.index:
                all_learnt = t.learners["learnt"][scheme] == t.learners["seeds"][scheme]
                text = t.limit_text(scheme) if all_learnt else f"{t.limit_text(scheme)} ({t.learnt_text(scheme)})"
                row[t.name.replace("_", " ")] = text
        rows.append(row)
    return text_table(rows)


def sort_key(tasks: Mapping[str, TaskScores], scheme: str) -> tuple[float, str]:
    """Return a key that sorts schemes by the length up to which they stay accurate, mean over tasks, longest first.

    Lengths are multiples of each task's trained length, 0 for a task that was not learnt. Arguments: tasks, {name of a
    task: its scores}.
    """
    multiples = [t.kept_to(scheme) / t.trained if scheme in t.limits else 0.0 for t in tasks.values()]
    return -float(np.mean(multiples)), scheme


def task_table(t: TaskScores) -> pd.DataFrame:
    """Return a row per scheme: seeds that learnt the task, longest accurate length, steps, and accuracy by length.

    Steps are the median number after which seeds had learnt, and accuracy is the median of these seeds.
    Arguments: t, the task's scores.
    """
    rows = []
    for scheme in t.schemes:
        steps = t.steps.loc[t.steps["scheme"] == scheme, "steps"].median()
        row = {"scheme": scheme, "learnt": t.learnt_text(scheme), f"below {KEPT}": t.limit_text(scheme)}
        row["steps"] = tables.count_text(steps)
        if scheme in t.medians.index:
            row |= {length_title(t, n): number(t.medians.loc[scheme].get(n, math.nan), 2) for n in t.lengths}
        rows.append(row)
    return text_table(rows).reindex(
        columns=["scheme", "learnt", f"below {KEPT}", "steps", *(length_title(t, n) for n in t.lengths)],
        fill_value=DASH,
    )


def length_title(t: TaskScores, length: int) -> str:
    return f"{length} (trained)" if length == t.trained else str(length)


def by_table(groups: Mapping[Any, Mapping[str, TaskScores]]) -> pd.DataFrame:
    """Return the median accuracy over all seeds: a row per scheme and task, a column per group of runs.

    A cell has the accuracy `at the trained length → beyond it`. Beyond means twice the trained length, or the next
    longer length that was tested.
    Arguments: groups, {value that a group of runs shares: {task: its scores}}.
    """
    names = dict.fromkeys((t.name, scheme) for tasks in groups.values() for t in tasks.values() for scheme in t.schemes)
    rows = []
    for name, scheme in names:
        row = {"scheme": scheme, "task": name}
        for value, tasks in groups.items():
            if name in tasks and scheme in tasks[name].learners.index:
                t = tasks[name]
                beyond = next((n for n in t.lengths if n >= 2 * t.trained), t.lengths[-1])
                scores = t.scores[(t.scores["scheme"] == scheme) & (t.scores["under"] == "")]
                medians = scores.groupby("length")["accuracy"].median()
                texts = [number(medians.get(n, math.nan), 2) for n in (t.trained, beyond)]
                row[tables.text_of(value)] = " → ".join(texts)
        rows.append(row)
    return text_table(rows)


def draw_all(tasks: Mapping[str, TaskScores]) -> dict[str, Figure]:
    """Draw a figure of each task, one of its evaluation options if scored, and a summary if there are several tasks.

    Arguments: tasks, {name of a task: its scores}. Returns: {file name without suffix: figure}.
    """
    with style():
        figures = {"summary": summary_map(tasks)} if len(tasks) > 1 else {}
        for t in tasks.values():
            figures[f"task-{t.name}"] = task_map(t)
            if len(t.option_scores):
                figures[f"options-{t.name}"] = option_maps(t)
    return figures


def task_map(t: TaskScores) -> Figure:
    """Return a figure of coloured cells, schemes by lengths: the median accuracy of the seeds that learnt the task.

    A dot per seed in each cell is further right for a higher accuracy, from chance (left) to 1. Arguments: t, the
    task's scores.
    """
    schemes, lengths = t.schemes, t.lengths
    figure, (axes,) = new_figure(0.8 + 0.42 * len(schemes), width=min(WIDTH, 2.6 + 0.85 * len(lengths)))
    _cells(axes, t, t.medians.reindex(index=schemes, columns=lengths))
    seeds = t.scores[t.scores["under"] == ""]
    x = seeds["length"].map(lengths.index) + 0.08 + 0.84 * t.share(seeds["accuracy"])
    y = seeds["scheme"].map(schemes.index) + 0.84
    for learnt, fill in ((False, "none"), (True, INK)):
        is_shown = seeds["learnt"] == learnt
        axes.plot(x[is_shown], y[is_shown], "o", markersize=3, color=INK, markerfacecolor=fill, markeredgewidth=0.5)
    for row, scheme in enumerate(schemes):
        text = f"{t.learnt_text(scheme)} learnt" if scheme in t.limits else "not learnt"
        axes.text(len(lengths) + 0.1, row + 0.5, text, va="center", fontsize=8)
    axes.axvline(lengths.index(t.trained) + 1, color=INK, linewidth=1.2)
    axes.set_xlabel(f"length, items (trained up to {t.trained}, the line; chance {t.chance:.2g}: white)")
    return figure


def summary_map(tasks: Mapping[str, TaskScores]) -> Figure:
    """Return a figure of coloured cells, schemes by tasks: the length up to which each scheme stays accurate.

    The colour is this length as a multiple of the trained length. Arguments: tasks, {name of a task: its scores}.
    """
    texts = summary_table(tasks).set_index("scheme")
    scored = list(tasks.values())
    multiples = [[t.kept_to(s) / t.trained if s in t.limits else math.nan for t in scored] for s in texts.index]
    most = max(t.lengths[-1] / t.trained for t in scored)
    figure, (axes,) = new_figure(0.8 + 0.3 * len(texts), width=min(WIDTH, 2.2 + len(scored)))
    _shade(axes, 0.1 + 0.9 * np.log2(multiples) / math.log2(most), texts.to_numpy().tolist(), texts)
    axes.set_xticklabels([f"{title}\ntrained: {t.trained}" for title, t in zip(texts, scored, strict=True)])
    axes.xaxis.tick_top()
    axes.set_xlabel(
        f"length at which the share of right letters, bits\nor pairs falls below {KEPT}; not of whole problems"
    )
    return figure


def option_maps(t: TaskScores) -> Figure:
    """Return a figure with a panel per scheme: coloured cells of median accuracy, evaluation options by lengths.

    Only seeds that learnt the task count. Arguments: t, the task's scores.
    """
    scores = t.option_scores
    schemes, lengths = [s for s in t.schemes if s in set(scores["scheme"])], sorted(set(scores["length"]))
    options = sorted(
        set(scores["under"]), key=lambda text: (text.partition("=")[0], [*map(float, re.findall(r"[0-9.]+", text))])
    )
    figure, panels = new_figure(
        0.6 + (0.5 + 0.26 * len(options)) * len(schemes), rows=len(schemes), width=min(WIDTH, 2.6 + 0.85 * len(lengths))
    )
    for axes, scheme in zip(panels, schemes, strict=True):
        medians = scores[scores["scheme"] == scheme].pivot_table(
            index="under", columns="length", values="accuracy", aggfunc="median"
        )
        _cells(axes, t, medians.reindex(index=options, columns=lengths))
        axes.set_title(scheme)
    panels[-1].set_xlabel("length, items")
    return figure


def _cells(axes: Axes, t: TaskScores, accuracy: pd.DataFrame) -> None:
    """Draw cells of accuracy with their numbers, shaded from chance (white) to 1.

    Arguments: t, the task's scores, for the level of chance; accuracy, a table whose index and columns name the cells.
    """
    values = accuracy.to_numpy(dtype=float)
    _shade(axes, t.share(values), [[number(v, 2) for v in row] for row in values], accuracy)


def _shade(axes: Axes, shades: Any, texts: Sequence[Sequence[str]], labels: pd.DataFrame) -> None:
    """Draw a grid of cells with a text in each, coloured from 0 (white) to 1.

    Arguments: shades [rows, columns], a number per cell, NaN for no colour; texts, of the cells, by row; labels, a
    table whose index and columns name the rows and columns of cells.
    """
    axes.pcolormesh(
        shades, cmap="Blues", vmin=0, vmax=1.8, edgecolor="white", linewidth=1.5
    )  # vmax 1.8 keeps cells light enough for dark text
    axes.invert_yaxis()
    for y, x in np.ndindex(np.shape(shades)):
        axes.text(x + 0.5, y + 0.5, texts[y][x], ha="center", va="center", fontsize=8, color=INK)
    axes.set_xticks(np.arange(len(labels.columns)) + 0.5, list(map(str, labels.columns)))
    axes.set_yticks(np.arange(len(labels.index)) + 0.5, list(map(str, labels.index)))
    axes.grid(visible=False)
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
