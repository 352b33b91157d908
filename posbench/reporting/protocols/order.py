"""Show how far back order matters to each scheme, and when schemes begin to use long-range order."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from posbench.analysis.comparison import Comparison, SeedComparison
from posbench.analysis.long_range_order import LongRangeOrder, Worth
from posbench.analysis.statistics import flip_test
from posbench.config.units import DASH, short_count
from posbench.evaluation.protocols.order import FAR, LOST_ORDER, ONSET, REACH, onset
from posbench.reporting.page import prose
from posbench.reporting.section import Format, Plot, Section, Table, by_distance, half, in_order

CONTEXT = "What a model uses of its context"  # title of a section
ONSETS = "When schemes begin to use long-range order"  # title of a section
THRESHOLDS = (0.02, ONSET, 0.1)  # onsets at these are shown beside each other
DIGITS = 4  # decimals of a figure without an interval: on prose, order is worth thousandths of a nat
WORTH = "order beyond 32"  # title of a column
IDENTITY_WORTH = "identity beyond 32"
COPYABLE_WORTH = "on copyable targets"


def sections(c: Comparison) -> list[Section]:
    return [*_by_distance_section(c), *_onset_sections(c)]


def _by_distance_section(c: Comparison) -> list[Section]:
    cells, holes = c.at("order", metric=LOST_ORDER), c.holes.get(("order", ""), [])
    if cells.empty:
        return [Section(CONTEXT, holes)] if holes else []
    longest = cells[cells["length"] == cells["length"].max()]
    nearest_length = min(set(cells["length"]), key=lambda n: abs(n - c.training_length))
    nearest = cells[cells["length"] == nearest_length]
    distances = sorted(set(nearest["first"]))
    # Only every other one of many distances, to keep the table narrow.
    if len(distances) > 5:
        distances = distances[::2]
    table = by_distance(nearest[nearest["first"].isin(distances)], c.schemes, "d={}")
    table.frame.insert(1, "reach", table.frame["scheme"].map(reach(nearest)))
    middles = np.sqrt(longest["first"] * longest["last"])  # of the buckets, on the log scale of the picture
    points = longest.assign(x=middles, y=longest["value"])
    caption = (
        "How much the loss rises when everything more than d tokens back is shuffled; logarithmic beyond ±0.01 nats."
    )
    # Two seeds give no useful intervals.
    if points["seeds"].min() > 2:
        points = points.assign(low=points["value_low"], high=points["value_high"])
        caption += " Bands are 95 % intervals over seeds."
    plot = Plot(
        "order",
        "lines",
        caption,
        in_order(points, c.schemes),
        "distance d, tokens",
        "loss without order, nats/token",
        level=0,
        y_scale="symlog",
    )
    note = "Cells: rise in loss, in nats, when everything more than d tokens back is shuffled. "
    note += f"Reach: the largest d whose interval is above {REACH}. "
    latex = ("context", "Rise of the loss without the order of tokens more than d back, nats/token.")
    return [Section(CONTEXT, holes, [plot], table, note, latex)]


def _onset_sections(c: Comparison) -> list[Section]:
    if not (c.has_onsets and np.isfinite(c.runs["onset_tokens"]).any()):
        return []
    lines = in_order(c.logged("order", [FAR]), c.schemes)
    onsets = c.onsets.melt(value_name="x").assign(y=ONSET)
    plot = Plot(
        "onset",
        "panels",
        "What order more than 32 tokens back is worth while training, on validation text. Each line is a seed; dots: "
        f"when it reaches {ONSET} nats, the horizontal line.",
        lines.rename(columns={"tokens": "x", FAR: "y"}),
        "tokens trained on",
        "worth of long-range order, nats/token",
        onsets[np.isfinite(onsets["x"])],
        level=ONSET,
    )
    note = (
        f"Tokens until order more than 32 tokens back is worth {ONSET} nats a token; >: not by the end. Long-range "
        "order: how many seeds reach that. p: exact sign-flip test over seeds, uncorrected; a seed that does not "
        "reach it counts as the full budget. With n seeds that differ, p is at least 2/2^n."
    )
    thresholds_note = (
        "The same at other thresholds: median tokens until that order is worth as much, and in brackets how many "
        "seeds get there."
    )
    return [
        Section(ONSETS, plots=[plot], table=onset_table(c), note=note, after_protocols=True),
        Section("", table=threshold_table(lines, c), note=thresholds_note, after_protocols=True),
    ]


def onsets_by_group(groups: Mapping[str, Comparison]) -> list[Section]:
    """Return the section on the mean onsets of groups of runs, or [] if a group logged none."""
    if not all(group.has_onsets for group in groups.values()):
        return []
    rows = []
    for name, group in groups.items():
        # A seed that never begins counts as the full budget.
        means = group.onsets.clip(upper=float(group.runs["tokens"].iloc[0])).mean()
        row = {"group": name}
        for scheme, mean in means.dropna().sort_index().items():
            row[str(scheme)] = f"{short_count(round(mean))} ({count_onsets(group.onsets[scheme])})"
        rows.append(row | {"mean of schemes": short_count(round(means.mean()))})
    note = (
        f"Mean tokens until order more than 32 tokens back is worth {ONSET} nats; in brackets, how many "
        "seeds reach that. A seed that does not counts as the full budget."
    )
    return [Section(ONSETS, table=Table.of(rows), note=note)]


def onset_table(c: Comparison) -> Table:
    """Return a row per scheme: the tokens after which it began to use the order of tokens more than 32 back.

    A seed that never began is shown as `>N`, with N the tokens it was trained on.
    """
    budget = float(c.runs["tokens"].iloc[0])
    text = partial(onset_text, budget=budget)
    rows = []
    p_column = f"p against {c.baseline}"
    # Of an even number of seeds the earlier of the middle two, so that half of all had begun by then.
    medians = c.onsets.quantile(0.5, interpolation="lower").dropna().sort_values(kind="stable")
    # The test takes the budget as the onset of a seed that never began.
    times = c.onsets.clip(upper=budget)
    for scheme, median in medians.items():
        onsets = c.onsets[scheme].dropna()
        row: dict[str, Any] = {
            "scheme": scheme,
            "long-range order": count_onsets(onsets),
            "median tokens": text(median),
        }
        row["each seed"] = ", ".join(map(text, onsets))
        differences = (times[scheme] - times[c.baseline]).dropna().to_numpy()
        row[p_column] = math.nan  # the baseline is not tested against itself
        if scheme != c.baseline:
            row[p_column] = flip_test(differences)
        rows.append(row)
    return Table.of(rows, {p_column: Format("p")})


def threshold_table(lines: pd.DataFrame, c: Comparison) -> Table:
    """Return a row per scheme: the median onset in tokens at each of THRESHOLDS, and how many seeds have one.

    Arguments: lines, a row per run and scoring: scheme, seed, tokens, FAR.
    """
    rows = []
    budget = float(c.runs["tokens"].iloc[0])  # tokens that all runs were trained on
    for scheme in c.schemes:
        runs = [run for _, run in lines[lines["scheme"] == scheme].groupby("seed")]
        row = {"scheme": scheme}
        for threshold in THRESHOLDS:
            # Infinite if order is not worth it at the end.
            onsets = pd.Series([onset(run["tokens"], run[FAR].to_numpy(), threshold) for run in runs])
            median = float(onsets.quantile(0.5, interpolation="lower"))  # the earlier of the middle two
            row[f"{threshold:g} nats"] = f"{onset_text(median, budget)} ({count_onsets(onsets)})"
        rows.append(row)
    return Table.of(rows)


def onset_text(tokens: float, budget: float) -> str:
    """Return an onset as text; `>12.3M` if there was none in a budget of 12.3 million tokens."""
    if math.isfinite(tokens):
        return short_count(round(tokens))
    return f">{short_count(budget)}"


def count_onsets(onsets: pd.Series) -> str:
    """Return how many seeds use long-range order at the end, as text: `3/5`; a dash if none was scored."""
    scored = onsets.dropna()
    if scored.empty:
        return DASH
    return f"{np.isfinite(scored).sum()}/{len(scored)}"


def reach(cells: pd.DataFrame) -> dict[str, str]:
    """Return for each scheme how far back order matters: `16`; `≥ 64` if at all distances; `0` if at none.

    It is the largest distance up to which the loss without order is at least REACH at the lower end of its interval.
    """
    reaches = {}
    for scheme, places in cells.sort_values("first").groupby("scheme"):
        # The lower of the intervals over seeds and over documents; `fmin` takes the other one if one is NaN.
        lower_ends = np.fmin(places["value_low"].to_numpy(), (places["value"] - places["value_documents"]).to_numpy())
        fails = np.flatnonzero(~(lower_ends >= REACH))  # NaN, an interval that is not known, fails too
        last = places["last"].to_numpy()
        reach = f"≥ {last[-1]}"
        if len(fails):
            first_failing = fails[0]
            reach = str(last[first_failing - 1]) if first_failing else "0"
        reaches[str(scheme)] = reach
    return reaches


# ---------------------------------------------------------------- what order more than 32 tokens back is worth


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
    if order.on_copyable is not None:
        files["copyable_order_pairs.csv"] = order.on_copyable.pairs
    note = prose("long_range_order", order, order.on_all.is_tested and not c.unfinished, c.scope)
    latex = ("order", "What order more than 32 tokens back is worth, nats/token.")
    table = long_range_order_table(c, order)
    return [Section("Order more than 32 tokens back", table=table, note=note, latex=latex, files=files)]


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
