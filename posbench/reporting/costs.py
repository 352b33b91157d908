"""What each scheme's runs cost, and the gaps at equal compute: where the cheapest scheme's training ended."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from posbench.config import ConfigError
from posbench.reporting.frame import records
from posbench.reporting.joining import Joined
from posbench.reporting.statistics import Floats, Interval, t_interval
from posbench.runs import Run
from posbench.size import Cache, cache

if TYPE_CHECKING:
    import pandas as pd

ALIKE = 1e-3  # FLOPs that differ by no more than this share count as equal


@dataclass(frozen=True)
class Cost:
    """What the runs of one scheme took. NaN: not recorded."""

    scheme: str
    parameters: float
    tokens: float  # of a run
    epochs: float  # of a run: how often it read its text
    training_flops: float  # of a run
    tokens_per_second: float  # median over seeds
    peak_memory_bytes: float  # mean of the runs that recorded it
    cache_bytes_per_token: float  # what the model keeps of the past as it reads token by token
    state_bytes: float  # ... whatever the length

    @property
    def tokens_per_parameter(self) -> float:
        return self.tokens / self.parameters


def costs(joined: Joined, caches: Mapping[str, Cache]) -> dict[str, Cost]:
    """By scheme. Arguments: caches, from `caches_of`."""
    runs = joined.runs.groupby("scheme")
    unknown = Cache(math.nan, math.nan)
    speeds = runs["tokens_per_second"].median()
    return {
        str(scheme): Cost(
            scheme=str(scheme),
            parameters=float(of["parameters"].astype(float).mean()),
            tokens=float(of["tokens"].mean()),
            epochs=float(of["epochs"].mean()),
            training_flops=float(of["training_flops"].mean()),
            tokens_per_second=float(speeds[scheme]),
            peak_memory_bytes=float(of["peak_memory_bytes"].mean()),
            cache_bytes_per_token=caches.get(str(scheme), unknown).bytes_per_token,
            state_bytes=caches.get(str(scheme), unknown).state_bytes,
        )
        for scheme, of in runs
    }


def caches_of(runs: Mapping[tuple[str, int], Run]) -> dict[str, Cache]:
    """What the model of each scheme keeps of the past, in the number format of its runs; not of one that is not known.

    Arguments: runs, by scheme and seed.
    """
    caches = {}
    for scheme, run in {scheme: run for (scheme, _), run in runs.items()}.items():
        dtype = getattr(torch, str(run.manifest.device.get("dtype")), None)
        try:
            if isinstance(dtype, torch.dtype):
                caches[scheme] = cache(run.config, dtype)
        except ConfigError:  # a plug-in that is not installed here
            continue
    return caches


@dataclass(frozen=True)
class EqualCompute:
    """The gaps to the baseline where the cheapest scheme's training ended."""

    flops: float  # the fewest model FLOPs that a run of any scheme took
    gaps: dict[str, Interval]  # scheme -> paired over seeds, nats/token; NaN where a curve does not reach there
    cut_short: frozenset[str]  # schemes that trained on beyond it: their learning rate was not at its end there

    def is_estimate(self, scheme: str, baseline: str | None) -> bool:
        """Whether the gap rests on a loss in the middle of a training."""
        return scheme != baseline and bool(self.cut_short & {scheme, baseline})


def equal_compute(joined: Joined, curves: pd.DataFrame) -> EqualCompute | None:
    """The view at equal compute; None without a baseline, without recorded FLOPs, or where all took as many (to ALIKE).

    A run that trained on beyond that point counts with its validation curve there, linear between two validations.
    Arguments: curves, scheme, seed, tokens, loss: validation losses while training.
    """
    flops = joined.runs["training_flops"]
    least = float(flops.min())
    if joined.baseline is None or flops.isna().any() or float(flops.max()) <= least * (1 + ALIKE):
        return None
    losses: dict[str, list[float]] = {scheme: [] for scheme in joined.schemes}
    cut_short = set()
    for run in records(joined.runs.sort_values("seed")):
        if run["training_flops"] <= least * (1 + ALIKE):
            losses[run["scheme"]].append(run["loss"])
        else:
            curve = curves[(curves["scheme"] == run["scheme"]) & (curves["seed"] == run["seed"])].sort_values("tokens")
            tokens = run["tokens"] * least / run["training_flops"]
            losses[run["scheme"]].append(_at(tokens, curve["tokens"].to_numpy(), curve["loss"].to_numpy()))
            cut_short.add(run["scheme"])
    base = np.array(losses[joined.baseline])
    gaps = {scheme: t_interval(np.array(of) - base) for scheme, of in losses.items()}
    return EqualCompute(least, gaps, frozenset(cut_short))


def _at(tokens: float, measured: Floats, losses: Floats) -> float:
    """A curve between its points; NaN outside them."""
    if not len(measured) or not measured[0] <= tokens <= measured[-1]:
        return math.nan
    return float(np.interp(tokens, measured.astype(np.float64), losses.astype(np.float64)))
