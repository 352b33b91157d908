"""How sure a difference is: paired over seeds, corrected for all pairs, and what could not be seen.

Losses come as a matrix [seeds, schemes] in nats/token. One seed gives every scheme the same initial weights and the
same batches, so a difference is taken within each seed; what the seeds have in common drops out of it.

Two kinds of doubt, never added up:
- over seeds (`t_interval`, `compare_all`): would other seeds, on this text, say the same? Student's t on the
  differences; from six schemes on by the rule `own` of `moderation.py`.
- over documents (`posbench.evaluation.documents`): would other documents, with these models, say the same?
  Documents weigh by their tokens, and the interval by how unequal they are.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from posbench.evaluation.documents import Floats, student
from posbench.reporting.moderation import FEWEST_SCHEMES, fit_prior, own, plain
from posbench.reporting.power import (
    Spread,
    cautious_differences,
    seeds_to_decide,
    seeds_to_equate,
    smallest_visible,
)

LEVEL = 0.05  # of the whole family of pairs: the chance of a wrong ">" anywhere, and as much of a wrong "≈"
MARGIN = 0.01  # nats/token: losses closer than this, 1% in perplexity, are taken for equal
Family = Collection[frozenset[str]]  # pairs of names that are corrected together


@dataclass(frozen=True)
class Interval:
    """A mean and its 95 % interval; `low` and `high` are NaN where one value allows none."""

    mean: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2


NOTHING = Interval(math.nan, math.nan, math.nan)


def t_interval(values: Floats, confidence: float = 0.95) -> Interval:
    """Student's interval of the mean of independent values (differences within seeds, or one scheme's losses)."""
    values = np.asarray(values, dtype=np.float64)
    mean = float(values.mean())
    if len(values) < 2:
        return Interval(mean, math.nan, math.nan)
    half = student(len(values) - 1, confidence) * float(values.std(ddof=1)) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def larger(half_width: ArrayLike, other: ArrayLike) -> Floats:
    """The larger of two half intervals, elementwise; where one is not known (NaN) the other."""
    return np.fmax(np.asarray(half_width, dtype=np.float64), np.asarray(other, dtype=np.float64))


def holm(p: Floats) -> Floats:
    """Adjusted p-values of Holm (1979): sorted upwards, the i-th of m times (m - i + 1), made monotone, at most 1.

    Rejecting those at or below a level holds the chance of any false rejection in the family to that level, however the
    tests depend on each other. Arguments: p [..., m], each row a family.
    """
    p = np.asarray(p, dtype=np.float64)
    order = np.argsort(p, axis=-1, kind="stable")
    steps = np.maximum.accumulate(np.take_along_axis(p, order, -1) * np.arange(p.shape[-1], 0, -1), axis=-1)
    adjusted = np.empty_like(p)
    np.put_along_axis(adjusted, order, np.minimum(steps, 1.0), -1)
    return adjusted


@dataclass(frozen=True)
class Pair:
    """Two schemes over the seeds they share; `left` has the lower mean loss (by name where they tie).

    Every p is NaN with one seed. Outside the family that was asked for, `p_holm` and `p_equal_holm` are NaN.
    """

    left: str
    right: str
    interval: Interval  # of right - left, nats/token, 95 % for this pair alone, by the same rule as `p`
    sd: float  # of the differences over seeds, nats/token
    spread: Spread  # what the test divides by in its place
    seeds: int
    p: float  # of no difference, two-sided: the rule `own` from six schemes on, below that the paired t-test
    p_plain: float  # ... by the paired t-test
    p_holm: float  # `p` corrected over the family
    level: float  # at which a pair still open would have been decided: LEVEL / (tested pairs - decided pairs)
    margin: float  # nats/token
    p_equal: float  # of a difference of `margin` or more: the larger p of two one-sided tests
    p_equal_holm: float  # corrected over the family
    level_equal: float  # as `level`, of the tests of equivalence

    @property
    def difference(self) -> float:
        """right - left in nats/token, never negative."""
        return self.interval.mean

    @property
    def is_decided(self) -> bool:
        """Whether `left` is better, at LEVEL over the whole family."""
        return bool(self.p_holm <= LEVEL)

    @property
    def is_equivalent(self) -> bool:
        """Whether the two differ by less than the margin, at LEVEL over the whole family."""
        return bool(self.p_equal_holm <= LEVEL)

    @property
    def is_tested(self) -> bool:
        """Whether there are two seeds, and the pair is of the family."""
        return not math.isnan(self.p_holm)

    @property
    def is_open(self) -> bool:
        """Whether it was tested and neither a difference nor equivalence was found."""
        return self.is_tested and not self.is_decided and not self.is_equivalent

    @cached_property
    def smallest_visible(self) -> float:
        """The true difference (nats/token) that these seeds would have decided with probability POWER or more.

        By the plain test: whether a pair is helped by the others is itself chance, and counting on it promises too much
        (55 % in place of 80 %, in trials of 11 schemes and 5 seeds).
        """
        return smallest_visible(Spread(self.spread.sd), self.seeds, self.level)

    @cached_property
    def seeds_to_decide(self) -> float:
        """About how many seeds would decide it, were the true difference at the lower end of its 80 % interval.

        (One-sided: see `cautious_differences`.) Infinity beyond MOST_SEEDS, NaN with one seed.
        """
        if self.seeds < 2:
            return math.nan
        return seeds_to_decide(self._cautious[0], self.spread, self.level)

    @cached_property
    def seeds_to_equate(self) -> float:
        """... would find it to be smaller than the margin, were it at the upper end."""
        if self.seeds < 2:
            return math.nan
        return seeds_to_equate(self._cautious[1], self.margin, self.spread, self.level_equal)

    @property
    def seeds_to_settle(self) -> float:
        """The fewer of the two."""
        return min(self.seeds_to_decide, self.seeds_to_equate)

    @cached_property
    def _cautious(self) -> tuple[float, float]:
        return cautious_differences(self.difference, self.spread, self.seeds)


def compare_all(losses: Floats, names: list[str], family: Family | None = None, margin: float = MARGIN) -> list[Pair]:
    """Every pair of schemes tested over seeds for a difference and for equivalence, Holm's correction over a family.

    Arguments: losses [seeds, schemes], finite; names, one a scheme, distinct; family, the pairs that are corrected
    together (default: all), chosen before the losses are seen; margin of equivalence in nats/token. All pairs are
    fitted to the prior of the rule `own`, whatever the family is.
    """
    seeds, schemes = losses.shape
    assert schemes == len(names) == len(set(names)) and np.isfinite(losses).all() and margin > 0
    order = sorted(range(schemes), key=lambda i: (losses[:, i].mean(), names[i]))
    pairs = [(a, b) for n, a in enumerate(order) for b in order[n + 1 :]]
    if not pairs:
        return []
    differences = np.stack([losses[:, b] - losses[:, a] for a, b in pairs], axis=1)
    is_tested = np.array(
        [seeds > 1 and (family is None or frozenset((names[a], names[b])) in family) for a, b in pairs]
    )
    tests = _test(differences, schemes, margin)
    p_holm, level = _corrected(tests.p, is_tested)
    p_equal_holm, level_equal = _corrected(tests.p_equal, is_tested)
    return [
        Pair(
            left=names[a],
            right=names[b],
            interval=tests.intervals[n],
            sd=float(tests.sd[n]),
            spread=tests.spreads[n],
            seeds=seeds,
            p=float(tests.p[n]),
            p_plain=float(tests.p_plain[n]),
            p_holm=float(p_holm[n]),
            level=level,
            margin=margin,
            p_equal=float(tests.p_equal[n]),
            p_equal_holm=float(p_equal_holm[n]),
            level_equal=level_equal,
        )
        for n, (a, b) in enumerate(pairs)
    ]


@dataclass(frozen=True)
class _Tests:
    """Of each pair: see the fields of `Pair`."""

    sd: Floats
    spreads: list[Spread]
    intervals: list[Interval]
    p: Floats
    p_plain: Floats
    p_equal: Floats


def _test(differences: Floats, schemes: int, margin: float) -> _Tests:
    """The tests of differences [seeds, pairs]."""
    from scipy.special import stdtrit

    (seeds, count), mean = differences.shape, differences.mean(axis=0)
    if seeds < 2:
        none = np.full(count, math.nan)
        intervals = [Interval(float(m), math.nan, math.nan) for m in mean]
        return _Tests(none, [Spread(math.nan)] * count, intervals, none, none, none)
    variances, freedom = differences.var(axis=0, ddof=1), seeds - 1
    students = plain(variances, freedom)
    used = own(variances, freedom) if schemes >= FEWEST_SCHEMES else students
    is_helped = used.freedom > freedom
    prior = float(fit_prior(variances, freedom).freedom.item()) if is_helped.any() else 0.0
    half = stdtrit(used.freedom, 0.975) * np.sqrt(used.variance / seeds)
    return _Tests(
        sd=np.sqrt(variances),
        spreads=[Spread(math.sqrt(v), prior * bool(h)) for v, h in zip(used.variance, is_helped, strict=True)],
        intervals=[Interval(float(m), float(m - h), float(m + h)) for m, h in zip(mean, half, strict=True)],
        p=used.p_values(mean, seeds),
        p_plain=students.p_values(mean, seeds),
        p_equal=used.p_equivalence(mean, seeds, margin),
    )


def _corrected(p: Floats, is_tested: NDArray[np.bool_]) -> tuple[Floats, float]:
    """p-values of the family by Holm, NaN outside it; and the level of its next step, at which an open pair is held."""
    adjusted = np.full_like(p, math.nan)
    adjusted[is_tested] = holm(p[is_tested])
    return adjusted, LEVEL / max(1, int(is_tested.sum()) - int((adjusted <= LEVEL).sum()))
