"""Show how gaps change with the setup: a table of schemes, a picture of each one's gaps, and the factors' effects."""

from __future__ import annotations

from typing import Any

import pandas as pd

from posbench.analysis.setups import SetupComparison
from posbench.reporting.page import prose
from posbench.reporting.section import Format, Plot, Section, Table

SIGNED = Format(sign=True)


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
    # Return the picture of a scheme's gaps, sorted, above the levels of each setup.
    points = c.described[c.described["scheme"] == scheme].rename(columns={"gap": "y"})
    order = points.groupby("setup")["y"].mean().sort_values().index
    points = points.assign(x=points["setup"].map(list(order).index))
    levels = pd.DataFrame(c.levels[list(order)], columns=[name.replace("_", " ") for name in c.factors])
    caption = (
        f"Gap of {scheme} to {c.baseline} in each setup, sorted. Below: dark, the second level of a factor. Several "
        "dots: seeds of a replicated setup."
    )
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
