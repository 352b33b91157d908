"""Split gaps in loss into time and quality, and express them in tokens, from runs that end after several lengths.

A scheme may be ahead because it began to use long-range order sooner (time) or is better after that (quality). The loss
of the reference scheme is fitted as a + b ln(tokens since onset), and read at another scheme's tokens since onset, seed
by seed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from posbench.analysis.statistics import FEWEST_SEEDS, Floats, interval, student
from posbench.analysis.table import config_of
from posbench.config import branch_name
from posbench.evaluation.protocols.order import crossing
from posbench.runs import FINISHED, Run, run_at, state_of

RESAMPLES = 1000  # of a bootstrap over seeds
FEWEST_POINTS = 4  # decayed runs after onset that a fit needs


def decayed_points(runs: pd.DataFrame) -> pd.DataFrame:
    """Return final losses of these runs and their finished branches: scheme, seed, tokens, loss, onset in tokens."""
    points = []
    for run in runs.to_dict("records"):
        columns = {"scheme": run["scheme"], "seed": run["seed"], "onset": run.get("onset_tokens", math.nan)}
        points.append(columns | {"tokens": run["tokens"], "loss": run["loss"]})
        trunk = Run(Path(str(run["path"])))
        for tokens in config_of(str(trunk.path))["train"].get("branch_tokens") or ():
            # The experiment of a branch of `demo` with 2 million tokens is `demo-2M`, in the same folder as `demo`.
            experiment = trunk.experiment_folder
            folder = experiment.with_name(branch_name(experiment.name, tokens))
            branch = run_at(folder / trunk.path.relative_to(experiment))
            if state_of(branch) == FINISHED and branch.manifest.loss is not None:
                points.append(columns | {"tokens": branch.manifest.tokens, "loss": branch.manifest.loss})
    return pd.DataFrame(points).astype({"tokens": float})


@dataclass(frozen=True)
class Fit:
    """A least-squares line loss = a + b ln(million tokens since onset), with the covariance of a and b."""

    coefficients: Floats  # [2]: a, b
    covariance: Floats  # [2, 2]
    points: int
    sd: float  # of the residuals, nats per token

    def at(self, since: Floats) -> Floats:
        """Return the fitted loss for each number of tokens in `since`, counted from the onset."""
        return _design(since) @ self.coefficients

    def error(self, since: Floats) -> float:
        """Return the standard error of the mean of the fitted losses at these numbers of tokens since onset."""
        mean = _design(since).mean(axis=0)
        return math.sqrt(float(mean @ self.covariance @ mean))


def _design(since: Floats) -> Floats:
    return np.stack([np.ones(len(since)), np.log(np.asarray(since, dtype=float) / 1e6)], axis=1)


def fit(points: pd.DataFrame) -> Fit | None:
    """Return the line fitted to losses against tokens since onset, or None for fewer than FEWEST_POINTS points.

    Arguments: points, with columns tokens, onset and loss.
    """
    after_onset = points[points["tokens"] > points["onset"]]
    if len(after_onset) < FEWEST_POINTS:
        return None
    design, loss, coefficients = _solved(after_onset)
    # Two coefficients were fitted, so two degrees of freedom are gone.
    variance = float(((loss - design @ coefficients) ** 2).sum()) / (len(after_onset) - 2)
    covariance: Floats = variance * np.linalg.inv(design.T @ design).astype(np.float64)
    return Fit(coefficients, covariance, len(after_onset), math.sqrt(variance))


def _solved(points: pd.DataFrame) -> tuple[Floats, Floats, Floats]:
    # Return the design matrix, the losses and the coefficients of the line through points after onset.
    design = _design((points["tokens"] - points["onset"]).to_numpy())
    loss = points["loss"].to_numpy()
    return design, loss, np.linalg.lstsq(design, loss)[0]


def gap_after_onset(runs: pd.DataFrame, line: Fit) -> tuple[float, float]:
    """Return how far a scheme's mean loss is above the line at its tokens since onset, and half the 95 % interval."""
    since = (runs["tokens"] - runs["onset_tokens"]).to_numpy(float)
    gaps = runs["loss"].to_numpy(float) - line.at(since)
    # Both errors: over seeds, and of the fit.
    variance = gaps.var(ddof=1) / len(gaps) + line.error(since) ** 2
    return float(gaps.mean()), student(len(gaps) - 1) * math.sqrt(variance)


def share_of_time(runs: pd.DataFrame, best: pd.DataFrame, points: pd.DataFrame) -> tuple[float, float] | None:
    """Return the 95 % interval of the share of a scheme's gap that is gone at equal tokens after onset.

    Seeds are resampled (bootstrap, the same draws each time), and the line is fitted to the resampled seeds of the best
    scheme. Arguments: runs and best, the final runs of the scheme and of the best one; points, as of `fit`, of the best
    one. Returns: None if the interval of the gap contains 0, because a share of nothing says nothing.
    """
    scheme, reference = runs.set_index("seed"), best.set_index("seed")
    of_seed = dict(iter(points[points["tokens"] > points["onset"]].groupby("seed")))
    seeds = np.array(sorted({*scheme.index} & {*reference.index} & {*of_seed}), dtype=int)
    gaps = scheme.loc[seeds, "loss"].astype(float) - reference.loc[seeds, "loss"].astype(float)
    _, low, high = interval(gaps)
    if not (low > 0 or high < 0):
        return None
    since = (scheme["tokens"] - scheme["onset_tokens"]).astype(float)
    random, shares = np.random.default_rng(0), []
    for _ in range(RESAMPLES):
        drawn = random.choice(seeds, len(seeds))
        # A line needs two points.
        if len(set(drawn)) < 2:
            continue
        coefficients = _solved(pd.concat([of_seed[seed] for seed in drawn]))[2]
        left = (
            scheme.loc[drawn, "loss"].to_numpy(float)
            - _design(np.asarray(since.loc[drawn], dtype=np.float64)) @ coefficients
        )
        shares.append(1 - left.mean() / gaps[drawn].mean())
    low, high = np.percentile(shares, [2.5, 97.5])
    return float(low), float(high)


def worth(points: pd.DataFrame, scheme: str, baseline: str) -> tuple[float, float, float] | None:
    """Return which share of the baseline's tokens a scheme needs for the same loss, with its 95 % interval over seeds.

    Arguments: points, with columns scheme, seed, tokens and loss. Returns: None for fewer than FEWEST_SEEDS seeds, or
    if a seed's share is unknown.
    """
    logs = []  # ln(share) by seed: shares are ratios, so their mean and interval are taken over logarithms
    curves = {}  # scheme -> seed -> its points, from the fewest tokens to the most
    for name in (scheme, baseline):
        of_scheme = points[points["scheme"] == name].sort_values("tokens")
        curves[name] = dict(iter(of_scheme.groupby("seed")))
    for seed in curves[scheme].keys() & curves[baseline].keys():
        ours, theirs = curves[scheme][seed], curves[baseline][seed]
        is_better = ours["loss"].iloc[-1] <= theirs["loss"].iloc[-1]
        better, worse, sign = (ours, theirs, 1) if is_better else (theirs, ours, -1)
        # The target is the final loss of the worse scheme.
        target = worse["loss"].iloc[-1]
        # If even the shortest run of the better scheme is below the target, the share is unknown.
        if better["loss"].iloc[0] <= target:
            return None
        # The loss is taken as linear in ln(tokens) between the points of a seed.
        needed = crossing(np.log(better["tokens"]), better["loss"], target)  # ln(tokens)
        # Negative if the scheme needs fewer tokens. A share above 1 means that the baseline needs its inverse of the
        # scheme's tokens.
        logs.append(sign * (needed - math.log(better["tokens"].iloc[-1])))
    if len(logs) < FEWEST_SEEDS:
        return None
    mean, low, high = np.exp(interval(logs))
    return float(mean), float(low), float(high)
