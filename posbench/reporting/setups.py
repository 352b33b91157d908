"""Show how gaps change with the setup: a table of schemes, a picture of each one's gaps, and the factors' effects."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pandas as pd

from posbench.analysis.comparison import SeedComparison
from posbench.analysis.setups import SetupComparison, paired_effects
from posbench.config.units import group_text
from posbench.reporting.page import prose
from posbench.reporting.section import Format, Plot, Section, Table, half

SIGNED = Format(sign=True)
Groups = Mapping[str, SeedComparison]  # the value that a group of runs shares, as text -> its runs


def setup_sections(c: SetupComparison) -> list[Section]:
    """Return the sections of a comparison over setups."""
    rows: list[dict[str, Any]] = []
    for scheme in c.compared:
        figures = c.of(scheme).summary
        ahead = f"{figures['ahead']} of {figures['setups']}"
        rows.append({"scheme": scheme, "ahead in setups": ahead, **figures, "spread": figures["residual"]})
    table = Table.of(rows, {"median": SIGNED, "lowest": SIGNED, "highest": SIGNED, "p": Format("p")})
    table.add("mean", table.frame["mean"], table.frame["half"], sign=True)
    hidden = ["setups", "ahead", "residual", "half"]
    shown = Table(table.frame.drop(columns=hidden), table.formats)
    plots = [_picture(c, scheme) for scheme in c.compared]
    latex = ("setups", f"Gaps to {c.baseline} over setups, {c.unit}.")
    return [
        Section("", plots=plots, table=shown, note=prose("setups", c), latex=latex),
        Section("Effects of factors on the gap", table=_effects(c), note=prose("effects", c)),
    ]


def _picture(c: SetupComparison, scheme: str) -> Plot:
    points = c.described[c.described["scheme"] == scheme].rename(columns={"gap": "y"})
    order = list(points[~points["is_branch"]].groupby("setup")["y"].mean().sort_values().index)
    # A setup without a whole pair of runs has no place, and neither have its branches.
    points = points[points["setup"].isin(order)]
    points = points.assign(x=points["setup"].map(order.index))
    levels = pd.DataFrame(c.levels[order], columns=[name.replace("_", " ") for name in c.factors])
    caption = f"Gap of {scheme} to {c.baseline} in each setup, sorted. Below, a strong mark: a factor's second level."
    if c.of(scheme).freedom:
        caption += " Several marks: seeds of a replicated setup."
    if points["is_branch"].any():
        caption += " Fainter: branches, which end after fewer tokens."
    return Plot(f"setups-{scheme}", "setups", caption, points, "setup", f"gap, {c.unit}", levels, level=0)


def _effects(c: SetupComparison) -> Table:
    rows: dict[str, dict[str, Any]] = {}
    for name, (first, second) in c.factors.items():
        rows[name] = {"factor": name.replace("_", " "), "from": " ".join(first), "to": " ".join(second)}
    formats = {}
    for scheme in c.compared:
        formats[scheme] = Format(half=f"{scheme}: half", sign=True)
        for effect in c.of(scheme).effects.to_dict("records"):
            rows[effect["factor"]] |= {scheme: effect["effect"], f"{scheme}: half": effect["half"]}
    return Table.of(list(rows.values()), formats)


# ---------------------------------------------------------------- groups of runs that have the same seeds


def paired_effect_sections(groups: Groups, settings: Sequence[str]) -> list[Section]:
    """Return the section on how settings change the gaps of claimed pairs, paired by seed.

    There is none unless the groups are all combinations of two values of each setting.
    """
    levels = {c.group: _levels(c, settings) for c in groups.values()}
    values = [list(dict.fromkeys(of_setting)) for of_setting in zip(*levels.values(), strict=True)]
    is_design = all(len(of_setting) == 2 for of_setting in values) and len(groups) == 2 ** len(settings)
    if not is_design or set(levels.values()) != set(product(*values)):
        return []
    first, *others = groups.values()
    shared = [scheme for scheme in first.schemes if all(scheme in c.schemes for c in others)]
    pairs = [pair for pair in combinations(shared, 2) if not first.fixed or frozenset(pair) in first.fixed]
    figures = paired_effects({levels[c.group]: c.values for c in groups.values()}, settings, pairs)
    # Without enough seeds in every group there is no test.
    if not all(c.can_rank for c in groups.values()):
        figures["p"] = math.nan
    if figures.empty:
        return []
    names = dict(zip(settings, values, strict=True))
    title = f"Difference of gaps between two values of {' and of '.join(settings)}"
    note = prose("paired_effects", names, _own_matrices(groups))
    files = {"interaction.csv": figures}
    return [Section(title, table=paired_effect_table(figures, names), note=note, files=files)]


def _levels(c: SeedComparison, settings: Sequence[str]) -> tuple[str, ...]:
    # All runs of a group share these values.
    return tuple(group_text(c.runs[setting].iloc[0]) for setting in settings)


def paired_effect_table(figures: pd.DataFrame, names: Mapping[str, Sequence[str]]) -> Table:
    """Return the table of `paired_effects`. Arguments: names, {setting: the text of its two values}."""
    titles = {"first_gap": "gap, first value", "second_gap": "gap, second value"}
    if len(names) == 1:
        [(first, second)] = names.values()
        titles = {"first_gap": f"gap, {first}", "second_gap": f"gap, {second}"}
    titles |= {"left": "lower loss", "right": "higher loss", "factor": "setting"}
    frame = figures.assign(half=half(figures, "difference"), p=figures["p"].astype(object).fillna("not tested"))
    frame = frame[["factor", "left", "right", "seeds", "first_gap", "second_gap", "difference", "half", "p"]]
    formats = dict.fromkeys(titles.values(), SIGNED)
    formats |= {"difference": Format(half="half", sign=True), "p": Format("p")}
    # The heading names a single setting.
    shown = frame if len(names) > 1 else frame.drop(columns="factor")
    return Table(shown.rename(columns=titles), formats)


def _own_matrices(groups: Groups) -> list[str]:
    # Schemes with matrices of their own: AdamW trains these beside Muon.
    runs = pd.concat([c.runs for c in groups.values()])
    if "own_matrices" not in runs:
        return []
    return sorted(set(runs.loc[runs["own_matrices"].fillna(0) > 0, "scheme"]))
