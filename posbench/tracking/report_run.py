"""The wandb run of a report: its page, tables and pictures, beside the training runs that it compares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posbench.config import TrackingConfig
from posbench.tracking.connection import first_line, say_once
from posbench.tracking.opening import Opened, Place, chosen_mode, open_run
from posbench.tracking.recordings import report_id
from posbench.tracking.tracker import Notice


@dataclass(frozen=True)
class LoggedReport:
    """What is logged of a report, each by its key in wandb."""

    experiment: str  # the group
    config: Mapping[str, Any]  # how the comparison was made
    pages: Mapping[str, str]  # HTML documents
    tables: Mapping[str, tuple[Sequence[str], Sequence[Sequence[Any]]]]  # columns, rows
    pictures: Mapping[str, Path]  # PNG files


def log_report(report: LoggedReport, tracking: TrackingConfig, folder: Path, notice: Notice) -> bool:
    """Log the report as a run of job type `report`, in the group of its experiment, and say where it is.

    A later report goes to the same run, as long as its recording lies in `folder`; the run then shows the later one.

    Arguments: tracking, the project, entity and timeout; folder, of recordings.
    Returns: whether it was logged. Never raises for what wandb cannot do: that is said.
    """
    opened: Opened | None = None
    try:
        mode = chosen_mode()
        if mode == "disabled":
            notice("wandb is disabled (WANDB_MODE, or `wandb disabled`): the report was not sent to it")
            return False
        about = {
            "project": tracking.project,
            "entity": tracking.entity,
            "group": report.experiment,
            "job_type": "report",
            "config": dict(report.config),
            "id": report_id(folder),
        }
        labels = {"name": "report", "tags": ["report"], "notes": None}
        opened = open_run(Place(folder, tracking.init_timeout, notice), about, labels, offline=mode == "offline")
        opened.run.log(_objects(report))
        opened.drop_replaced()
    except Exception as error:
        say_once(notice, f"wandb failed ({first_line(error)}): the report was not sent to it, its files are complete")
        return False
    finally:
        if opened is not None:
            opened.close(failed=False)
    where = f" at {opened.run.url}" if opened.is_online else ""
    notice(f"the report is in wandb{where}: run report of group {report.experiment}, project {tracking.project}")
    return True


def _objects(report: LoggedReport) -> dict[str, Any]:
    import wandb

    return {
        **{key: wandb.Html(page, inject=False, data_is_not_path=True) for key, page in report.pages.items()},
        **{
            key: wandb.Table(columns=list(columns), data=[list(row) for row in rows])
            for key, (columns, rows) in report.tables.items()
        },
        **{key: wandb.Image(str(file)) for key, file in report.pictures.items()},
    }
