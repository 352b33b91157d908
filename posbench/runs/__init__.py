"""Run folders: where they are, what they contain, and how they are read back."""

from posbench.runs.finding import INTERRUPTED, UNREADABLE, find_runs, load_run, run_at, state_of
from posbench.runs.manifest import DIED, FINISHED, FORMAT, RUNNING, STOPPED, DamagedFile, Manifest
from posbench.runs.run import Run, append_metrics, remove_unfinished, run_folder

__all__ = [
    "DIED",
    "FINISHED",
    "FORMAT",
    "INTERRUPTED",
    "RUNNING",
    "STOPPED",
    "UNREADABLE",
    "DamagedFile",
    "Manifest",
    "Run",
    "append_metrics",
    "find_runs",
    "load_run",
    "remove_unfinished",
    "run_at",
    "run_folder",
    "state_of",
]
