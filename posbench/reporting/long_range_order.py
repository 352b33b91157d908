"""Show what the order of tokens more than 32 back is worth to each scheme, without a threshold."""

from __future__ import annotations

import pandas as pd

from posbench.analysis.comparison import SeedComparison
from posbench.analysis.long_range_order import LongRangeOrder, Worth
from posbench.config.units import DASH
from posbench.reporting.page import prose
from posbench.reporting.section import Plot, Section, Table, half, in_order

DIGITS = 4  # decimals of a figure without an interval: on prose, order is worth thousandths of a nat
WORTH = "order beyond 32"  # title of a column
IDENTITY_WORTH = "identity beyond 32"
COPYABLE_WORTH = "on copyable targets"


def long_range_order_section(c: SeedComparison) -> list[Section]:
    """Return the section on order beyond 32 tokens, or [] if the runs have no results of `order` that far back."""
    order = c.long_range_order
    if order is None:
        return []
    files = {"order_pairs.csv": order.on_all.pairs}
    # Without tests and copyable targets, a table would only repeat the column d=33 of the table of distances, so only
    # the file is written.
    if order.on_copyable is None and not order.on_all.is_tested:
        return [Section("", files=files)]
    plots = []
    if order.on_copyable is not None:
        files["copyable_order_pairs.csv"] = order.on_copyable.pairs
        plots.append(_picture(c, order.on_copyable))
    note = prose("long_range_order", order, order.on_all.is_tested and not c.unfinished, c.scope)
    latex = ("order", "What order more than 32 tokens back is worth, nats/token.")
    table = long_range_order_table(c, order)
    return [Section("Order more than 32 tokens back", plots=plots, table=table, note=note, latex=latex, files=files)]


def _picture(c: SeedComparison, copyable: Worth) -> Plot:
    # Return the picture of what order beyond 32 tokens is worth to each scheme on copyable targets.
    figures = in_order(copyable.figures, c.schemes)
    marks = pd.DataFrame({"scheme": figures["scheme"], "x": figures["value"], "half": half(figures, "value")})
    marks["is_open"] = ~figures["is_used"].astype(bool)
    caption = (
        "What order more than 32 tokens back is worth on targets that a copier predicts from there; 95 % intervals; "
        "hollow: not shown to be used there."
    )
    seeds = pd.DataFrame(columns=["scheme", "x"])  # this picture has no dots of seeds
    return Plot("copyable", "gaps", caption, seeds, "nats/token", "", marks)


def long_range_order_table(c: SeedComparison, order: LongRangeOrder) -> Table:
    """Return a row per scheme: what order beyond 32 tokens is worth, whether it is used, and what the tests decide."""
    figures = in_order(order.on_all.figures, c.schemes)
    schemes = figures["scheme"]
    frame = pd.DataFrame({"scheme": schemes, "seeds": figures["seeds"]})
    table = Table(frame)

    # Append a column with intervals. Schemes without these figures get dashes.
    def add(title: str, values: pd.DataFrame) -> None:
        of_scheme = values.set_index("scheme").reindex(schemes)
        table.add(title, of_scheme["value"], half(of_scheme, "value"), digits=DIGITS)

    # Append a column such as `2/3`: in two of three tested pairs, order is worth more to this scheme.
    def add_pairs(title: str, worth: Worth) -> None:
        # Pairs are left out while a search for learning rates is unfinished.
        if worth.is_tested and not c.unfinished:
            frame[title] = ["{}/{}".format(*worth.decided(scheme)) for scheme in schemes]

    add(WORTH, order.on_all.figures)
    if order.on_all.is_tested:
        shown = figures["is_used"].map({True: "yes", False: "not shown"})
        # No test: a dash, not "not shown".
        frame["used"] = shown.where(figures["p"].notna(), DASH)
    add_pairs("worth more than", order.on_all)
    if not order.identity.empty:
        add(IDENTITY_WORTH, order.identity)
    if order.on_copyable is not None:
        add(COPYABLE_WORTH, order.on_copyable.figures)
        add_pairs("more than", order.on_copyable)
    return table
