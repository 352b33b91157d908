"""Stored results as wandb shows them: a table, summary keys, points and charts. What they mean, the protocols say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from posbench.evaluation.protocols import PROTOCOLS
from posbench.tracking import Evaluated, LineChart, Notice, open_tracker

if TYPE_CHECKING:
    from posbench.runs import Run
    from posbench.runs.readings import Result

_FIGURES = list(dict.fromkeys(name for protocol in PROTOCOLS.values() for name in protocol.figure_names))
_COLUMNS = ("protocol", "split", "length", "under", "targets_total", *_FIGURES, "documents", "windows")


def log_evaluations(
    run: Run, notice: Notice, figures: Mapping[str, float | None] | None = None
) -> dict[str, Any] | None:
    """Bring the wandb run up to what the run folder holds: every stored result as table, summary keys and charts.

    Tracks as the run was trained to. `figures`: more of them for its summary, such as its gap to another scheme.
    Returns what the caller stores as `wandb` of run.json (None: never tracked).
    """
    manifest = run.manifest
    tracker = open_tracker(run.config, run, manifest, notice)
    try:
        tracker.summary({**manifest.figures, **(figures or {})})  # an offline recording replaces that of training
        if tracker.record is not None:
            results = [
                each for each in run.results()[0] if each.protocol in PROTOCOLS and PROTOCOLS[each.protocol].reads_model
            ]
            axes = dict(protocol.chart for protocol in PROTOCOLS.values() if protocol.chart)
            tracker.evaluations(list(map(evaluated, results)), _COLUMNS, axes, length_charts(results))
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


def length_charts(results: Sequence[Result]) -> dict[str, LineChart]:
    """Perplexity against length, a chart for each protocol: the scheme as trained, and under other words.

    Key: `comparison/<protocol>_perplexity_by_length`. A protocol with one length has none; other text is in none.
    """
    charts = {}
    on_own_text = [result for result in results if result.reading.data is None]
    for protocol in (protocol for protocol in PROTOCOLS.values() if protocol.is_by_length):
        own = [result for result in on_own_text if result.protocol == protocol.name]
        if len({result.length for result in own}) < 2:
            continue
        rows = [
            (result.length, *protocol.figures(result.header).values(), " ".join(result.reading.under) or "as trained")
            for result in sorted(own, key=lambda result: (result.reading.under, result.length))
        ]
        charts[f"comparison/{protocol.name}_perplexity_by_length"] = LineChart(
            title=f"perplexity by length in tokens ({protocol.name})",
            columns=("length", *protocol.figure_names, "under"),
            rows=rows,
            x="length",
            y="perplexity",
            dash="under",
        )
    return charts
