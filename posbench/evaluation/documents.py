"""How much the choice of documents leaves open: intervals around token-weighted means, documents drawn independently.

A mean is m = sum y / sum n, with y the summed nll of a document and n its targets: a ratio, in which document i weighs
w_i = n_i / sum n. Its variance is estimated from the residuals e_i = y_i / n_i - m, each divided by what it would be on
average were all documents equally variable (the correction CR2 of Bell and McCaffrey 2002):

    V = sum of w_i^2 e_i^2 / (1 - 2 w_i + sum of w^2)

Half the interval is q sqrt(V). With equal weights this is Student's t. With unequal ones neither count of degrees of
freedom holds (Kish's, 1 / sum w^2 - 1, covers too little, Satterthwaite's too much), so q is what |m| / sqrt(V) stays
below in 95 % of draws of normal documents with these very weights. `python -m benchmarks.calibration` measures how
often such an interval holds the truth.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

FEWEST = 4.0  # effective documents: with fewer, one or two decide and coverage hangs on the shape of their spread
ENOUGH = 200.0  # effective documents from which on unequal weights no longer matter: Student's t
DRAWS = 10_000  # that tell q: to 0.2 percentage points of coverage


def effective(targets: Floats) -> float:
    """The number of equally long documents that would weigh the same: (sum n)^2 / sum n^2 (Kish 1965)."""
    targets = np.asarray(targets, dtype=np.float64)
    squares = float((targets**2).sum())
    return float(targets.sum()) ** 2 / squares if squares else 0.0


def document_error(nll: Floats, targets: Floats, confidence: float = 0.95) -> Floats:
    """Half the interval that the choice of documents leaves around token-weighted means.

    Arguments: nll [means, documents], the summed nll (or difference of nll) of each document in nats; targets
    [documents], its scored tokens.
    Returns: [means] in nats/token; NaN where documents weigh like fewer than FEWEST, or where a loss is no number.
    """
    scored = np.asarray(targets) > 0
    nll, targets = np.asarray(nll, dtype=np.float64)[:, scored], np.asarray(targets, dtype=np.float64)[scored]
    if effective(targets) < FEWEST:
        return np.full(len(nll), math.nan)
    weights = targets / targets.sum()
    return quantile(weights, confidence) * np.sqrt(document_variance(nll, targets))


def document_variance(nll: Floats, targets: Floats) -> Floats:
    """V of each mean, (nats/token)^2: [means], or what stands before the last axis of nll. NaN where a loss is none."""
    weights = targets / targets.sum()
    with np.errstate(invalid="ignore"):
        apart = nll / targets.sum() - weights * nll.sum(axis=-1, keepdims=True) / targets.sum()  # w e
        variance = (apart**2 / (1 - 2 * weights + (weights**2).sum())).sum(axis=-1)
    return np.where(np.isfinite(variance), variance, math.nan)


def quantile(weights: Floats, confidence: float = 0.95) -> float:
    """q, by how many sqrt(V) the mean of documents with these weights (they sum to 1) may be off."""
    alike = effective(weights)
    if alike >= ENOUGH or np.ptp(weights) <= 1e-9 * float(weights.max()):
        return student(alike - 1, confidence)
    return _drawn_quantile(tuple(np.sort(weights).round(12).tolist()), confidence)


@cache
def _drawn_quantile(weights: tuple[float, ...], confidence: float) -> float:
    """By DRAWS seeded draws of normal documents that are all equally variable."""
    w = np.array(weights)
    random, batch = np.random.default_rng(0), max(1, 2_000_000 // len(w))
    shares = w**2 / (1 - 2 * w + (w**2).sum())
    ratios = []
    for size in np.diff([*range(0, DRAWS, batch), DRAWS]):
        values = random.normal(size=(size, len(w)))
        mean = values @ w
        ratios.append(np.abs(mean) / np.sqrt(np.square(values - mean[:, None]) @ shares))
    return float(np.quantile(np.concatenate(ratios), confidence, method="higher"))


@cache
def student(freedom: float, confidence: float) -> float:
    """The two-sided quantile of Student's t."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, (1 + confidence) / 2))
