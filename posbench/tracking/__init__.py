"""Where metrics go besides `metrics.jsonl`: nowhere, or Weights & Biases. The one room that imports wandb.

    tracker = open_tracker(config, run, run.manifest, notice=print)  # metrics.jsonl is cut back to the checkpoint
    run.update_manifest(wandb=tracker.record)                        # at once, so that a resumed run finds its id
    failed = True
    try:
        tracker.log(row)                                             # each row just appended to metrics.jsonl
        tracker.summary({"loss": 2.71})
        failed = False
    finally:
        tracker.finish(failed)

The run folder is the truth and the wandb run a view of it: an opened tracker first sends the rows of `metrics.jsonl`
that wandb lacks. So a run that was killed, resumed, or evaluated a week later has every row once, and an offline
recording is complete in itself: the newest replaces the older ones.

Tracking never stops a run: what goes wrong here is said once, and the run continues untracked. wandb collects nothing
about the machine. docs/wandb.md says what is found in the project.

tracker.py        the interface, and the tracker that tracks nothing
wandb_tracker.py  the wandb run of a training run: what is sent, and when
report_run.py     a report's folder as an artifact
opening.py        how a wandb run is opened, resumed and closed
connection.py     the server, its absence, what is said about it
recordings.py     what lies in the folder of recordings, and which rows of it the server has
"""

from posbench.tracking.report_run import log_report
from posbench.tracking.tracker import Evaluated, LineChart, Notice, Tracker
from posbench.tracking.wandb_tracker import WandbTracker, open_tracker, recordings_folder

__all__ = [
    "Evaluated",
    "LineChart",
    "Notice",
    "Tracker",
    "WandbTracker",
    "log_report",
    "open_tracker",
    "recordings_folder",
]
