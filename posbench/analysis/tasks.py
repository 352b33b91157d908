"""Measure tasks: which schemes learn which, and up to which length they stay accurate.

A seed has either learnt a task or not, and a mean over both kinds describes neither. So figures beyond the trained
lengths are medians over the seeds that learnt, shown with the number of these seeds.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from posbench.analysis.agreement import check_agreement, finished_runs
from posbench.analysis.cells import means, measure
from posbench.analysis.comparison import Comparison
from posbench.analysis.search import RateSearch, choose_rates
from posbench.analysis.table import check_columns, curves, with_defaults
from posbench.config import ConfigError
from posbench.config.units import DASH, group_text
from posbench.evaluation.protocols import ACCURACY, VALIDATION
from posbench.evaluation.protocols.order import crossing
from posbench.runs.results import MARKS

KEPT = 0.9  # a scheme keeps a task at lengths at which accuracy is this share of the way from chance to 1
PLACE = ["scheme", "seed", "under", "length"]


@dataclass(frozen=True, kw_only=True)
class TaskComparison(Comparison):
    """A comparison of one task's runs by accuracy. A seed may not have learnt the task.

    A scheme stays accurate at a length if its accuracy, the median of seeds that learnt, is at least KEPT of the way
    from chance to 1.
    """

    metric: str = "accuracy"
    lower_is_better: bool = False
    name: str
    chance: float
    goal: float  # lowest accuracy at the longest trained length that counts as having learnt the task
    trained: int  # longest trained length, items
    scores: pd.DataFrame  # a row per scheme, seed, evaluation option and length: accuracy, exact, learnt
    steps: pd.DataFrame  # seeds that learnt: scheme, seed, steps until they had learnt
    search: RateSearch | None  # the search that chose the learning rates

    @property
    def files(self) -> dict[str, pd.DataFrame]:
        described = self.scores.assign(data=self.name, chance=self.chance, trained=self.trained, group=self.group)
        files = {"accuracy.csv": described}
        if self.search:
            files["rates.csv"] = self.search.table.assign(data=self.name)
        return files

    @property
    def numbers(self) -> list[dict[str, Any]]:
        rows = []
        for scheme in self.schemes:
            seeds: Any = self.learners.loc[scheme]
            row = {"task": self.name, "scheme": scheme, "seeds": int(seeds["seeds"]), "learnt": int(seeds["learnt"])}
            # accurate_to is in items. Infinite: at every tested length; NaN: no seed learnt the task.
            row |= {"accurate_to": self.limits.get(scheme, math.nan), "trained_to": self.trained}
            rows.append(row)
        return rows

    @property
    def title(self) -> str:
        return str(self.config["experiment"]["name"])  # each task has a folder of its own

    @property
    def training_length(self) -> int:
        return self.trained

    @cached_property
    def learners(self) -> pd.DataFrame:
        """Return how many seeds learnt the task (`learnt`), and how many there are (`seeds`), a row per scheme."""
        seeds = self.scores.drop_duplicates(["scheme", "seed"]).groupby("scheme")
        return seeds.agg(learnt=("learnt", "sum"), seeds=("learnt", "size"))

    @cached_property
    def medians(self) -> pd.DataFrame:
        """Return the median accuracy of seeds that learnt: a row per scheme with such a seed, a column per length."""
        scores = self.scores[self.scores["learnt"] & (self.scores["under"] == "")]
        return scores.pivot_table(index="scheme", columns="length", values="accuracy", aggfunc="median")

    @property
    def option_scores(self) -> pd.DataFrame:
        """Return the scores measured with changed options, for the seeds that learnt the task."""
        return self.scores[self.scores["learnt"] & ~self.scores["under"].isin(["", *MARKS])]

    @cached_property
    def limits(self) -> dict[str, float]:
        """Return the length in items at which each scheme that learnt stops being accurate, or infinity."""
        limits = {}
        for scheme, accuracy in self.medians.iterrows():
            from_trained = accuracy[accuracy.index >= self.trained].dropna()
            kept_accuracy = self.chance + KEPT * (1 - self.chance)
            # Interpolated between tested lengths. Slightly lower, because an accuracy of exactly this is kept.
            limits[str(scheme)] = crossing(from_trained.index, from_trained, kept_accuracy - 1e-9)
        return limits

    @property
    def furthest(self) -> list[str]:
        """Return the schemes that stay accurate up to the greatest length; empty if no seed learnt the task."""
        lengths = {scheme: self.kept_to(scheme) for scheme in self.schemes if scheme in self.limits}
        greatest = max(lengths.values(), default=0)
        return [scheme for scheme, length in lengths.items() if length == greatest]

    @property
    def furthest_with_seeds(self) -> list[str]:
        """Return the schemes that stay accurate longest, with their seeds: `alibi (2/3 seeds)`."""
        return [f"{scheme} ({self.learnt_text(scheme)} seeds)" for scheme in self.furthest]

    @property
    def not_learnt(self) -> list[str]:
        return [scheme for scheme in self.schemes if scheme not in self.limits]

    @property
    def is_kept(self) -> bool:
        """Return whether some scheme stays accurate at every tested length."""
        # An infinite limit says so only if the scheme was also scored at the longest length.
        return any(limit == math.inf and self.kept_to(s) == self.lengths[-1] for s, limit in self.limits.items())

    @property
    def lengths(self) -> list[int]:
        return sorted(set(self.scores["length"]))

    def share(self, accuracy: Any) -> Any:
        """Return the accuracy as a share of the way from chance (0) to perfect (1)."""
        return np.clip((accuracy - self.chance) / (1 - self.chance), 0, 1)

    def limit_text(self, scheme: str) -> str:
        """Return the length up to which a scheme stays accurate, as text: `23`, `≥64`, or a dash if unlearnt."""
        if scheme not in self.limits:
            return DASH
        limit = self.limits[scheme]
        if limit == math.inf:
            return f"≥{self.kept_to(scheme)}"
        return str(int(limit))

    def limit_with_seeds(self, scheme: str) -> str:
        """Return `limit_text`, with how many seeds learnt the task if not all did: `≥64 (2/3)`."""
        seeds = self.learners.loc[scheme]
        if seeds["learnt"] == seeds["seeds"]:
            return self.limit_text(scheme)
        return f"{self.limit_text(scheme)} ({self.learnt_text(scheme)})"

    def kept_to(self, scheme: str) -> float:
        """Return the length in items up to which a scheme that learnt stays accurate, at most the longest tested."""
        return min(self.limits[scheme], int(self.medians.loc[scheme].dropna().index.max()))

    def learnt_text(self, scheme: str) -> str:
        """Return how many of a scheme's seeds learnt the task, as text: `3/5`."""
        counts = self.learners.loc[scheme]
        return f"{counts['learnt']}/{counts['seeds']}"


def compare_tasks(summary: pd.DataFrame, rows: pd.DataFrame, group_by: str = "") -> list[TaskComparison]:
    """Return a comparison for each task of these runs, each scheme at its best rate; with `group_by`, for each group.

    Arguments: summary, a row per run; rows, the tidy table; group_by, a setting such as train.lr.
    Raises: ConfigError if the runs of a task differ in more than scheme and seed, or no run can be included.
    """
    runs, left_out = finished_runs(summary)
    groups = {"": runs}
    if group_by:
        columns = group_by.split(",")
        check_columns(runs, columns)
        keys = columns if len(columns) > 1 else group_by  # a list of one column would give tuples
        groups = {group_text(value): of_value for value, of_value in with_defaults(runs, columns).groupby(keys)}
    comparisons: list[TaskComparison] = []
    for group, of_group in groups.items():
        of_tasks = []
        for _, of_task in of_group.groupby("data.name", sort=False):
            of_tasks.append(_compared(of_task, rows, left_out, group_by, group))
            left_out = []  # each line once
        if not any(of_tasks):
            raise ConfigError(
                "no run of a task has been evaluated here at its trained length: do it with `posbench eval`"
            )
        comparisons += filter(None, of_tasks)
    return comparisons


def _compared(
    runs: pd.DataFrame, rows: pd.DataFrame, left_out: list[str], group_by: str, group: str
) -> TaskComparison | None:
    # Return the comparison of one task's runs, or None if none was scored at the longest trained length.
    search: RateSearch | None = None
    if not group_by:
        runs, search = choose_rates(runs)
    name, trained = str(runs["data.name"].iloc[0]), _longest(runs["data.lengths"].iloc[0])
    rows = rows[rows["run"].isin(runs.index)]
    of_others = rows[~rows["protocol"].isin([ACCURACY.name, VALIDATION.name])]
    rows = rows[(rows["protocol"] == ACCURACY.name) & (rows["at_step"] == 0)]
    # Accuracy at the longest trained length shows whether a run has learnt the task, so runs without it are left out.
    at_trained = rows[(rows["length"] == trained) & (rows["under"] == "")]
    evaluated = runs[runs.index.isin(at_trained["run"])]
    notes = []
    for path in runs.drop(evaluated.index)["path"]:
        notes.append(f"{path}: not evaluated at {trained} items, the longest trained length")
    if evaluated.empty:
        return None
    check_agreement(evaluated, group_by)
    rows = rows[rows["run"].isin(evaluated.index)]
    is_shared = rows.groupby(["under", "length"], observed=True)["windows_digest"].transform("nunique") == 1
    if not is_shared.all():
        lengths = ", ".join(map(str, sorted(set(rows[~is_shared]["length"]))))
        notes.append(f"{name} at {lengths}: left out, runs had different problems")
    if not is_shared[at_trained.index].all():
        raise ConfigError(
            f"the runs of {name} were scored on different problems at {trained} items, the longest trained length: "
            "evaluate them with the same settings, or report them separately"
        )
    holes: dict[tuple[str, str], list[str]] = {}
    scores, steps = _scores(evaluated, rows[is_shared], trained)
    first = evaluated.iloc[0]  # all runs of a task have the same lengths, chance and goal
    comparison = TaskComparison(
        runs=runs,
        schemes=[],
        wanted_baseline="",
        cells=measure(of_others, evaluated, "", trained, notes, holes),
        holes=holes,
        left_out=left_out,
        notes=notes,
        group=group,
        name=name,
        chance=float(first["chance"]),
        goal=float(first["goal"]),
        trained=trained,
        scores=scores,
        steps=steps,
        search=search,
    )
    return replace(comparison, schemes=_ordered(comparison))


def _ordered(t: TaskComparison) -> list[str]:
    """Return the schemes, sorted by the length up to which they stay accurate, greatest first; ties by name."""

    def place(scheme: str) -> tuple[float, float, float, str]:
        accuracy_at_longest: Any = t.medians.loc[scheme].iloc[-1]
        # Negative, so that the greatest are first.
        return -t.kept_to(scheme), -t.limits[scheme], -accuracy_at_longest, scheme

    learnt = sorted(t.limits, key=place)
    # Schemes of which no seed learnt the task are last.
    return [*learnt, *sorted(set(t.learners.index) - set(learnt))]


def _longest(lengths: str) -> int:
    # The setting `data.lengths` of a task is the shortest and the longest trained length, as JSON.
    return int(json.loads(lengths)[1])


def _scores(runs: pd.DataFrame, rows: pd.DataFrame, trained: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the scores and the steps of a `TaskComparison`. Arguments: rows, of these runs, of the tidy table."""
    by_metric = means(rows, [*PLACE, "metric"]).unstack("metric")
    by_metric["problems"] = rows[rows["metric"] == "exact"].groupby(PLACE, observed=True)["count"].sum()
    scores = by_metric.reset_index().astype({"scheme": str, "under": str})
    goal = float(runs["goal"].iloc[0])
    at_trained = scores[(scores["length"] == trained) & (scores["under"] == "")].set_index(["scheme", "seed"])
    learnt = at_trained["accuracy"] >= goal
    # Every score of a seed says whether the seed has learnt the task.
    scores = scores.join(learnt.rename("learnt"), on=["scheme", "seed"]).fillna({"learnt": False})
    return scores.astype({"learnt": bool}), _steps_until_learnt(runs, learnt[learnt].index, goal)


def _steps_until_learnt(runs: pd.DataFrame, learners: pd.Index, goal: float) -> pd.DataFrame:
    """Return scheme, seed and steps, a row per run of `learners` (scheme, seed); infinite: not while it trained."""
    of_learners = runs[runs.set_index(["scheme", "seed"]).index.isin(learners)]
    steps = []
    for run in of_learners.to_dict("records"):
        validations = curves([run["path"]], "validation", ["accuracy"])
        # `crossing` finds where a curve falls, so it gets the share of wrong answers.
        learnt_at = crossing(validations["step"], 1 - validations["accuracy"], 1 - goal)
        steps.append((run["scheme"], run["seed"], learnt_at))
    return pd.DataFrame(steps, columns=["scheme", "seed", "steps"])
