"""The report in wandb: a run of its own beside the training runs, and each training run's gap in its summary."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posbench.config import ConfigError, TrackingConfig
from posbench.evaluation.charts import log_evaluations
from posbench.evaluation.protocols import PROTOCOLS, VALIDATION
from posbench.reporting.tables import printable
from posbench.runs.pack import PackedRun
from posbench.tracking import LoggedReport, Notice, log_report, recordings_folder

if TYPE_CHECKING:
    import pandas as pd

    from posbench.reporting.findings import Findings
    from posbench.runs import Run

FIRST = "comparison"  # the section of wandb's workspace that comes first: sections are sorted by name
OTHERS = "report"
_MOST_ROWS = 10_000  # of a table; wandb cuts longer ones
_OF_THIS_MACHINE = ("runs.csv",)  # has paths; the runs themselves are in wandb
_FIRST_PICTURES = ("gaps", *(f"perplexity-{name}" for name, protocol in PROTOCOLS.items() if protocol.is_by_length))


def tracked_runs(findings: Findings) -> list[Run]:
    """The compared runs that wandb has."""
    return [run for run in findings.runs.values() if not isinstance(run, PackedRun) and run.manifest.wandb]


def show_in_wandb(
    findings: Findings, tables: Mapping[str, pd.DataFrame], pictures: Iterable[str], target: Path, notice: Notice
) -> None:
    """Log the report that was written to `target`, and the gaps of the compared runs that wandb has.

    Arguments: tables, those of the report's CSV files, by file name; pictures, the stems of its pictures.
    """
    runs = tracked_runs(findings)
    failed = []
    for run in runs:
        try:
            log_evaluations(run, notice, gap_figures(findings, run.config.scheme.name))
        except (ConfigError, OSError) as error:
            failed.append(f"{run.name} ({error})")
    tracking = runs[0].config.tracking if runs else TrackingConfig(backend="wandb")
    folder = recordings_folder(runs[0]) if runs else target / "wandb"
    logged = LoggedReport(
        experiment=findings.experiment,
        config={
            "experiment_name": findings.experiment,
            "baseline": findings.baseline,
            "schemes": list(findings.schemes),
            "seeds": list(findings.joined.seeds),
            "family": findings.family,
            "published": [comparison.published.name for comparison in findings.against],
        },
        pages={f"{FIRST}/report": (target / "report.html").read_text(encoding="utf-8")},
        tables={
            f"{FIRST}/schemes": _columns_and_rows(schemes_table(findings)),
            **{
                f"{OTHERS}/{Path(file).stem}": _columns_and_rows(frame)
                for file, frame in tables.items()
                if file not in _OF_THIS_MACHINE and len(frame) <= _MOST_ROWS
            },
        },
        pictures={
            f"{FIRST}/{stem.replace('-', '_')}": target / f"{stem}.png" for stem in pictures if stem in _FIRST_PICTURES
        },
    )
    if log_report(logged, tracking, folder, notice) and runs:
        given = f"{len(runs) - len(failed)} of the {len(findings.runs)} compared runs"
        notice(f"gaps to {findings.baseline} are in wandb, in the summaries of {given}")
    if failed:
        notice(f"without a gap in wandb: {'; '.join(failed)}")


def gap_figures(findings: Findings, scheme: str) -> dict[str, float | None]:
    """Keys of a run's summary: the mean gap of its scheme, nats/token, its interval over seeds, and how many seeds."""
    measurement = findings.at(VALIDATION.name).get(scheme)
    if measurement is None or findings.baseline is None:
        return {}
    name, gap = f"gap_to_{findings.baseline}", measurement.gap
    return {name: gap.mean, f"{name}_low": gap.low, f"{name}_high": gap.high, "gap_seeds": len(measurement.seeds)}


def schemes_table(findings: Findings) -> pd.DataFrame:
    """One row a scheme, in the order of the report: loss, gap with its interval, and perplexity at each length."""
    import pandas as pd

    losses, rows = findings.at(VALIDATION.name), []
    for scheme in findings.schemes:
        row: dict[str, Any] = {"scheme": scheme}
        if scheme in losses:
            m = losses[scheme]
            row |= {"loss": m.loss.mean, **gap_figures(findings, scheme)}
            row |= {"perplexity": m.perplexity, "bits_per_byte": m.bits_per_byte}
        for protocol in (protocol.name for protocol in PROTOCOLS.values() if protocol.is_by_length):
            for length in findings.lengths(protocol):
                m_at = findings.at(protocol, length).get(scheme)
                row[f"{protocol}/perplexity@{length}"] = m_at.perplexity if m_at else math.nan
        rows.append(row)
    return pd.DataFrame(rows)


def _columns_and_rows(frame: pd.DataFrame) -> tuple[list[str], list[list[Any]]]:
    """Plain values; what is missing or not finite is None, text has no control characters."""

    def plain(value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            return None
        return printable(value) if isinstance(value, str) else value

    rows = [[plain(value) for value in row] for row in frame.astype(object).to_numpy().tolist()]
    return [str(name) for name in frame.columns], rows
