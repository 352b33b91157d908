"""The report of tasks: who learns which, and up to which length it is kept.

A seed has learnt a task or it has not, and a mean over both kinds says nothing of either. So beyond the trained lengths
a figure is the median over the seeds that learnt, with their number beside it. What no seed learnt is not ranked.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from posbench.config import ConfigError
from posbench.config.units import DASH, count_of, number, short_count
from posbench.evaluation.protocols import ACCURACY, PROTOCOLS
from posbench.evaluation.protocols.section import crossing, curves, text_table
from posbench.reporting import tables
from posbench.reporting.comparison import check_agreement
from posbench.reporting.figures import INK, WIDTH, new_figure, style
from posbench.reporting.figures import draw_all as draw_sections
from posbench.reporting.table import config_of, rates
from posbench.runs import UNREADABLE
from posbench.runs.results import MARKS

KEPT = 0.9  # share of the way from chance to 1 above which a task counts as kept
PLACE = ["scheme", "seed", "under", "length"]


@dataclass(frozen=True)
class TaskScores:
    """The runs of one task and what they say."""

    name: str
    chance: float
    goal: float  # the accuracy at the longest trained length from which a seed has learnt the task
    trained: int  # the longest trained length, items
    scores: pd.DataFrame  # a row for each scheme, seed, option of the evaluation and length: accuracy, exact, learnt
    steps: pd.DataFrame  # of the seeds that learnt: scheme, seed, steps until they had

    @cached_property
    def learners(self) -> pd.DataFrame:
        """A row a scheme: `learnt` seeds of how many `seeds`."""
        seeds = self.scores.drop_duplicates(["scheme", "seed"]).groupby("scheme")
        return seeds.agg(learnt=("learnt", "sum"), seeds=("learnt", "size"))

    @cached_property
    def medians(self) -> pd.DataFrame:
        """Accuracy over the seeds that learnt: a row a scheme that has any, a column a length."""
        of = self.scores[self.scores["learnt"] & (self.scores["under"] == "")]
        return of.pivot_table(index="scheme", columns="length", values="accuracy", aggfunc="median")

    @property
    def under_options(self) -> pd.DataFrame:
        """The scores of the seeds that learnt, under options that held at evaluation only."""
        return self.scores[self.scores["learnt"] & ~self.scores["under"].isin(["", *MARKS])]

    @cached_property
    def limits(self) -> dict[str, float]:
        """Scheme -> the length at which its median falls below KEPT, from chance to 1; infinity: it never does."""
        limits = {}
        for scheme, accuracy in self.medians.iterrows():
            beyond = accuracy[accuracy.index >= self.trained].dropna()
            goal = self.chance + KEPT * (1 - self.chance)
            limits[str(scheme)] = crossing(beyond.index, beyond, goal - 1e-9)
        return limits

    @property
    def schemes(self) -> list[str]:
        """The furthest first, by name where none is further; then those that no seed learnt, by name."""
        learnt = sorted(
            self.limits, key=lambda s: (-self.kept_to(s), -self.limits[s], -self.medians.loc[s].iloc[-1], s)
        )
        return [*learnt, *sorted(set(self.learners.index) - set(learnt))]

    @property
    def furthest(self) -> list[str]:
        """The schemes that keep the task furthest: none where no seed learnt it."""
        kept = {scheme: self.kept_to(scheme) for scheme in self.schemes if scheme in self.limits}
        return [scheme for scheme in kept if kept[scheme] == max(kept.values())]

    @property
    def furthest_with_seeds(self) -> list[str]:
        """The same with the seeds that learnt of all, whose median it is: `alibi (2/3 seeds)`."""
        return [f"{scheme} ({self.learnt_text(scheme)} seeds)" for scheme in self.furthest]

    @property
    def not_learnt(self) -> list[str]:
        return [scheme for scheme in self.schemes if scheme not in self.limits]

    @property
    def is_kept(self) -> bool:
        """Whether some scheme keeps the task at every tested length."""
        return any(limit == math.inf and self.kept_to(s) == self.lengths[-1] for s, limit in self.limits.items())

    @property
    def lengths(self) -> list[int]:
        return sorted(set(self.scores["length"]))

    def share(self, accuracy: Any) -> Any:
        """Accuracy as a share of the way from chance to 1."""
        return np.clip((accuracy - self.chance) / (1 - self.chance), 0, 1)

    def limit_text(self, scheme: str) -> str:
        """`23`, `≥64`; a dash where no seed learnt."""
        if scheme not in self.limits:
            return DASH
        limit = self.limits[scheme]
        return str(int(limit)) if limit < math.inf else f"≥{self.kept_to(scheme)}"

    def kept_to(self, scheme: str) -> float:
        """The length up to which a scheme that learnt keeps the task, at most the longest it was tested at."""
        return min(self.limits[scheme], int(self.medians.loc[scheme].dropna().index.max()))

    def learnt_text(self, scheme: str) -> str:
        """`3/5`: seeds that learnt of all."""
        of = self.learners.loc[scheme]
        return f"{of['learnt']}/{of['seeds']}"


def measure(runs: pd.DataFrame, rows: pd.DataFrame, notes: list[str], by: str = "") -> dict[str, TaskScores]:
    """Name -> scores of each task of these runs. `notes` gets what was left out, and why.

    A run takes part where it was evaluated at its longest trained length, which shows whether it has learnt.
    Raises: ConfigError where the runs of a task differ in more than scheme and seed, or none takes part.
    """
    rows = rows[rows["run"].isin(runs.index) & (rows["protocol"] == ACCURACY.name) & (rows["at_step"] == 0)]
    trained = runs["data.lengths"].map(_longest)
    at_trained = rows[(rows["length"] == rows["run"].map(trained)) & (rows["under"] == "")]
    evaluated = runs[runs.index.isin(at_trained["run"])]
    if evaluated.empty:
        raise ConfigError("no run of a task has been evaluated here at its trained length: do it with `posbench eval`")
    for run in runs.assign(trained=trained).drop(evaluated.index).itertuples():
        notes.append(f"{run.path}: not evaluated at {run.trained} items, the longest trained length")
    scored = {}
    for name, of_task in evaluated.groupby("data.name", sort=False):
        check_agreement(of_task, by)
        own = rows[rows["run"].isin(of_task.index)]
        alike = own.groupby(["under", "length"], observed=True)["windows_digest"].transform("nunique") == 1
        if not alike.all():
            notes.append(
                f"{name} at {', '.join(map(str, sorted(set(own[~alike]['length']))))}: runs had other problems"
            )
        length = trained[of_task.index[0]]
        if not alike[(own["length"] == length) & (own["under"] == "")].all():
            raise ConfigError(
                f"the runs of {name} were scored on different problems at {length} items, the longest trained length: "
                "evaluate them with the same settings, or report them apart"
            )
        scored[str(name)] = _scores(str(name), of_task, own[alike])
    return scored


def _longest(lengths: str) -> int:
    """Of `[2, 16]`, trained lengths as the summary has them."""
    return int(json.loads(lengths)[1])


def _scores(name: str, runs: pd.DataFrame, rows: pd.DataFrame) -> TaskScores:
    """The scores of one task."""
    run = runs.iloc[0]
    sums = rows.groupby([*PLACE, "metric"], observed=True)[["value", "count"]].sum()
    scores = (sums["value"] / sums["count"]).unstack("metric").reset_index().astype({"scheme": str, "under": str})
    scores["problems"] = sums["count"].unstack("metric")["exact"].to_numpy()
    trained, chance, goal = _longest(run["data.lengths"]), float(run["chance"]), float(run["goal"])
    at_trained = scores[(scores["length"] == trained) & (scores["under"] == "")].set_index(["scheme", "seed"])
    learnt = at_trained["accuracy"] >= goal
    scores = scores.join(learnt.rename("learnt"), on=["scheme", "seed"]).fillna({"learnt": False})
    return TaskScores(
        name=name,
        chance=chance,
        goal=goal,
        trained=trained,
        scores=scores.astype({"learnt": bool}),
        steps=_steps_until_learnt(runs, learnt[learnt].index, goal),
    )


def _steps_until_learnt(runs: pd.DataFrame, learners: pd.Index, goal: float) -> pd.DataFrame:
    """Of each seed that learnt, the step at which accuracy on the validation problems rose to `goal`."""
    of_learners = runs[runs.set_index(["scheme", "seed"]).index.isin(learners)]
    found = []
    for run in of_learners.to_dict("records"):
        curve = curves([run["path"]], "validation", ["accuracy"])
        found.append((run["scheme"], run["seed"], crossing(curve["step"], 1 - curve["accuracy"], 1 - goal)))
    return pd.DataFrame(found, columns=["scheme", "seed", "steps"])


def is_of_tasks(summary: pd.DataFrame) -> bool:
    """Whether these runs learn tasks. Raises: ConfigError where only some of them do."""
    readable = summary[summary["status"] != UNREADABLE]
    on_task = readable.get("data.source", readable["scheme"]) == "task"
    if on_task.any() and not on_task.all():
        raise ConfigError("some of these runs learn a task and others read text: report each kind alone")
    return bool(on_task.any())


def content_of_tasks(
    runs: pd.DataFrame, rows: pd.DataFrame, by: str | None, notes: list[str]
) -> tuple[dict[str, Any], dict[str, pd.DataFrame]]:
    """What the template is filled with, and the CSV files.

    Arguments: by, a setting that runs are grouped by, such as train.lr: then one table has a column a value of it.
    """
    counted = {"scheme": "position scheme", "data.name": "task", "seed": "seed"}
    counts = ", ".join(count_of(runs[name].nunique(), what) for name, what in counted.items())
    parameters, tokens = (short_count(runs[name].median()) for name in ("parameters", "tokens"))
    configs = map(config_of, runs.groupby("data.name", sort=False)["path"].first())
    names = ", ".join(dict.fromkeys(config["experiment"]["name"] for config in configs))
    groups = {value: measure(of, rows, notes, by or "") for value, of in runs.groupby(by or (lambda _: ""))}
    tasks = {} if by else groups[""]
    summary = by_table(groups) if by else summary_table(tasks)
    pilots = rates(runs)
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
        for value, of in groups.items()
        for t in of.values()
    ]
    return {
        "page": "tasks.md.j2",
        "paragraph": "tasks_conclusions.j2",
        "names": f"{names} by {by}" if by else names,
        "lede": f"{counts}; models of {parameters} parameters after {tokens} tokens. Accuracy is the share of answers "
        "right; lengths are in items.",
        "KEPT": KEPT,
        "by": by,
        "tasks": list(tasks.values()),
        "seeds": sorted(set(runs["seed"])),
        "tables": {
            "summary": summary,
            "rates": None if pilots.empty else tables.rate_table(pilots),
            **{t.name: task_table(t) for t in tasks.values()},
        },
        "sections": sections,
        "figures": draw_all(tasks) | draw_sections(None, brought),
        "notes": notes,
        "latex": {"summary": (summary, f"Length at which accuracy falls below {KEPT}, items.")},
    }, {
        "accuracy.csv": pd.concat(scores),
        **({"rates.csv": pilots} if len(pilots) else {}),
        **{name: pd.concat(frames) for name, frames in files.items()},
    }


def summary_table(tasks: Mapping[str, TaskScores]) -> pd.DataFrame:
    """Schemes by tasks: the length up to which a task is kept, and how many seeds learnt it where not all did."""
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
    """What rows are sorted by: the mean length up to which tasks are kept, in trained lengths; 0 if not learnt."""
    kept = [t.kept_to(scheme) / t.trained if scheme in t.limits else 0.0 for t in tasks.values()]
    return -float(np.mean(kept)), scheme


def task_table(t: TaskScores) -> pd.DataFrame:
    """A row a scheme: seeds that learnt, in how many steps, up to which length, and the medians by length."""
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
    """Median accuracy over all seeds by task, scheme and group: at the trained length and, behind an arrow, beyond it.

    Beyond is twice the trained length, or the next longer that was tested.
    """
    names = dict.fromkeys((t.name, scheme) for of in groups.values() for t in of.values() for scheme in t.schemes)
    rows = []
    for name, scheme in names:
        row = {"scheme": scheme, "task": name}
        for value, of in groups.items():
            if name in of and scheme in of[name].learners.index:
                t = of[name]
                beyond = next((n for n in t.lengths if n >= 2 * t.trained), t.lengths[-1])
                scores = t.scores[(t.scores["scheme"] == scheme) & (t.scores["under"] == "")]
                medians = scores.groupby("length")["accuracy"].median()
                texts = [number(medians.get(n, math.nan), 2) for n in (t.trained, beyond)]
                row[tables.text_of(value)] = " → ".join(texts)
        rows.append(row)
    return text_table(rows)


def draw_all(tasks: Mapping[str, TaskScores]) -> dict[str, Figure]:
    """File stem -> figure: the summary, and each task."""
    with style():
        figures = {"summary": summary_map(tasks)} if len(tasks) > 1 else {}
        for t in tasks.values():
            figures[f"task-{t.name}"] = task_map(t)
            if len(t.under_options):
                figures[f"options-{t.name}"] = option_maps(t)
    return figures


def task_map(t: TaskScores) -> Figure:
    """Schemes by lengths: the median over the seeds that learnt; each seed a dot, from chance at the left to 1."""
    schemes, lengths = t.schemes, t.lengths
    figure, (axes,) = new_figure(0.8 + 0.42 * len(schemes), width=min(WIDTH, 2.6 + 0.85 * len(lengths)))
    _cells(axes, t, t.medians.reindex(index=schemes, columns=lengths))
    seeds = t.scores[t.scores["under"] == ""]
    x = seeds["length"].map(lengths.index) + 0.08 + 0.84 * t.share(seeds["accuracy"])
    y = seeds["scheme"].map(schemes.index) + 0.84
    for learnt, fill in ((False, "none"), (True, INK)):
        of = seeds["learnt"] == learnt
        axes.plot(x[of], y[of], "o", markersize=3, color=INK, markerfacecolor=fill, markeredgewidth=0.5)
    for row, scheme in enumerate(schemes):
        text = f"{t.learnt_text(scheme)} learnt" if scheme in t.limits else "not learnt"
        axes.text(len(lengths) + 0.1, row + 0.5, text, va="center", fontsize=8)
    axes.axvline(lengths.index(t.trained) + 1, color=INK, linewidth=1.2)
    axes.set_xlabel(f"length, items (trained up to {t.trained}, the line; chance {t.chance:.2g}: white)")
    return figure


def summary_map(tasks: Mapping[str, TaskScores]) -> Figure:
    """Schemes by tasks: up to which multiple of the trained length a task is kept."""
    texts = summary_table(tasks).set_index("scheme")
    of = list(tasks.values())
    kept = np.array([[t.kept_to(s) / t.trained if s in t.limits else math.nan for t in of] for s in texts.index])
    most = max(t.lengths[-1] / t.trained for t in of)
    figure, (axes,) = new_figure(0.8 + 0.3 * len(texts), width=min(WIDTH, 2.2 + len(of)))
    _shade(axes, 0.1 + 0.9 * np.log2(kept) / math.log2(most), texts.to_numpy().tolist(), texts)
    axes.xaxis.tick_top()
    return figure


def option_maps(t: TaskScores) -> Figure:
    """For each scheme that learnt: options of the evaluation by lengths, the median over the seeds that learnt."""
    of = t.under_options
    schemes, lengths = [s for s in t.schemes if s in set(of["scheme"])], sorted(set(of["length"]))
    options = sorted(
        set(of["under"]), key=lambda text: (text.partition("=")[0], [*map(float, re.findall(r"[0-9.]+", text))])
    )
    figure, panels = new_figure(
        0.6 + (0.5 + 0.26 * len(options)) * len(schemes), rows=len(schemes), width=min(WIDTH, 2.6 + 0.85 * len(lengths))
    )
    for axes, scheme in zip(panels, schemes, strict=True):
        own = of[of["scheme"] == scheme].pivot_table(
            index="under", columns="length", values="accuracy", aggfunc="median"
        )
        _cells(axes, t, own.reindex(index=options, columns=lengths))
        axes.set_title(scheme)
    panels[-1].set_xlabel("length, items")
    return figure


def _cells(axes: Axes, t: TaskScores, accuracy: pd.DataFrame) -> None:
    """Cells of accuracy, each with its number, shaded from chance (white) to 1."""
    values = accuracy.to_numpy(dtype=float)
    _shade(axes, t.share(values), [[number(v, 2) for v in row] for row in values], accuracy)


def _shade(axes: Axes, shades: Any, texts: Sequence[Sequence[str]], labels: pd.DataFrame) -> None:
    """Cells shaded from 0 (white) to 1, each with its text; no colour where the shade is NaN. Labels: of a frame."""
    axes.pcolormesh(shades, cmap="Blues", vmin=0, vmax=1.8, edgecolor="white", linewidth=1.5)  # light enough for ink
    axes.invert_yaxis()
    for y, x in np.ndindex(np.shape(shades)):
        axes.text(x + 0.5, y + 0.5, texts[y][x], ha="center", va="center", fontsize=8, color=INK)
    axes.set_xticks(np.arange(len(labels.columns)) + 0.5, list(map(str, labels.columns)))
    axes.set_yticks(np.arange(len(labels.index)) + 0.5, list(map(str, labels.index)))
    axes.grid(visible=False)
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
