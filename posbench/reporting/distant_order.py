"""Show what the order of tokens more than 32 back is worth to each scheme, without a threshold."""

from __future__ import annotations

import pandas as pd

from posbench.analysis.comparison import Comparison
from posbench.analysis.distant_order import DistantOrder
from posbench.config.units import DASH, plus_minus
from posbench.evaluation.protocols.section import Format, Plot, Section, Table, half, in_order
from posbench.reporting.page import prose

DIGITS = 4  # decimals of a figure without an interval: on prose, order is worth thousandths of a nat
WORTH = "order beyond 32"  # title of a column
IDENTITY_WORTH = "identity beyond 32"
COPYABLE_WORTH = "on copyable targets"


def order_users(c: Comparison) -> list[str]:
    """Return the schemes that use order beyond 32 tokens by the tests, each with what it is worth, as text."""
    if c.distant_order is None:
        return []
    figures = c.distant_order.figures.set_index("scheme")
    texts = []
    for scheme in c.distant_order.users:
        row = figures.loc[scheme]
        texts.append(f"{scheme} ({plus_minus(row['value'], half(row, 'value'))} nats)")
    return texts


def distant_order_section(c: Comparison) -> list[Section]:
    """Return the section on order beyond 32 tokens, or [] if the runs have no results of `order` that far back.

    It has no table if it would only repeat the column d=33 of the table of distances: with too few seeds for tests, and
    without copyable targets.
    """
    order = c.distant_order
    if order is None:
        return []
    if not order.is_tested and order.copyable.empty:
        return [Section("", files={"order_pairs.csv": order.pairs})]
    files = {"order_pairs.csv": order.pairs}
    note = prose("distant_order", order, order.is_tested and not c.unfinished, c.scope)
    latex = ("order", "What order more than 32 tokens back is worth, nats/token.")
    table = distant_order_table(c, order)
    plots = [] if order.copyable.empty else [_picture(c, order)]
    return [Section("Order more than 32 tokens back", plots=plots, table=table, note=note, latex=latex, files=files)]


def _picture(c: Comparison, order: DistantOrder) -> Plot:
    """Return the picture of what this order is worth on copyable targets, where most of it is."""
    figures = in_order(order.copyable, c.schemes)
    uses = order.figures.set_index("scheme")["is_used"]
    marks = pd.DataFrame({"scheme": figures["scheme"], "x": figures["value"], "half": half(figures, "value")})
    marks["is_open"] = [not uses[scheme] for scheme in figures["scheme"]]
    caption = (
        "What order more than 32 tokens back is worth on targets that a copier predicts from there; 95 % intervals; "
        "hollow: not shown to be used."
    )
    seeds = pd.DataFrame(columns=["scheme", "x"])
    return Plot("copyable", "gaps", caption, seeds, "nats/token", "", marks)


def distant_order_table(c: Comparison, order: DistantOrder) -> Table:
    """Return a row per scheme: what order beyond 32 tokens is worth, whether it is used, and what the tests decide.

    Pairs are left out while a search for learning rates is unfinished.
    """
    figures = in_order(order.figures, c.schemes)
    frame = pd.DataFrame({"scheme": figures["scheme"], "seeds": figures["seeds"], WORTH: figures["value"]})
    frame[f"{WORTH}: half"] = half(figures, "value")
    formats = {WORTH: Format(digits=DIGITS, half=f"{WORTH}: half")}
    if order.is_tested:
        shown = figures["is_used"].map({True: "yes", False: "not shown"})
        frame["used"] = shown.where(figures["p"].notna(), DASH)
    if order.is_tested and not c.unfinished:
        frame["worth more than"] = ["{}/{}".format(*order.decided(scheme)) for scheme in figures["scheme"]]
    for column, further in ((IDENTITY_WORTH, order.identity), (COPYABLE_WORTH, order.copyable)):
        if further.empty:
            continue
        of_scheme = further.set_index("scheme").reindex(figures["scheme"])
        frame[column] = of_scheme["value"].to_numpy()
        frame[f"{column}: half"] = half(of_scheme, "value").to_numpy()
        formats[column] = Format(digits=DIGITS, half=f"{column}: half")
    return Table(frame, formats)
