"""Compare a model that was not trained here with itself under other options: its schemes are the options."""

from __future__ import annotations

import pandas as pd

from posbench.analysis.comparison import Comparison, build
from posbench.evaluation.protocols import PROTOCOLS
from posbench.runs.results import MARKS, row_name


def _without_marks(under: object) -> str:
    return " ".join(word for word in str(under).split() if word not in MARKS)


def compared_options(model: pd.DataFrame, rows: pd.DataFrame) -> Comparison | None:
    """Return the Comparison of one model with itself under other options; None without results.

    Arguments: model, the model's row of the summary; rows, the tidy table.
    """
    rows = rows[rows["run"].isin(model.index)].copy()
    if rows.empty:
        return None
    rows["under"] = rows["under"].astype(str).map(_without_marks)  # categories would include other models' options
    name = str(model["scheme"].iloc[0])
    # "" is the model as it is; it comes first.
    options = sorted({"", *rows["under"]}, key=lambda text: (text != "", text))
    schemes = [row_name(name, text.split()) for text in options]
    number = rows["under"].map(options.index)
    # Each option becomes a scheme with one run, scored as trained.
    rows = rows.assign(run=number, scheme=number.map(dict(enumerate(schemes))), under="")
    # The losses are not shown: they only keep the order of the options, because schemes are sorted by loss.
    runs = [model.assign(scheme=scheme, loss=float(n)) for n, scheme in enumerate(schemes)]
    # There is one model and no seed, so the unit of doubt is the document.
    return build(pd.concat(runs, ignore_index=True), rows, baseline=name, doubt="documents")


def losses_of(c: Comparison) -> pd.DataFrame:
    """Return the figures of the first protocol that scores perplexity by length, a row per option and length."""
    cells = c.at(metric="loss", last=0)
    for protocol in PROTOCOLS.values():
        of_protocol = cells[cells["protocol"] == protocol.name]
        if protocol.is_by_length and len(of_protocol):
            return of_protocol
    return cells.head(0)
