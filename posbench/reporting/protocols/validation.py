"""Show the losses on texts that runs were not trained on."""

from __future__ import annotations

import pandas as pd

from posbench.analysis.comparison import Comparison
from posbench.evaluation.protocols import VALIDATION
from posbench.reporting.section import Section, Table, half, in_order


def sections(c: Comparison) -> list[Section]:
    """Return a section for each text that runs were not trained on, with losses at the training length."""
    # Other texts with figures, or with a note that figures are missing; "" is the runs' own.
    texts = {*c.at(None, text=None, under=None)["text"], *(text for _, text in c.holes)} - {""}
    sections = []
    for text in sorted(texts):
        cells = c.at(None, c.training_length, metric="loss", text=text)
        cells = cells[cells["last"] == 0]
        table: Table | None = None
        note = f"Loss at {c.training_length} tokens of context on text that the runs were not trained on; "
        note += "not part of the ranking."
        if len(cells):
            # Protocols score different targets, so all losses are those of one: that which most schemes have.
            schemes_of = cells.groupby("protocol")["scheme"].nunique()
            protocol = str(schemes_of.idxmax())
            unscored = sorted({*cells["scheme"]} - {*cells.loc[cells["protocol"] == protocol, "scheme"]})
            table = losses_table(c, in_order(cells[cells["protocol"] == protocol], c.schemes))
            note += f" Protocol {protocol}."
            if unscored:
                note += f" Not scored by it: {', '.join(unscored)}."
        holes = c.holes.get((VALIDATION.name, text), [])
        sections.append(Section(f"On {text}", holes, table=table, note=note))
    return sections


def losses_table(c: Comparison, cells: pd.DataFrame) -> Table:
    """Return a row per scheme, the lowest loss first: its loss and its gap to the baseline."""
    cells = cells.sort_values("value", kind="stable")
    gap = f"gap to {c.baseline}"
    gaps = cells["gap"].mask(cells["scheme"] == c.baseline, 0.0)
    table = Table(cells[["scheme"]].copy())
    table.add("loss", cells["value"], half(cells, "value"))
    table.add(gap, gaps, half(cells, "gap"), sign=True)
    return table
