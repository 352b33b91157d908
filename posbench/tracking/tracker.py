"""What a tracker is, and the one that tracks nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Notice = Callable[[str], None]  # prints one line to the user


@dataclass(frozen=True)
class Evaluated:
    """One stored evaluation as it is shown: who stored it knows what its figures mean, a tracker does not."""

    row: Mapping[str, Any]  # cells of the table of all evaluations, by column
    summary: Mapping[str, float | None]  # single figures of the run, by key; what is None or not finite is not sent
    points: Iterable[Mapping[str, float | None]]  # of its charts; read only where they are sent


@dataclass(frozen=True)
class LineChart:
    """A chart with its own table. The charts of all runs that have one of the same name are drawn into one."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    x: str  # a column
    y: str
    dash: str  # the column that tells the lines of one run apart


class Tracker:
    """The tracker that tracks nothing (`tracking=none`), and the interface of the one that does."""

    id: str | None = None
    record: dict[str, Any] | None = None  # what the caller stores as `wandb` of run.json

    def log(self, row: Mapping[str, Any]) -> None:
        """One row of metrics.jsonl."""

    def summary(self, values: Mapping[str, Any]) -> None:
        """Single figures of the whole run, such as its final loss."""

    def evaluations(
        self,
        stored: Sequence[Evaluated],
        columns: Sequence[str],
        axes: Mapping[str, str],
        charts: Mapping[str, LineChart],
    ) -> None:
        """All stored evaluations of the run.

        Arguments: columns, of the table; axes, names of metrics (as globs) -> the metric that is their x axis; charts
        of several evaluations, by key.
        """

    def finish(self, failed: bool = False) -> None:
        """Close the run; harmless when called twice."""
