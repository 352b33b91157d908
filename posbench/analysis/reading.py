"""Read the runs of a report: of some places, of their searches for learning rates, and of a reference experiment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd

from posbench.analysis.search import merge_searches, with_searches
from posbench.analysis.table import read
from posbench.config import ConfigError
from posbench.runs.finding import folder_of
from posbench.system.console import Console


def read_runs(
    places: Sequence[str | Path],
    beside: str | Path | None,
    console: Console,
    select: Callable[[pd.DataFrame, pd.DataFrame], pd.DataFrame] = lambda summary, rows: summary,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the summary (a row per run) of these places and their searches, and their tidy table.

    Arguments: beside, the folder of a reference experiment whose runs are added; select, called with both tables,
    returns the summary to use.
    Raises: ConfigError if there are no runs, or these cannot share a table with the reference; the errors of `select`.
    """
    reference = folder_of(Path(beside)) if beside else None
    if reference:
        from posbench.analysis.reference_table import check_same_losses, join_reference  # imports torch and Hydra

        # A release that computes other losses than the reference recorded cannot make comparable runs.
        check_same_losses(reference, console)
        places = [reference, *places]  # first, because the first run defines the experiment
    summary, rows = read(with_searches(places))
    summary = merge_searches(summary)
    if summary.empty:
        raise ConfigError(f"{places[0]} contains no runs: train some, such as `posbench train -m experiment=demo`")
    chosen = select(summary, rows)
    return join_reference(chosen, reference, console) if reference else chosen, rows
