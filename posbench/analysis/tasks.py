"""Measure tasks: which schemes learn which, and up to which length they stay accurate.

A seed has either learnt a task or not, and a mean over both kinds describes neither. So figures beyond the trained
lengths are medians over the seeds that learnt, shown with the number of these seeds.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from posbench.analysis.agreement import check_agreement
from posbench.analysis.cells import means
from posbench.config import ConfigError
from posbench.config.units import DASH
from posbench.evaluation.protocols import ACCURACY
from posbench.evaluation.protocols.section import crossing, curves
from posbench.runs.results import MARKS

KEPT = 0.9  # a scheme keeps a task at lengths at which accuracy is this share of the way from chance to 1
PLACE = ["scheme", "seed", "under", "length"]


@dataclass(frozen=True)
class TaskScores:
    """The scores of one task's runs.

    A scheme stays accurate at a length if its accuracy, the median of seeds that learnt, is at least KEPT of the way
    from chance to 1.
    """

    name: str
    chance: float
    goal: float  # lowest accuracy at the longest trained length that counts as having learnt the task
    trained: int  # longest trained length, items
    scores: pd.DataFrame  # a row per scheme, seed, evaluation option and length: accuracy, exact, learnt
    steps: pd.DataFrame  # seeds that learnt: scheme, seed, steps until they had learnt

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
    def schemes(self) -> list[str]:
        """Return the schemes, sorted by the length up to which they stay accurate, greatest first; ties by name."""

        def place(scheme: str) -> tuple[float, float, float, str]:
            accuracy_at_longest: Any = self.medians.loc[scheme].iloc[-1]
            # Negative, so that the greatest are first.
            return -self.kept_to(scheme), -self.limits[scheme], -accuracy_at_longest, scheme

        learnt = sorted(self.limits, key=place)
        # Schemes of which no seed learnt the task are last.
        return [*learnt, *sorted(set(self.learners.index) - set(learnt))]

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

    def kept_to(self, scheme: str) -> float:
        """Return the length in items up to which a scheme that learnt stays accurate, at most the longest tested."""
        return min(self.limits[scheme], int(self.medians.loc[scheme].dropna().index.max()))

    def learnt_text(self, scheme: str) -> str:
        """Return how many of a scheme's seeds learnt the task, as text: `3/5`."""
        counts = self.learners.loc[scheme]
        return f"{counts['learnt']}/{counts['seeds']}"


def measure(runs: pd.DataFrame, rows: pd.DataFrame, notes: list[str], group_by: str = "") -> dict[str, TaskScores]:
    """Return the scores of these runs by task.

    Arguments: notes, a list that gets a line for everything left out; group_by, the setting that the runs are already
    grouped by.
    Raises: ConfigError if the runs of a task differ in more than scheme and seed, or no run can be included.
    """
    rows = rows[rows["run"].isin(runs.index) & (rows["protocol"] == ACCURACY.name) & (rows["at_step"] == 0)]
    # Accuracy at the longest trained length shows whether a run has learnt the task, so runs without it are left out.
    trained_lengths = runs["data.lengths"].map(_longest)
    at_trained = rows[(rows["length"] == rows["run"].map(trained_lengths)) & (rows["under"] == "")]
    evaluated = runs[runs.index.isin(at_trained["run"])]
    if evaluated.empty:
        raise ConfigError("no run of a task has been evaluated here at its trained length: do it with `posbench eval`")
    for run in runs.assign(trained=trained_lengths).drop(evaluated.index).itertuples():
        notes.append(f"{run.path}: not evaluated at {run.trained} items, the longest trained length")
    scored = {}
    for name, of_task in evaluated.groupby("data.name", sort=False):
        check_agreement(of_task, group_by)
        task_rows = rows[rows["run"].isin(of_task.index)]
        is_shared = task_rows.groupby(["under", "length"], observed=True)["windows_digest"].transform("nunique") == 1
        if not is_shared.all():
            lengths = ", ".join(map(str, sorted(set(task_rows[~is_shared]["length"]))))
            notes.append(f"{name} at {lengths}: left out, runs had different problems")
        trained_length = trained_lengths[of_task.index[0]]
        if not is_shared[(task_rows["length"] == trained_length) & (task_rows["under"] == "")].all():
            raise ConfigError(
                f"the runs of {name} were scored on different problems at {trained_length} items, the longest trained "
                "length: evaluate them with the same settings, or report them separately"
            )
        scored[str(name)] = _scores(str(name), of_task, task_rows[is_shared])
    return scored


def _longest(lengths: str) -> int:
    # The setting `data.lengths` of a task is the shortest and the longest trained length, as JSON.
    return int(json.loads(lengths)[1])


def _scores(name: str, runs: pd.DataFrame, rows: pd.DataFrame) -> TaskScores:
    """Return the scores of one task. Arguments: runs, a row per run of the task; rows, their rows of the tidy table."""
    run = runs.iloc[0]  # all runs of a task have the same lengths, chance and goal
    by_metric = means(rows, [*PLACE, "metric"]).unstack("metric")
    by_metric["problems"] = rows[rows["metric"] == "exact"].groupby(PLACE, observed=True)["count"].sum()
    scores = by_metric.reset_index().astype({"scheme": str, "under": str})
    trained, chance, goal = _longest(run["data.lengths"]), float(run["chance"]), float(run["goal"])
    at_trained = scores[(scores["length"] == trained) & (scores["under"] == "")].set_index(["scheme", "seed"])
    learnt = at_trained["accuracy"] >= goal
    # Every score of a seed says whether the seed has learnt the task.
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
    """Return scheme, seed and steps, a row per run of `learners` (scheme, seed); infinite: not while it trained."""
    of_learners = runs[runs.set_index(["scheme", "seed"]).index.isin(learners)]
    steps = []
    for run in of_learners.to_dict("records"):
        validations = curves([run["path"]], "validation", ["accuracy"])
        # `crossing` finds where a curve falls, so it gets the share of wrong answers.
        learnt_at = crossing(validations["step"], 1 - validations["accuracy"], 1 - goal)
        steps.append((run["scheme"], run["seed"], learnt_at))
    return pd.DataFrame(steps, columns=["scheme", "seed", "steps"])
