"""What a paired t-test could have seen: the chance to find a true difference, and the seeds that it takes."""

from __future__ import annotations

import math

POWER = 0.80
MOST_SEEDS = 1000  # beyond this many the answer is "more than"


def power(effect: float, sd: float, seeds: int, level: float) -> float:
    """Probability that a two-sided paired t-test at `level` finds a true difference, in its true direction.

    The test statistic is noncentral t with `seeds - 1` degrees of freedom and noncentrality `effect sqrt(seeds) / sd`.
    """
    from scipy import stats

    if seeds < 2 or math.isnan(sd):
        return math.nan
    if sd == 0:
        return 1.0 if effect > 0 else level / 2
    threshold = stats.t.isf(level / 2, seeds - 1)
    return float(stats.nct.sf(threshold, seeds - 1, effect * math.sqrt(seeds) / sd))


def smallest_visible(sd: float, seeds: int, level: float, promised: float = POWER) -> float:
    """The true difference that `seeds` seeds find with probability `promised` at `level`, in the unit of `sd`."""
    from scipy.optimize import brentq

    if seeds < 2 or math.isnan(sd):
        return math.nan
    if sd == 0:
        return 0.0
    high = 1.0
    while power(high, 1.0, seeds, level) < promised:
        high *= 2
    return float(sd * brentq(lambda effect: power(effect, 1.0, seeds, level) - promised, 0.0, high))


def seeds_to_decide(effect: float, sd: float, level: float, promised: float = POWER) -> float:
    """The fewest seeds that find a true difference of `effect` with probability `promised`; inf beyond MOST_SEEDS."""
    if not power(effect, sd, MOST_SEEDS, level) >= promised:
        return math.inf
    low, high = 1, MOST_SEEDS  # not enough, enough
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power(effect, sd, middle, level) >= promised else (middle, high)
    return high


def sd_range(count: int, confidence: float = 0.95) -> tuple[float, float]:
    """How many times the measured standard deviation of `count` values the true one is, from - to (chi-square)."""
    from scipy import stats

    chi2 = stats.chi2.isf([(1 - confidence) / 2, (1 + confidence) / 2], count - 1)
    low, high = ((count - 1) / chi2) ** 0.5
    return float(low), float(high)
