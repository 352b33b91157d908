"""What the loop remembers between steps: a checkpoint holds it beside weights and moments."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from posbench.data.batches import chained

_SAVED = (
    "batches",
    "loss_sum",
    "loss_count",
    "grad_norm_max",
    "skipped_steps",
    "train_seconds",
    "timed_steps",
    "first_step_seconds",
)


@dataclass
class LoopState:
    """Where a run stands. Losses in nats per token."""

    steps_done: int = 0
    batches: str = ""  # SHA-256 chain over the batches consumed
    loss_sum: float = 0.0  # of the finite steps since the last logged row
    loss_count: int = 0
    grad_norm_max: float | None = None  # of the same steps, before clipping
    skipped_steps: int = 0
    train_seconds: float = 0.0  # of the timed steps: all but the first of each process, which compiles
    timed_steps: int = 0
    first_step_seconds: float = 0.0  # of the others
    pending: list[Tensor] = field(default_factory=list)  # [loss, norm] of steps that the host has not fetched yet
    grad_norm: float | None = None  # of the last fetched step, before clipping; None where it was skipped

    def saved(self) -> dict[str, Any]:
        """What a checkpoint keeps, besides the step. Nothing is pending then."""
        return {name: getattr(self, name) for name in _SAVED}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take back what `saved` gave, and the `step` beside it."""
        self.steps_done = self.timed_steps = saved["step"]
        for name in _SAVED:  # a checkpoint of an older posbench lacks some
            setattr(self, name, saved.get(name, getattr(self, name)))

    def consume(self, rows: NDArray[np.int64]) -> None:
        """Chain a batch to those before it."""
        self.batches = chained(self.batches, rows)

    def fetch(self) -> Iterator[tuple[int, float, float]]:
        """Fetch what is pending from the device, which is waited for, and add up the finite losses.

        Yields: (n, loss, norm) of each step that was skipped, as it is counted; n is 0-based.
        """
        first, pending = self.steps_done - len(self.pending), self.pending
        self.pending = []
        for n, (loss, norm) in enumerate(torch.stack(pending).tolist() if pending else [], first):
            if math.isfinite(loss) and math.isfinite(norm):
                self.loss_sum += loss
                self.loss_count += 1
                self.grad_norm = norm
                self.grad_norm_max = norm if self.grad_norm_max is None else max(self.grad_norm_max, norm)
            else:
                self.grad_norm = None
                self.skipped_steps += 1
                yield n, loss, norm

    def take_row(self) -> dict[str, float | None]:
        """The mean loss and the largest gradient norm since the last call; None where every step was skipped."""
        mean = self.loss_sum / self.loss_count if self.loss_count else None
        row = {"loss": mean, "grad_norm": self.grad_norm, "grad_norm_max": self.grad_norm_max}
        self.loss_sum, self.loss_count, self.grad_norm_max = 0.0, 0, None
        return row


class Stopwatch:
    """Seconds of training steps, without those of what it is paused for and of laps that are left out."""

    def __init__(self, seconds: float) -> None:
        self._began = time.perf_counter() - seconds
        self._lap = self.seconds

    @property
    def seconds(self) -> float:
        """Since the run began, over all its resumptions."""
        return time.perf_counter() - self._began

    def lap(self) -> float:
        """Seconds since the last call."""
        before, self._lap = self._lap, self.seconds
        return self._lap - before

    def leave_out(self) -> float:
        """Seconds since the last call of `lap` or this, which do not count."""
        seconds = self.seconds - self._lap
        self._began += seconds
        return seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A pause, for validation and checkpoints."""
        paused = time.perf_counter()
        yield
        self._began += time.perf_counter() - paused
