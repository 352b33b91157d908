"""Stored results as wandb shows them: a table of all, summary keys, and curves. What they mean, the protocols say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from posbench.evaluation.protocols import PROTOCOLS
from posbench.tracking import Evaluated, Notice, open_tracker

if TYPE_CHECKING:
    from posbench.runs import Run
    from posbench.runs.readings import Result

_FIGURES = list(dict.fromkeys(name for protocol in PROTOCOLS.values() for name in protocol.figure_names))
_COLUMNS = ("protocol", "split", "length", "under", "targets_total", *_FIGURES, "documents", "windows")


def log_evaluations(run: Run, notice: Notice) -> dict[str, Any] | None:
    """Bring the wandb run up to what the run folder holds: every stored result as table, summary keys and curves.

    Tracks as the run was trained to. Returns what the caller stores as `wandb` of run.json (None: never tracked).
    """
    manifest = run.manifest
    tracker = open_tracker(run.config, run, manifest, notice)
    try:
        tracker.summary(manifest.figures)  # an offline recording replaces the one that training made
        if tracker.record is not None:
            results, _ = run.results()
            known = [evaluated(result) for result in results if result.protocol in PROTOCOLS]
            charts = dict(protocol.chart for protocol in PROTOCOLS.values() if protocol.chart)
            tracker.evaluations(known, _COLUMNS, charts)
    finally:
        tracker.finish()
    return tracker.record or manifest.wandb


def evaluated(result: Result) -> Evaluated:
    """One result: its cells, its summary keys `eval/<protocol>/<figure>@<length>`, the points of its curve."""
    protocol = PROTOCOLS[result.protocol]
    figures = protocol.figures(result.header)
    place = "@".join(map(str, (result.length, *result.reading.under)))
    summary = {f"eval/{protocol.name}/{name}@{place}": value for name, value in figures.items()}
    points = () if result.reading.under else protocol.curve(result)  # a curve is of the scheme as trained
    return Evaluated({**result.header, "under": " ".join(result.reading.under), **figures}, summary, points)
