"""How much the choice of documents leaves open: intervals around token-weighted means, by bootstrap over documents."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def document_error(nll: Floats, targets: Floats, resamples: int = 2000, confidence: float = 0.95) -> Floats:
    """Half the interval that the choice of documents leaves around token-weighted means: a bootstrap over documents.

    Arguments: nll [means, documents], the summed nll (or difference of nll) of each document in nats; targets
    [documents], its scored tokens. All means are resampled by the same documents. The standard error of the bootstrap
    is widened by sqrt(n / (n - 1)) and Student's t for n documents, since resampling few documents understates their
    spread; n is (sum of targets)^2 / (sum of squares), the number of equally long documents that would weigh the same
    (Kish 1965).
    Returns: [means] in nats/token; NaN where documents weigh like fewer than two, or where a loss is no number.
    """
    count, error = len(targets), np.full(len(nll), math.nan)
    finite = np.isfinite(nll).all(axis=1)
    alike = float(targets.sum()) ** 2 / float((targets.astype(np.float64) ** 2).sum())
    if alike < 2 or not finite.any():
        return error
    nll = nll[finite]

    def ratios(index: NDArray[np.int64], axis: int = -1) -> Floats:
        draws = index.reshape(-1, count)
        times = np.zeros(draws.shape)  # how often each document was drawn
        np.add.at(times, (np.arange(len(draws))[:, None], draws), 1)
        return np.asarray(nll @ times.T / (targets @ times.T)).reshape(len(nll), *index.shape[:-1])

    batch = max(1, min(resamples, 8_000_000 // count))
    widened = math.sqrt(alike / (alike - 1)) * student(alike - 1, confidence)
    error[finite] = widened * bootstrap_error(ratios, count, resamples, batch)
    return error


def bootstrap_error(statistic: Callable[..., Floats], count: int, resamples: int, batch: int) -> Floats:
    """Standard error of `statistic(indices)` when `count` things are drawn with replacement, by seeded draws."""
    from scipy import stats

    indices = (np.arange(count),)
    settings = {"n_resamples": resamples, "batch": batch, "vectorized": True, "method": "basic"}
    drawn = stats.bootstrap(indices, statistic, rng=np.random.default_rng(0), **settings)
    return np.asarray(drawn.standard_error)


@cache
def student(freedom: int, confidence: float) -> float:
    """The two-sided quantile of Student's t."""
    from scipy import stats

    return float(stats.t.isf((1 - confidence) / 2, freedom))
