"""Runs whose gradients spiked: a step whose gradient norm was many times the usual one, which may have cost loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from posbench.config import ConfigError
from posbench.reporting.gathering import Key
from posbench.runs import Run

if TYPE_CHECKING:
    import pandas as pd

TIMES = 10.0  # the usual norm; above it a step is a spike


@dataclass(frozen=True)
class Gradients:
    """The largest gradient norm of a run, before clipping.

    The usual norm is the median, over the lines of metrics.jsonl behind the warm-up, of the largest norm since the line
    before.
    """

    scheme: str
    seed: int
    times: float  # the usual norm
    step: int  # of the line that holds it

    @property
    def has_spike(self) -> bool:
        return self.times > TIMES


def gradients(runs: Mapping[Key, Run]) -> list[Gradients]:
    """Of each run that has logged its largest norms, in the order of the runs."""
    every = []
    for (scheme, seed), run in runs.items():
        try:
            metrics = run.metrics
            measured = _measured(metrics, run.config.train.warmup_steps)
        except (ConfigError, ValueError, TypeError):  # the loss curve names it
            continue
        if measured is not None:
            every.append(Gradients(scheme, seed, *measured))
    return every


def _measured(metrics: pd.DataFrame, warmup_steps: int) -> tuple[float, int] | None:
    """The largest norm in usual ones, and the step of its line; None where it cannot be told."""
    if not {"kind", "step", "grad_norm_max"} <= set(metrics):
        return None
    rows = metrics.loc[metrics["kind"] == "train", ["step", "grad_norm_max"]].astype(float).dropna()
    steps, norms = rows["step"].to_numpy(), rows["grad_norm_max"].to_numpy()
    behind = norms[steps > warmup_steps]
    usual = float(np.median(behind)) if len(behind) else math.nan
    if not 0 < usual < math.inf:
        return None
    largest = int(norms.argmax())
    return float(norms[largest]) / usual, int(steps[largest])
