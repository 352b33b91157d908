"""Show perplexity by length: for protocols that score the same text with windows of several lengths."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd

from posbench.analysis.comparison import Comparison
from posbench.analysis.statistics import WIDE
from posbench.config.units import perplexity_half, perplexity_text, short_length
from posbench.evaluation.protocols import EvalProtocol
from posbench.reporting.section import Format, Plot, Section, Table, half, in_order, pivot
from posbench.runs.results import MARKS


def sections(protocol: EvalProtocol, c: Comparison, every_length: bool) -> list[Section]:
    """Return a section on perplexity by length for each text, and one on options changed at evaluation."""
    sections = []
    texts = {*c.at(protocol.name, text=None, under=None)["text"]}
    # Texts of which every figure is missing still need their note.
    texts |= {text for name, text in c.holes if name == protocol.name}
    for text in sorted(texts):
        cells, holes = (
            c.at(protocol.name, metric="loss", text=text),
            c.holes.get((protocol.name, text), []),
        )
        # A single length has no curve; then only missing figures are worth a section.
        has_curve = cells["length"].nunique() > 1
        if not has_curve and not holes:
            continue
        title = "Perplexity by length"
        if text:
            title += f" on {text}"
        title += f": {protocol.name}"
        plots = [_plot(protocol, c, cells)] if has_curve and not text else []
        table = lengths_table(c, cells, every_length)
        note = ""
        if len(table):
            explained_seeds = seeds_note(cells, c.training_length)
            longest = short_length(c.at(protocol.name, text=text)["length"].max())
            note = f"{protocol.caption} {explained_seeds}Change and gap: differences in loss at {longest}, in nats"
            if c.doubt == "documents":
                note += ", ± half a 95 % interval over documents"
            note += "."
        # A table, and a file, for each text.
        latex = (f"perplexity-{protocol.name}", f"Perplexity by length ({protocol.name}).")
        if text:
            stem = re.sub(r"[^\w.-]", "-", text)
            latex = (f"perplexity-{protocol.name}-{stem}", f"Perplexity by length on {text} ({protocol.name}).")
        sections.append(Section(title, holes, plots, table if len(table) else None, note, latex))
        if not text:
            sections += _other_options(protocol, c)
    return sections


def _plot(protocol: EvalProtocol, c: Comparison, cells: pd.DataFrame) -> Plot:
    caption = "Perplexity against length, both on log scales."
    points = cells.assign(x=cells["length"], y=cells["perplexity"]).dropna(subset="y")
    # Two seeds give no useful intervals.
    if points["seeds"].min() > 2:
        points = points.assign(low=np.exp(points["value_low"]), high=np.exp(points["value_high"]))
        caption += " Bands are 95 % intervals over seeds."
    points = in_order(points, c.schemes, "x")
    return Plot(
        f"perplexity-{protocol.name}",
        "lines",
        caption,
        points,
        "context, tokens",
        "perplexity",
        line=c.training_length,
        x_scale="lengths",
        y_scale="log",
    )


def _other_options(protocol: EvalProtocol, c: Comparison) -> list[Section]:
    cells = c.at(protocol.name, metric="loss", under=None)
    # One changed option each; several at once would need a table of their own.
    cells = cells[~cells["under"].str.contains(" ") & ~cells["under"].isin(MARKS)]
    # At the longest length that was scored with a changed option.
    length = cells.loc[cells["under"] != "", "length"].max()
    table = options_table(c, cells[cells["length"] == length])
    if not len(table):
        return []
    note = f"Perplexity at {short_length(length)} tokens; the best of each row is bold."
    return [Section("Other options at evaluation, without training again", table=table, note=note, level=3)]


def lengths_table(c: Comparison, cells: pd.DataFrame, every_length: bool) -> Table:
    """Return a row per scheme: its perplexity at each length, and its change and gap at the longest length.

    Both are in nats: the change from the training length, and the gap to the baseline. Arguments: every_length, whether
    to show lengths that are neither a multiple nor a part of the training length.
    """
    # Lengths just past the training length are shown only if asked for.
    T, lengths = c.training_length, sorted(set(cells["length"]))
    shown = [n for n in lengths if every_length or n % T == 0 or T % n == 0] or lengths
    cells = in_order(cells, c.schemes, "length").assign(half=shown_half(cells, T))
    cells = with_seeds(cells, T)
    titles = {n: length_title(n, T) for n in shown}
    table = pivot(cells, titles, "length", "shown", Format("perplexity", half="half", after="noise"))
    if table.frame.empty:
        return table
    at_longest = cells[cells["length"] == lengths[-1]].set_index("scheme").reindex(table.frame["scheme"])
    change, gap = f"change from {short_length(T)}", f"gap at {short_length(lengths[-1])}"
    # There is a change only if the training length and a longer one were scored.
    columns = {gap: "gap"}
    if T in lengths and lengths[-1] > T:
        columns = {change: "change", gap: "gap"}
    for title, name in columns.items():
        half_interval = half(at_longest, name)
        if c.doubt == "documents":
            half_interval = at_longest[f"{name}_documents"]
        table.add(title, at_longest[name], half_interval, sign=True)
    # The baseline's gap to itself is 0 at every length.
    table.frame.loc[table.frame["scheme"] == c.baseline, gap] = 0.0
    return table


def shown_half(cells: pd.DataFrame, training_length: int) -> pd.Series:
    """Return the half interval, nats, that decides a perplexity's decimals: of its change, over seeds or documents."""
    of_change = pd.concat([half(cells, "change"), cells["change_documents"]], axis=1).max(axis=1)
    # At the training length nothing changes, so the smallest of the scheme's others decides.
    smallest = of_change.groupby(cells["scheme"]).transform("min")
    return of_change.where(cells["length"] != training_length, smallest)


def with_seeds(cells: pd.DataFrame, training_length: int) -> pd.DataFrame:
    """Return the cells with `shown`, the perplexity or the range of its seeds, and `noise`, its ±, as text."""
    is_beyond = cells["length"] > training_length
    half_of_seeds = half(cells, "value")
    # Seeds that differ by more than WIDE are shown as a range, and so are two seeds beyond the training length.
    is_wide = cells["highest"] - cells["lowest"] > WIDE
    is_range = (cells["seeds"] > 1) & (is_wide | (is_beyond & half_of_seeds.isna()))
    has_noise = is_beyond & ~is_range & half_of_seeds.notna()
    # The ± then decides how many decimals are shown.
    cells = cells.assign(half=cells["half"].where(~has_noise, half_of_seeds), noise="")
    cells["shown"] = cells["perplexity"].astype(object)
    for row in cells[is_range].index:
        ends = np.exp(np.minimum(cells.loc[row, ["lowest", "highest"]].astype(float), 700.0))  # larger would overflow
        cells.loc[row, "shown"] = "–".join(perplexity_text(end) for end in ends)
    for row in cells[has_noise].index:
        cells.loc[row, "noise"] = f" ±{perplexity_half(cells.loc[row, 'perplexity'], cells.loc[row, 'half'])}"
    return cells


def seeds_note(cells: pd.DataFrame, training_length: int) -> str:
    """Return a sentence that explains ± and ranges, or "" if there is one seed."""
    if cells["seeds"].max() < 2:
        return ""
    if cells["seeds"].max() == 2:
        return "Beyond the training length: the range of the seeds. "
    return f"±: half the 95 % interval over seeds; a range if seeds differ by more than {WIDE:g} nat. "


def length_title(length: int, training_length: int) -> str:
    """Return the title of a column of figures at this length: `512`, or `256 (trained)`."""
    title = short_length(length)
    if length == training_length:
        title += " (trained)"
    return title


def options_table(c: Comparison, cells: pd.DataFrame) -> Table:
    """Return perplexities, a row per scheme and a column per changed option; the best of a row is bold."""
    cells = cells.dropna(subset="perplexity")
    of_scheme = cells.groupby("scheme")["perplexity"]
    cells = cells.assign(is_best=cells["perplexity"] == of_scheme.transform("min"))
    # A scheme with one option only has nothing to compare.
    cells = cells[of_scheme.transform("size") > 1]
    options = sorted(set(cells["under"]))
    titles = {option: option.partition("=")[2] or "as trained" for option in options}
    # The same value of two options needs their names.
    if len({*titles.values()}) < len(titles):
        titles = {option: option or "as trained" for option in options}
    return pivot(in_order(cells, c.schemes), titles, "under", "perplexity", Format("perplexity", bold="is_best"))
