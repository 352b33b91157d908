"""Build the sections of a report about several comparisons: by the value of a setting, by task, or by model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd

from posbench.analysis.card import gaps
from posbench.analysis.statistics import interval, verdict
from posbench.analysis.subjects import ModelComparison
from posbench.analysis.tasks import KEPT, TaskComparison
from posbench.config.units import number, short_count, short_length
from posbench.reporting.page import prose
from posbench.reporting.protocols.order import onsets_by_group
from posbench.reporting.section import Format, Plot, Section, Table, half, in_order, pivot
from posbench.reporting.sections import gap_plots
from posbench.reporting.setups import Groups, paired_effect_sections

MOST_PAIRS = 30  # pairs in the table of pairs by group
HALF = "±: half the 95 % interval over seeds"  # in captions


def overview(comparisons: Sequence[Any], group_by: str) -> list[Section]:
    """Return the sections that show all comparisons of a report together, if any.

    Arguments: group_by, the setting whose values are groups of runs, or "".
    """
    first = comparisons[0]
    if isinstance(first, ModelComparison):
        return [bits_per_byte(comparisons), *_gaps(comparisons)]
    if isinstance(first, TaskComparison) and group_by:
        note = (
            "Median accuracy over all seeds, at the longest trained length → at twice that length. Rates are chosen "
            "only by the loss at trained lengths."
        )
        return [Section("", table=accuracy_by_group(comparisons), note=note)]
    if isinstance(first, TaskComparison):
        return [limits(comparisons)]
    if group_by:
        return by_group({c.group: c for c in comparisons}, group_by)
    return []


# ---------------------------------------------------------------- groups of runs


def by_group(groups: Groups, group_by: str) -> list[Section]:
    """Return the sections about groups of runs: losses, gaps, and how pairs differ between groups."""
    is_rate = group_by == "train.lr"
    cells = _cells(groups, is_rate)
    titles = {value: value for value in groups}
    title = f"Loss by scheme and {group_by}"
    table = pivot(cells, titles, "group", "loss", Format(half="loss_half", bold="is_best"))
    if is_rate:
        _add_gap_at_best_rates(table, groups, cells)
    latex = ("loss", f"{title}, nats/token; bold: the best of each row; {HALF}.")
    loss = Section(title, table=table, note=prose("losses_by", is_rate), latex=latex)
    title = f"Gap to the baseline by scheme and {group_by}"
    table = pivot(cells, titles, "group", "gap", Format(half="gap_half", sign=True, after="mark"))
    gap = Section(title, table=table, note=prose("gaps_by"), latex=("gap", f"{title}, nats/token; {HALF}, paired."))
    # Losses answer the question about learning rates, gaps the others: the terminal shows the first table.
    sections = [gap, loss]
    if is_rate:
        sections.reverse()
    pairs = pairs_by_group(groups)
    if not is_rate and 0 < len(pairs) <= MOST_PAIRS:
        sections.append(Section(f"Pairs by {group_by}", table=pairs, note=prose("pairs_by", groups)))
    sections += paired_effect_sections(groups, group_by.split(","))
    # Rates are compared by their last losses.
    if not is_rate and (plots := gap_plots(groups)):
        sections.append(Section("Gaps while training", plots=plots))
    return [*sections, *onsets_by_group(groups)]


def _cells(groups: Groups, is_rate: bool) -> pd.DataFrame:
    """Return the final losses, a row per scheme and group: loss and gap with intervals, and marks for the tables.

    Schemes are sorted by their lowest loss if groups are learning rates, else by their mean gap.
    """
    parts = []
    for value, c in groups.items():
        part = c.ranking.assign(group=value, loss_half=half(c.ranking, "loss"), gap_half=half(c.ranking, "gap"))
        is_decided = part["verdict"].str.startswith(("better", "worse"))
        part["mark"] = is_decided.map({True: "\\*", False: ""})  # escaped: a star has a meaning in Markdown
        # The baseline's gap to itself is 0 by definition and has no interval.
        part["gap_half"] = part["gap_half"].mask(part["scheme"] == c.baseline)
        # Without the wanted baseline, gaps would be to another scheme than in the other groups.
        if c.wanted_baseline not in c.schemes:
            part[["gap", "gap_half"]] = math.nan
        parts.append(part)
    cells = pd.concat(parts, ignore_index=True)
    of_scheme = cells.groupby("scheme")
    lowest = of_scheme["loss"].transform("min")
    # The best group of each scheme; with one group every one would be.
    cells["is_best"] = (cells["loss"] == lowest) & (len(groups) > 1)
    cells["level"] = lowest if is_rate else of_scheme["gap"].transform("mean")
    return cells.sort_values(["level", "scheme"], kind="stable")


def _add_gap_at_best_rates(table: Table, groups: Groups, cells: pd.DataFrame) -> None:
    baseline = next(iter(groups.values())).wanted_baseline
    best_groups = cells[cells["is_best"]].set_index("scheme")["group"]
    # No group may have a run of the baseline.
    if baseline not in best_groups:
        return
    # Gaps are taken within each seed, although the rates of the two schemes may differ.
    figures = []
    at_best = {scheme: groups[group].values[scheme] for scheme, group in best_groups.items()}
    for scheme in table.frame["scheme"]:
        mean, low, high = interval((at_best[scheme] - at_best[baseline]).dropna())
        figures.append((mean, (high - low) / 2))
    means, halves = map(pd.Series, zip(*figures, strict=True))
    is_baseline = table.frame["scheme"] == baseline
    table.add(f"gap to {baseline} at best rates", means, halves.mask(is_baseline.to_numpy()), sign=True)


def pairs_by_group(groups: Groups) -> Table:
    """Return a row per claimed pair that all groups have: its difference in each, and whether the signs agree.

    Each difference has its verdict: differ, equal, open or, if the group ranks nothing, not tested.
    """
    rows: dict[frozenset[str], dict[str, Any]] = {}
    better_schemes: dict[frozenset[str], list[str]] = {}  # pair -> the scheme with the lower loss in each group
    formats = {}
    for value, c in groups.items():
        title = f"{value}, {c.scope}"
        formats[title] = Format(half=f"{title}: half", sign=True, after=f"{title}: after")
        for pair in c.pairs.to_dict("records"):
            # A pair may have another order in each group, so its name has none.
            name = frozenset((pair["left"], pair["right"]))
            if c.fixed and name not in c.fixed:
                continue
            row = rows.setdefault(name, {"lower loss": pair["left"], "higher loss": pair["right"]})
            better_schemes.setdefault(name, []).append(pair["left"])
            outcome_text = "not tested"
            if c.can_rank:
                outcome_text = verdict(c.pairs, pair["left"], pair["right"])
                # The sign of the difference says which scheme is better; "" means not tested.
                outcome_text = outcome_text.replace("better", "differ") or "not tested"
            is_same_order = row["lower loss"] == pair["left"]  # as in the first group that has the pair
            row[title] = pair["difference"] if is_same_order else -pair["difference"]
            row[f"{title}: half"] = half(pair, "difference")
            row[f"{title}: after"] = f" {outcome_text}"
    shared = []
    for name, of_pair in better_schemes.items():
        # Only pairs that every group has can be compared.
        if len(of_pair) == len(groups):
            # The sign is the same if one scheme is the better one everywhere.
            same_sign = "yes" if len(set(of_pair)) == 1 else "no"
            shared.append(rows[name] | {"same sign": same_sign})
    return Table.of(shared, formats)


# ---------------------------------------------------------------- tasks


def limits(tasks: Sequence[TaskComparison]) -> Section:
    """Return the section on the length up to which each scheme stays accurate, for all tasks."""
    table = limits_table(tasks)
    latex = ("summary", f"Length at which accuracy falls below {KEPT}, items.")
    plots = [_limits_map(tasks, table)] if len(tasks) > 1 else []
    return Section("", plots=plots, table=table, note=prose("limits", KEPT), latex=latex)


def limits_table(tasks: Sequence[TaskComparison]) -> Table:
    """Return a row per scheme and a column per task: the length up to which the scheme stays accurate.

    If not all seeds learnt the task, their number is in brackets: `≥64 (2/3)`. Schemes are sorted by the mean over
    tasks.
    """

    # Lengths are multiples of each task's trained length, so that tasks weigh alike; 0 for a task that was not learnt.
    def place(scheme: str) -> tuple[float, str]:
        multiples = [t.kept_to(scheme) / t.trained if scheme in t.limits else 0.0 for t in tasks]
        return -float(np.mean(multiples)), scheme

    rows = []
    for scheme in sorted(set(chain.from_iterable(t.schemes for t in tasks)), key=place):
        row = {"scheme": scheme}
        for t in tasks:
            # "" if it has no run of the task.
            row[_title(t)] = t.limit_with_seeds(scheme) if scheme in t.schemes else ""
        rows.append(row)
    return Table.of(rows)


def _title(t: TaskComparison) -> str:
    return t.name.replace("_", " ")


def _limits_map(tasks: Sequence[TaskComparison], table: Table) -> Plot:
    # Return a picture of coloured cells, schemes by tasks: the length up to which each scheme stays accurate.
    greatest_multiple = max(t.lengths[-1] / t.trained for t in tasks)
    points = []
    for row in table.frame.to_dict("records"):
        for t in tasks:
            scheme, shade = row["scheme"], math.nan
            # The length as a multiple of the trained one, on a log scale; 0.1 keeps learnt tasks apart from clear
            # cells.
            if scheme in t.limits:
                # If nothing longer was tested, all are alike.
                shade = 0.1 + 0.9 * math.log2(t.kept_to(scheme) / t.trained) / (math.log2(greatest_multiple) or 1.0)
            column = f"{_title(t)}\ntrained: {t.trained}"
            points.append({"row": scheme, "column": column, "shade": shade, "text": row[_title(t)]})
    caption = (
        "Length up to which single answers (letters, bits, pairs) stay right, each after the true ones before it; not "
        "whole problems. Bluer: a larger multiple of the trained length, which stands below the task's name. 3/5: "
        "seeds that learnt the task, if not all; –: none did; empty: not trained."
    )
    x_label = f"length at which the share of right letters, bits\nor pairs falls below {KEPT}; not of whole problems"
    return Plot("summary", "cells", caption, pd.DataFrame(points).assign(panel="", note=""), x_label)


def accuracy_by_group(tasks: Sequence[TaskComparison]) -> Table:
    """Return the median accuracy over all seeds: a row per scheme and task, a column per group of runs.

    A cell reads `at the trained length → at twice that length`, or at the next longer one tested.
    """
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for t in tasks:
        # The longest tested length, if none is twice the trained one.
        length_beyond = next((n for n in t.lengths if n >= 2 * t.trained), t.lengths[-1])
        as_trained = t.scores[t.scores["under"] == ""]
        medians = as_trained.groupby(["scheme", "length"])["accuracy"].median()
        for scheme in t.schemes:
            texts = [number(medians.get((scheme, n), math.nan), 2) for n in (t.trained, length_beyond)]
            row = rows.setdefault((t.name, scheme), {"scheme": scheme, "task": t.name})
            row[t.group] = " → ".join(texts)
    return Table.of(list(rows.values()))


# ---------------------------------------------------------------- models that were not trained here


def bits_per_byte(models: Sequence[ModelComparison]) -> Section:
    """Return the section on bits per byte of each model, under each option, by length in tokens and characters."""
    parts, lengths = [], set[int]()
    for c in models:
        cells = c.at(metric="bits_per_byte", last=0)
        cells = in_order(cells[cells["protocol"].isin(c.losses["protocol"])], c.schemes, "length")
        characters = cells["length"] * c.subject["characters_per_token"]
        parts.append(cells.assign(x=characters, characters=[f" ({short_count(count)})" for count in characters]))
        lengths.update(c.losses["length"])
    rows = pd.concat(parts)
    titles = {n: short_length(n) for n in sorted(lengths)}
    table = pivot(rows, titles, "length", format=Format(digits=4, after="characters"))
    note = "Bits per byte by length in tokens; in brackets the length in characters. "
    plots = []
    if len(models) > 1:
        note += "Models with different tokenizers read different windows of the same text."
        # Only models as they are; with options the lines would be too many.
        points = rows[rows["scheme"].isin([c.name for c in models])].assign(y=lambda cells: cells["value"])
        caption = "Bits per byte of each model as it is, by length in characters."
        plots = [Plot("models", "lines", caption, points, "length, characters", "bits per byte")]
    renamed = Table(table.frame.rename(columns={"scheme": "model"}), table.formats)
    return Section("", plots=plots, table=renamed, note=note)


def _gaps(models: Sequence[ModelComparison]) -> list[Section]:
    # Losses in nats compare only models that read the same windows.
    table = gaps({c.name: c.run for c in models})
    if table.empty:
        return []
    first = models[0].name
    lengths = {n: short_length(n) for n in sorted(set(table["length"]))}
    shown = pivot(table, lengths, "length", "gap", Format(half="half", sign=True))
    note = f"Loss minus that of {first} on the same windows, nats/token; ±: half the 95 % interval over documents."
    return [Section(f"Gap to {first}", table=shown, note=note)]
