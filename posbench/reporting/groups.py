"""Make the page about groups of runs (`posbench report --by`): one pivot of losses, one of gaps, and pairs by group."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from itertools import chain, combinations
from typing import Any

import pandas as pd

from posbench.analysis.agreement import finished_runs
from posbench.analysis.comparison import Comparison, build
from posbench.analysis.statistics import interaction, interval, verdict
from posbench.analysis.table import config_of, settings_of
from posbench.config import ConfigError
from posbench.evaluation.protocols import PROTOCOLS
from posbench.evaluation.protocols.section import Format, Section, Table, half, pivot
from posbench.reporting.page import Page, paragraph, prose
from posbench.reporting.sections import models, numbers
from posbench.reporting.text import group_text

MOST_PAIRS = 30  # pairs in the table of pairs by group
Groups = Mapping[str, Comparison]  # the value that a group of runs shares, as text -> its runs


def groups_of(
    summary: pd.DataFrame, rows: pd.DataFrame, group_by: str, baseline: str | None, margin: float
) -> dict[str, Comparison]:
    """Return {value of `group_by`, as text: Comparison of the finished runs with it}.

    Arguments: summary, a row per run; rows, the tidy table; group_by, one column or several with commas; margin, nats
    per token below which losses count as equal.
    Raises: ConfigError for an unknown column.
    """
    columns = group_by.split(",")
    if "data.name" in columns and "data.name" not in summary:  # runs do not record it as a setting
        paths = summary.groupby("fingerprint.data")["path"].first()
        texts = {fingerprint: config_of(str(path))["data"]["name"] for fingerprint, path in paths.items()}
        summary = summary.assign(**{"data.name": summary["fingerprint.data"].map(texts)})
    check_columns(summary, columns)
    # Each group then has one rate, so no search chooses between rates.
    if "train.lr" in columns:
        summary = summary.assign(searched=False)
    finished = set(finished_runs(summary)[0].index)
    groups = {}
    # pandas makes a tuple of each value if it gets a list, even of one column
    keys = columns if len(columns) > 1 else group_by
    for value, group in summary.groupby(keys, sort=True):
        # A group without a finished run has nothing to compare.
        if finished & set(group.index):
            groups[group_text(value)] = build(group, rows, baseline, margin, group_by)
    return groups


def check_columns(summary: pd.DataFrame, columns: list[str]) -> None:
    """Raise ConfigError if runs cannot be grouped by one of these columns. Arguments: summary, a row per run."""
    known = ["experiment", "tokens", "parameters", "dtype", *settings_of(summary)]
    for column in columns:
        if column not in known or summary[column].isna().all():
            # Settings of schemes differ anyway, so they are no help.
            varied = [c for c in known if summary[c].astype(str).nunique() > 1 and not c.startswith("scheme.")]
            differ = ", ".join(varied) or "nothing but the scheme and the seed"
            raise ConfigError(f"--by {column!r} is not a column of these runs; they differ in {differ}")


def groups_page(groups: Groups, group_by: str) -> Page:
    """Return the page of a grouped report. Arguments: group_by, the column whose values the groups share."""
    runs = pd.concat([c.runs for c in groups.values()])
    experiments = list(dict.fromkeys(runs["experiment"]))
    names = ", ".join(experiments)
    # More names would not fit the title.
    if len(experiments) > 3:
        names = f"{len(experiments)} experiments"
    notes = _differences(runs, group_by)
    for c in groups.values():
        notes += [*c.left_out, *c.notes, *chain(*c.holes.values())]
    rows, cells, pairs = [], [], []
    for value, c in groups.items():
        rows += [{"group": value, **row} for row in numbers(c)]
        cells.append(c.cells.assign(group=value))
        pairs.append(c.pairs.assign(group=value))
    return Page(
        title=f"{names} by {group_by}",
        lede=f"Runs of {len(groups)} values of {group_by}: {', '.join(groups)}. Losses are in nats per token; lower is "
        "better.",
        paragraph=paragraph("groups_paragraph", _facts(groups, group_by == "train.lr")),
        sections=sections_of_groups(groups, group_by),
        runs=runs,
        setup=[(f"{group_by}={value}", models(c)) for value, c in groups.items()],
        notes=notes,
        numbers=rows,
        files={"table.csv": pd.concat(cells), "pairs.csv": pd.concat(pairs)},
        closing="Files: table.csv (every figure of each group), pairs.csv, runs.csv; columns.csv explains their "
        "columns.",
    )


def _differences(runs: pd.DataFrame, group_by: str) -> list[str]:
    # Return a line for each way in which the groups differ besides `group_by`.
    shared = [column for column in settings_of(runs) if not column.startswith("scheme.")]
    shared = [column for column in shared if column not in group_by.split(",")]
    differing = [column for column in shared if runs[column].astype(str).nunique() > 1]
    lines = []
    if differing:
        lines.append(f"the groups also differ in {', '.join(differing)}")
    if runs["fingerprint.data"].nunique() > 1:
        lines.append("the groups were trained on different text")
    return lines


def _facts(groups: Groups, is_rate: bool) -> dict[str, Any]:
    # Return what the paragraph of the page says. Arguments: is_rate, whether the groups are learning rates.
    # Mean losses: a row per scheme, a column per group, NaN if the scheme has no run there.
    means = pd.DataFrame({value: c.losses.mean() for value, c in groups.items()})
    # Only schemes with several groups have a best one.
    tried = means[means.notna().sum(axis=1) > 1]
    best_groups = tried.idxmin(axis=1)
    # A best value at the edge of those tried may not be the best.
    at_edge = []
    for scheme, row in tried.iterrows():
        values = row.dropna().index  # the groups in which it was tried, ascending
        if best_groups[str(scheme)] in (values[0], values[-1]):
            at_edge.append(str(scheme))
    tested_groups = [c for c in groups.values() if c.can_rank and c.wanted_baseline in c.schemes]
    wins: Counter[str] = Counter()  # scheme -> the number of groups in which it beats the baseline
    for c in tested_groups:
        wins.update(scheme for scheme in c.schemes if verdict(c.pairs, scheme, c.baseline).startswith("better"))
    lowest_losses = means.min(axis=1).nsmallest(3)
    return {
        "is_rate": is_rate,
        "best": best_groups,
        "at_edge": at_edge,
        "lowest_at_best": [(scheme, means.loc[scheme].idxmin()) for scheme in lowest_losses.index],
        "groups": len(groups),
        "tested": len(tested_groups),
        "scopes": sorted({c.scope for c in tested_groups}),
        "unfinished": [value for value, c in groups.items() if c.unfinished],
        "baseline": next(iter(groups.values())).wanted_baseline,
        "lowest": Counter(c.schemes[0] for c in groups.values()).most_common(),
        "better": wins.most_common(),
    }


def sections_of_groups(groups: Groups, group_by: str) -> list[Section]:
    """Return the sections of a report about groups of runs. Arguments: group_by, the column that they share."""
    is_rate = group_by == "train.lr"
    cells = _sorted(cells_by_group(groups), is_rate)
    title = f"Loss by scheme and {group_by}"
    latex = ("loss", f"{title}, nats/token; bold: the best of each row.")
    loss = Section(title, table=loss_by_group(groups, cells, is_rate), note=prose("losses_by", is_rate), latex=latex)
    title = f"Gap to the baseline by scheme and {group_by}"
    latex = ("gap", f"{title}, nats/token.")
    gap = Section(title, table=gap_by_group(groups, cells), note=prose("gaps_by"), latex=latex)
    # Losses answer the question about learning rates, gaps the others: the terminal shows the first table.
    shown, other = (loss, gap) if is_rate else (gap, loss)
    sections = [shown, other]
    by_pair = pairs_by_group(groups)
    if not is_rate and 0 < len(by_pair) <= MOST_PAIRS:
        sections.append(Section(f"Pairs by {group_by}", table=by_pair, note=prose("pairs_by", groups)))
    # Only two groups can be compared by one difference of gaps.
    differences = interactions(groups)
    if len(differences):
        title = f"Difference of gaps between two values of {group_by}"
        note = prose("interactions", list(groups), _own_matrices(groups))
        table, files = interaction_table(groups, differences), {"interaction.csv": differences}
        sections.append(Section(title, table=table, note=note, files=files))
    sections += chain.from_iterable(protocol.group_sections(groups) for protocol in PROTOCOLS.values())
    return sections


def cells_by_group(groups: Groups) -> pd.DataFrame:
    """Return the final losses, a row per scheme and group: loss and gap with intervals, and marks for the tables."""
    parts = []
    for value, c in groups.items():
        part = c.ranking.assign(group=value, loss_half=half(c.ranking, "loss"), gap_half=half(c.ranking, "gap"))
        is_decided = part["verdict"].str.startswith(("better", "worse"))
        part["mark"] = is_decided.map({True: "\\*", False: ""})  # escaped: a star has a meaning in Markdown
        is_baseline = part["scheme"] == c.baseline
        # The baseline's gap to itself is 0 by definition and has no interval.
        part["gap_half"] = part["gap_half"].mask(is_baseline)
        # Without the wanted baseline, gaps would be to another scheme than in the other groups.
        if c.wanted_baseline not in c.schemes:
            part[["gap", "gap_half"]] = math.nan
        parts.append(part)
    cells = pd.concat(parts, ignore_index=True)
    # The best group of each scheme; with one group every one would be.
    is_best = cells["loss"] == cells.groupby("scheme")["loss"].transform("min")
    return cells.assign(is_best=is_best & (len(groups) > 1))


def loss_by_group(groups: Groups, cells: pd.DataFrame, is_rate: bool) -> Table:
    """Return the loss, a row per scheme and a column per group; each scheme's lowest is bold.

    If the groups are learning rates, the last column is the gap to the baseline at each scheme's best rate.
    """
    titles = {value: value for value in groups}
    table = pivot(cells, titles, "group", "loss", Format(half="loss_half", bold="is_best"))
    baseline = next(iter(groups.values())).wanted_baseline
    best_groups = cells[cells["is_best"]].set_index("scheme")["group"]
    # No group may have a run of the baseline.
    if not is_rate or baseline not in best_groups:
        return table
    # Gaps are taken within each seed, although the rates of the two schemes may differ.
    gaps, halves = [], []
    at_best = {scheme: groups[group].losses[scheme] for scheme, group in best_groups.items()}
    for scheme in table.frame["scheme"]:
        mean, low, high = interval((at_best[scheme] - at_best[baseline]).dropna())
        half_width = (high - low) / 2
        if scheme == baseline:
            half_width = math.nan
        gaps.append(mean)
        halves.append(half_width)
    table.add(f"gap to {baseline} at best rates", gaps, halves, sign=True)
    return table


def gap_by_group(groups: Groups, cells: pd.DataFrame) -> Table:
    """Return the gap to the baseline, a row per scheme and a column per group; `*` marks a decided one."""
    titles = {value: value for value in groups}
    return pivot(cells, titles, "group", "gap", Format(half="gap_half", sign=True, after="mark"))


def _sorted(cells: pd.DataFrame, is_rate: bool) -> pd.DataFrame:
    # By each scheme's lowest loss if groups are learning rates, else by its mean gap.
    of_scheme = cells.groupby("scheme")
    level = of_scheme["gap"].transform("mean")
    if is_rate:
        level = of_scheme["loss"].transform("min")
    return cells.assign(level=level).sort_values(["level", "scheme"], kind="stable").drop(columns="level")


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


def interactions(groups: Groups) -> pd.DataFrame:
    """Return how the gaps of claimed pairs differ between two groups of runs, a row per pair; no rows otherwise."""
    if len(groups) != 2:
        return pd.DataFrame()
    first, second = groups.values()
    shared = [scheme for scheme in first.schemes if scheme in second.schemes]
    pairs = [pair for pair in combinations(shared, 2) if not first.fixed or frozenset(pair) in first.fixed]
    figures = interaction(first.losses, second.losses, pairs)
    # Without enough seeds in both groups there is no test.
    if not (first.can_rank and second.can_rank):
        figures["p"] = math.nan
    return figures


def interaction_table(groups: Groups, figures: pd.DataFrame) -> Table:
    """Return the table of `interactions`."""
    first, second = groups  # the values that the two groups share, as text
    titles = {"first_gap": f"gap, {first}", "second_gap": f"gap, {second}"}
    titles |= {"left": "lower loss", "right": "higher loss"}
    frame = figures.assign(half=half(figures, "difference"), p=figures["p"].astype(object).fillna("not tested"))
    frame = frame[["left", "right", "seeds", "first_gap", "second_gap", "difference", "half", "p"]]
    formats = {title: Format(sign=True) for title in titles.values()}
    formats |= {"difference": Format(half="half", sign=True), "p": Format("p")}
    return Table(frame.rename(columns=titles), formats)


def _own_matrices(groups: Groups) -> list[str]:
    # Schemes with matrices of their own: AdamW trains these beside Muon.
    runs = pd.concat([c.runs for c in groups.values()])
    if "own_matrices" not in runs:
        return []
    return sorted(set(runs.loc[runs["own_matrices"].fillna(0) > 0, "scheme"]))
