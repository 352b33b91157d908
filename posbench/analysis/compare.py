"""Choose what a report compares: all runs, those with each value of a setting, those of each task, or each model."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from posbench.analysis.agreement import finished_runs, is_of_subjects, is_of_tasks
from posbench.analysis.comparison import Comparison, SeedComparison, build
from posbench.analysis.options import MARGIN
from posbench.analysis.setups import compare_setups, has_setups
from posbench.analysis.subjects import compare_models
from posbench.analysis.table import check_columns, config_of, with_defaults
from posbench.analysis.tasks import compare_tasks
from posbench.config.units import group_text


def compare_runs(
    summary: pd.DataFrame, rows: pd.DataFrame, group_by: str = "", baseline: str | None = None, margin: float = MARGIN
) -> Sequence[Comparison]:
    """Return the comparisons of a report.

    Arguments: summary, a row per run; rows, the tidy table; group_by, settings with commas whose values are groups;
    baseline and margin, as of `build`.
    Raises: ConfigError if no run is finished, runs differ in other settings, or a setting is unknown.
    """
    if is_of_subjects(summary) and not group_by:
        return compare_models(summary, rows)
    if is_of_tasks(summary):
        return compare_tasks(summary, rows, group_by)
    if has_setups(summary) and not group_by:
        return [compare_setups(summary, rows, baseline, margin)]
    if group_by:
        return _groups(summary, rows, group_by, baseline, margin)
    return [build(summary, rows, baseline, margin)]


def _groups(
    summary: pd.DataFrame, rows: pd.DataFrame, group_by: str, baseline: str | None, margin: float
) -> list[SeedComparison]:
    columns = group_by.split(",")
    if "data.name" in columns and "data.name" not in summary:  # runs do not record it as a setting
        paths = summary.groupby("fingerprint.data")["path"].first()
        texts = {fingerprint: config_of(str(path))["data"]["name"] for fingerprint, path in paths.items()}
        summary = summary.assign(**{"data.name": summary["fingerprint.data"].map(texts)})
    check_columns(summary, columns)
    summary = with_defaults(summary, columns)
    # Each group then has one rate, so no search chooses between rates.
    if "train.lr" in columns:
        summary = summary.assign(searched=False)
    finished = set(finished_runs(summary)[0].index)
    groups = []
    # pandas makes a tuple of each value if it gets a list, even of one column
    keys = columns if len(columns) > 1 else group_by
    for value, of_value in summary.groupby(keys, sort=True):
        # A group without a finished run has nothing to compare.
        if finished & set(of_value.index):
            groups.append(build(of_value, rows, baseline, margin, group_by, group=group_text(value)))
    return groups


def best_groups(groups: Sequence[SeedComparison]) -> pd.DataFrame:
    """Return each scheme's best group: its mean loss, group, the number of groups with the scheme, and is_at_edge.

    A best value at the edge of the tried ones may not be the best: is_at_edge.
    """
    # A row per scheme, a column per group, NaN if the scheme has no run there.
    means = pd.DataFrame({c.group: c.values.mean() for c in groups})
    best = pd.DataFrame({"loss": means.min(axis=1), "group": means.idxmin(axis=1), "groups": means.notna().sum(axis=1)})
    ends = means.apply(lambda row: [row.first_valid_index(), row.last_valid_index()], axis=1, result_type="expand")
    return best.assign(is_at_edge=ends.eq(best["group"], axis=0).any(axis=1))
