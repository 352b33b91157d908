"""Report perplexity by length: the base of protocols that score the same text with windows of several lengths."""

from __future__ import annotations

import re
from typing import ClassVar

import numpy as np
import pandas as pd

from posbench.config.units import perplexity_half, perplexity_text, short_length
from posbench.evaluation.protocols.section import (
    ComparedRuns,
    Format,
    Plot,
    Section,
    Table,
    half,
    in_order,
    pivot,
)
from posbench.evaluation.protocols.windowed import Windowed
from posbench.runs.results import MARKS

WIDE = 1.0  # nats per token: a mean over seeds that differ by more says little, so the range is shown


class ByLength(Windowed):
    """Base class of protocols whose report shows perplexity against length, on the test split."""

    is_by_length: ClassVar[bool] = True

    def sections(self, compared: ComparedRuns, every_length: bool) -> list[Section]:
        """Return a section on perplexity by length for each text, and one on options changed at evaluation."""
        sections = []
        texts = {*compared.at(self.name, text=None, under=None)["text"]}
        # Texts of which every figure is missing still need their note.
        texts |= {text for protocol, text in compared.holes if protocol == self.name}
        for text in sorted(texts):
            cells, holes = compared.at(self.name, metric="loss", text=text), compared.holes.get((self.name, text), [])
            # A single length has no curve; then only missing figures are worth a section.
            has_curve = cells["length"].nunique() > 1
            if not has_curve and not holes:
                continue
            title = "Perplexity by length"
            if text:
                title += f" on {text}"
            title += f": {self.name}"
            plots = [self._plot(compared, cells)] if has_curve and not text else []
            table = lengths_table(compared, cells, every_length)
            note = ""
            if len(table):
                explained_seeds = seeds_note(cells, compared.training_length)
                longest = short_length(compared.at(self.name, text=text)["length"].max())
                note = f"{self.caption} {explained_seeds}Change and gap: differences in loss at {longest}, in nats"
                if compared.doubt == "documents":
                    note += ", ± half a 95 % interval over documents"
                note += "."
            # A table, and a file, for each text.
            latex = (f"perplexity-{self.name}", f"Perplexity by length ({self.name}).")
            if text:
                stem = re.sub(r"[^\w.-]", "-", text)
                latex = (f"perplexity-{self.name}-{stem}", f"Perplexity by length on {text} ({self.name}).")
            sections.append(Section(title, holes, plots, table if len(table) else None, note, latex))
            if not text:
                sections += self._other_options(compared)
        return sections

    def _plot(self, compared: ComparedRuns, cells: pd.DataFrame) -> Plot:
        caption = "Perplexity against length, both on log scales"
        if not compared.runs["is_relative"].astype(bool).all():
            caption += "; dashed: scores depend on more than distance"
        caption += "."
        points = cells.assign(x=cells["length"], y=cells["perplexity"]).dropna(subset="y")
        # Two seeds give no useful intervals.
        if points["seeds"].min() > 2:
            points = points.assign(low=np.exp(points["value_low"]), high=np.exp(points["value_high"]))
            caption += " Bands are 95 % intervals over seeds."
        points = in_order(points, compared.schemes, "x")
        return Plot(f"perplexity-{self.name}", "lengths", caption, points, line=compared.training_length)

    def _other_options(self, compared: ComparedRuns) -> list[Section]:
        cells = compared.at(self.name, metric="loss", under=None)
        # One changed option each; several at once would need a table of their own.
        cells = cells[~cells["under"].str.contains(" ") & ~cells["under"].isin(MARKS)]
        # At the longest length that was scored with a changed option.
        length = cells.loc[cells["under"] != "", "length"].max()
        table = options_table(compared, cells[cells["length"] == length])
        if not len(table):
            return []
        note = f"Perplexity at {short_length(length)} tokens; the best of each row is bold."
        return [Section("Other options at evaluation, without training again", table=table, note=note, level=3)]


def lengths_table(compared: ComparedRuns, cells: pd.DataFrame, every_length: bool) -> Table:
    """Return a row per scheme: its perplexity at each length, and its change and gap at the longest length.

    Both are in nats: the change from the training length, and the gap to the baseline. Arguments: every_length, whether
    to show lengths that are neither a multiple nor a part of the training length.
    """
    # Lengths just past the training length are shown only if asked for.
    T, lengths = compared.training_length, sorted(set(cells["length"]))
    shown = [n for n in lengths if every_length or n % T == 0 or T % n == 0] or lengths
    cells = in_order(cells, compared.schemes, "length").assign(half=shown_half(cells, T))
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
        if compared.doubt == "documents":
            half_interval = at_longest[f"{name}_documents"]
        table.add(title, at_longest[name], half_interval, sign=True)
    # The baseline's gap to itself is 0 at every length.
    table.frame.loc[table.frame["scheme"] == compared.baseline, gap] = 0.0
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


def options_table(compared: ComparedRuns, cells: pd.DataFrame) -> Table:
    """Return perplexities, a row per scheme and a column per changed option; the best of a row is bold."""
    cells = cells.dropna(subset="perplexity")
    of_scheme = cells.groupby("scheme")["perplexity"]
    cells = cells.assign(is_best=cells["perplexity"] == of_scheme.transform("min"))
    # A scheme with one option only has nothing to compare.
    cells = cells[of_scheme.transform("size") > 1]
    titles = {option: option.partition("=")[2] or "as trained" for option in sorted(set(cells["under"]))}
    return pivot(in_order(cells, compared.schemes), titles, "under", "perplexity", Format("perplexity", bold="is_best"))
