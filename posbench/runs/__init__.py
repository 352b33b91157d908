"""The run folder, whole: where it is, what is in it, and how it is read back."""

from posbench.runs.run import (
    DIED,
    FINISHED,
    FORMAT,
    INTERRUPTED,
    RUNNING,
    STOPPED,
    UNREADABLE,
    Run,
    TornManifest,
    append_metrics,
    find_runs,
    load_run,
    read_metrics,
    remove_unfinished,
    run_folder,
    state_of,
)

__all__ = [
    "DIED",
    "FINISHED",
    "FORMAT",
    "INTERRUPTED",
    "RUNNING",
    "STOPPED",
    "UNREADABLE",
    "Run",
    "TornManifest",
    "append_metrics",
    "find_runs",
    "load_run",
    "read_metrics",
    "remove_unfinished",
    "run_folder",
    "state_of",
]
