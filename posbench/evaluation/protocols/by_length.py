"""Report perplexity by length: the base of protocols that score the same text with windows of several lengths."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import pandas as pd

from posbench.config.units import DASH, number, perplexity_text, short_length
from posbench.evaluation.protocols.section import ComparedRuns, Plot, Section, text_table
from posbench.evaluation.protocols.windowed import Windowed
from posbench.runs.results import MARKS


class ByLength(Windowed):
    """Base class of protocols whose report shows perplexity against length, on the test split."""

    is_by_length: ClassVar[bool] = True

    def sections(self, compared: ComparedRuns, every_length: bool) -> list[Section]:
        """Return the report's sections on perplexity by length, one per text, and one on options changed at evaluation.

        Arguments: compared, the runs to compare and the numbers measured in them; every_length, whether to show lengths
        that are neither a multiple nor a part of the training length.
        """
        sections = []
        texts = {*compared.at(self.name, text=None, under=None)["text"]}
        texts |= {text for protocol, text in compared.holes if protocol == self.name}
        for text in sorted(texts):
            cells, holes = compared.at(self.name, metric="loss", text=text), compared.holes.get((self.name, text), [])
            many = cells["length"].nunique() > 1
            if not many and not holes:
                continue
            title = f"Perplexity by length{f' on {text}' if text else ''}: {self.name}"
            plots = [self._plot(compared, cells)] if many and not text else []
            table = lengths_table(compared, cells, every_length)
            longest = short_length(compared.at(self.name, text=text)["length"].max()) if len(table) else ""
            note = f"{self.caption} Change and gap: differences in loss at {longest}, in nats." if len(table) else ""
            latex = (f"perplexity-{self.name}", f"Perplexity by length ({self.name}).")
            sections.append(Section(title, holes, plots, table if len(table) else None, note, latex))
            if not text:
                sections += self._other_options(compared)
        return sections

    def _plot(self, compared: ComparedRuns, cells: pd.DataFrame) -> Plot:
        are_relative = compared.runs["is_relative"].astype(bool).all()
        dashed = "" if are_relative else "; dashed: scores depend on more than distance"
        caption = f"Perplexity against length, both on log scales{dashed}."
        points = cells.assign(x=cells["length"], y=cells["perplexity"]).dropna(subset="y")
        if points["seeds"].min() > 2:  # two seeds give no useful intervals
            points = points.assign(low=np.exp(points["value_low"]), high=np.exp(points["value_high"]))
            caption = f"{caption} Bands are 95 % intervals over seeds."
        return Plot(f"perplexity-{self.name}", "lengths", caption, points)

    def _other_options(self, compared: ComparedRuns) -> list[Section]:
        """Return the report's section on scheme options changed at evaluation, or an empty list if none were.

        It shows perplexities at the longest length that was scored with a changed option.
        """
        cells = compared.at(self.name, metric="loss", under=None)
        cells = cells[~cells["under"].str.contains(" ") & ~cells["under"].isin(MARKS)]
        length = cells.loc[cells["under"] != "", "length"].max()
        table = options_table(compared, cells[cells["length"] == length])
        if table.empty:
            return []
        note = f"Perplexity at {short_length(length)} tokens; the best of each row is bold."
        return [Section("Other options at evaluation, without training again", table=table, note=note, level=3)]


def lengths_table(compared: ComparedRuns, cells: pd.DataFrame, every_length: bool) -> pd.DataFrame:
    """Return a row per scheme: its perplexity at each length, and its change and gap at the longest length.

    Both are differences in loss, nats: the change from the training length, and the gap to the baseline scheme.

    Arguments: compared, the runs to compare; cells, their figures, a row per scheme and length; every_length, whether
    to show lengths that are neither a multiple nor a part of the training length.
    """
    T, lengths = compared.training_length, sorted(set(cells["length"]))
    shown = [n for n in lengths if every_length or n % T == 0 or T % n == 0] or lengths
    rows = []
    for scheme in compared.schemes:
        by_length = cells[cells["scheme"] == scheme].set_index("length")
        if by_length.empty:
            continue
        halves = by_length["change_documents"].to_frame()
        halves["seeds"] = (by_length["change_high"] - by_length["change_low"]) / 2
        least = halves.max(axis=1)
        row = {"scheme": scheme}
        for n in shown:
            half_width = least.get(n, math.nan) if n != T else least.min()
            row[short_length(n) + " (trained)" * (n == T)] = (
                perplexity_text(by_length.loc[n, "perplexity"], half_width) if n in by_length.index else DASH
            )
        last = by_length.reindex([max(lengths)]).iloc[0]
        longest = short_length(max(lengths))
        if T in lengths and max(lengths) > T:
            row[f"change from {short_length(T)}"] = number(last["change"], sign=True)
        rows.append(row | {f"gap at {longest}": "0" if scheme == compared.baseline else number(last["gap"], sign=True)})
    return text_table(rows)


def options_table(compared: ComparedRuns, cells: pd.DataFrame) -> pd.DataFrame:
    """Return a table of perplexities, a row per scheme and a column per changed option; the best of a row is bold.

    Arguments: compared, the runs; cells, their figures, a row per scheme and option.
    """
    table = cells.pivot(index="scheme", columns="under", values="perplexity")
    rows = []
    for scheme in [s for s in compared.schemes if s in table.index and table.loc[s].notna().sum() > 1]:
        perplexities = table.loc[scheme]
        row = {"scheme": scheme}
        for option, p in perplexities.items():
            text = perplexity_text(p)
            row[str(option).partition("=")[2] or "as trained"] = f"**{text}**" if p == perplexities.min() else text
        rows.append(row)
    return text_table(rows)
