"""How sure a difference is: paired over seeds, corrected for all pairs, and what could not be seen.

Losses come as a matrix [seeds, schemes] in nats/token. One seed gives every scheme the same initial weights and the
same batches, so a difference is taken within each seed; what the seeds have in common drops out of it.

Two kinds of doubt, never added up:
- over seeds (`t_interval`, `compare_all`): would other seeds, on this text, say the same? Student's t on the
  differences.
- over documents (`document_error`): would other documents, with these models, say the same? A bootstrap over
  documents.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np
from numpy.typing import NDArray

from posbench.reporting.power import seeds_to_decide, smallest_visible

LEVEL = 0.05  # of the whole family of pairs: the chance of a wrong ">" anywhere
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A mean and its 95 % interval; `low` and `high` are NaN where one value allows none."""

    mean: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2


def t_interval(values: Floats, confidence: float = 0.95) -> Interval:
    """Student's interval of the mean of independent values (differences within seeds, or one scheme's losses)."""
    values = np.asarray(values, dtype=np.float64)
    mean = float(values.mean())
    if len(values) < 2:
        return Interval(mean, math.nan, math.nan)
    half = student(len(values) - 1, confidence) * float(values.std(ddof=1)) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


@cache
def student(freedom: int, confidence: float) -> float:
    """The two-sided quantile of Student's t."""
    from scipy import stats

    return float(stats.t.isf((1 - confidence) / 2, freedom))


def holm(p: Floats) -> Floats:
    """Adjusted p-values of Holm (1979): sorted upwards, the i-th of m times (m - i + 1), made monotone, at most 1.

    Rejecting those at or below a level holds the chance of any false rejection in the family to that level, however the
    tests depend on each other.
    """
    p = np.asarray(p, dtype=np.float64)
    order = np.argsort(p, kind="stable")
    steps = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(steps, 1.0)
    return adjusted


@dataclass(frozen=True)
class Pair:
    """Two schemes over the seeds they share; `left` has the lower mean loss (by name where they tie)."""

    left: str
    right: str
    interval: Interval  # of right - left, nats/token, 95 % for this pair alone
    sd: float  # of the differences over seeds
    seeds: int
    p: float  # two-sided paired t-test; NaN with one seed
    p_holm: float  # corrected over all pairs
    level: float  # at which a pair still open would have been decided: LEVEL / (pairs - decided pairs)

    @property
    def difference(self) -> float:
        """right - left in nats/token, never negative."""
        return self.interval.mean

    @property
    def is_decided(self) -> bool:
        """Whether `left` is better, at LEVEL over the whole family."""
        return bool(self.p_holm <= LEVEL)

    @cached_property
    def smallest_visible(self) -> float:
        """The true difference (nats/token) that these seeds would have decided with probability POWER."""
        return smallest_visible(self.sd, self.seeds, self.level)

    @cached_property
    def seeds_to_decide(self) -> float:
        """About how many seeds would decide the observed difference; infinity beyond MOST_SEEDS, NaN with one seed."""
        return seeds_to_decide(self.difference, self.sd, self.level) if self.seeds > 1 else math.nan


def compare_all(losses: Floats, names: list[str]) -> list[Pair]:
    """Every pair of schemes by a paired t-test over seeds, with Holm's correction over all of them.

    Arguments: losses [seeds, schemes], finite; names, one a scheme, distinct.
    """
    seeds, schemes = losses.shape
    assert schemes == len(names) == len(set(names)) and np.isfinite(losses).all()
    order = sorted(range(schemes), key=lambda i: (losses[:, i].mean(), names[i]))
    pairs = [(a, b) for n, a in enumerate(order) for b in order[n + 1 :]]
    if not pairs:
        return []
    differences = np.stack([losses[:, b] - losses[:, a] for a, b in pairs], axis=1)
    p = _p_values(differences)
    p_holm = holm(p) if seeds > 1 else np.full(len(pairs), math.nan)
    level = LEVEL / max(1, len(pairs) - int((p_holm <= LEVEL).sum()))
    sd = differences.std(axis=0, ddof=1) if seeds > 1 else np.full(len(pairs), math.nan)
    return [
        Pair(
            names[a], names[b], t_interval(differences[:, n]), float(sd[n]), seeds, float(p[n]), float(p_holm[n]), level
        )
        for n, (a, b) in enumerate(pairs)
    ]


def _p_values(differences: Floats) -> Floats:
    """Two-sided p of `mean = 0` for each column. Equal losses (0 / 0) differ by nothing: p = 1. One row: NaN."""
    import warnings

    from scipy import stats

    if len(differences) < 2:
        return np.full(differences.shape[1], math.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # constant differences: t is infinite or 0 / 0, handled below
        p = np.asarray(stats.ttest_1samp(differences, 0.0, axis=0).pvalue)
    return np.where(np.isnan(p), 1.0, p)


@dataclass(frozen=True)
class Chain:
    """The ranking in one line, `a ~ b > c`, better to the left.

    The rule. Schemes stand in the order of their mean loss. Between two neighbours stands `>` if and only if EVERY
    scheme to the left of that place is decided better than EVERY scheme to the right of it (paired t-tests over
    seeds, Holm over all pairs); otherwise `~`. So whatever a reader takes out of a `>`, at any distance, is a
    rejected hypothesis, and the chance that a chain holds any false `>` is at most LEVEL. Pairwise decisions need not
    be transitive (a ~ b, b ~ c, yet a > c; no way of writing groups would say that without a false `b > c` or `a >
    b`): a `~` says only that the chain cannot be cut there, and pairs that are decided although no `>` stands between
    them are listed beside it, in `inside`. With one seed nothing is tested: the order is given with commas.
    """

    order: list[str]
    signs: list[str]  # between neighbours: ">" or "~"; "," where nothing was tested
    inside: list[Pair]  # decided pairs with no ">" between them
    seeds: int

    @property
    def is_tested(self) -> bool:
        return self.seeds > 1

    @property
    def text(self) -> str:
        """`a ~ b > c`, or `a, b, c` where nothing was tested."""
        words = [self.order[0]] if self.order else []
        for sign, name in zip(self.signs, self.order[1:], strict=True):
            words += [sign, name]
        return " ".join(words).replace(" ,", ",")

    def groups(self) -> list[list[str]]:
        """The schemes between the `>` signs."""
        made = [[self.order[0]]] if self.order else []
        for sign, name in zip(self.signs, self.order[1:], strict=True):
            if sign == ">":
                made.append([])
            made[-1].append(name)
        return made


def chain(pairs: list[Pair]) -> Chain:
    """The chain of all pairs of a set of schemes, by the rule of `Chain`."""
    order = _order(pairs)
    seeds = pairs[0].seeds if pairs else 0
    if seeds < 2:
        return Chain(order, [","] * (len(order) - 1), [], seeds)
    decided = {(pair.left, pair.right) for pair in pairs if pair.is_decided}
    signs = [
        ">" if all((a, b) in decided for a in order[:cut] for b in order[cut:]) else "~" for cut in range(1, len(order))
    ]
    place = {name: n for n, name in enumerate(order)}
    inside = [p for p in pairs if p.is_decided and ">" not in signs[place[p.left] : place[p.right]]]
    return Chain(order, signs, inside, seeds)


def chain_without(pairs: list[Pair], name: str) -> Chain:
    """The chain had `name` not been compared: the others' tests, corrected for their own number."""
    rest = [pair for pair in pairs if name not in (pair.left, pair.right)]
    adjusted = holm(np.array([pair.p for pair in rest]))
    return chain([replace(pair, p_holm=float(p)) for pair, p in zip(rest, adjusted, strict=True)])


def _order(pairs: list[Pair]) -> list[str]:
    """Best first: `compare_all` lists the pairs of the best scheme first, then those of the second without it, ..."""
    return list(dict.fromkeys(p.left for p in pairs)) + ([pairs[-1].right] if pairs else [])


def letters(pairs: list[Pair]) -> dict[str, str]:
    """Letters to each scheme, such as `a`, `ab`: two schemes share one if and only if their pair is not decided.

    The compact letter display of Piepho (2004) by insertion and absorption: it holds every pairwise decision, also
    where they are not transitive and the chain has to say `~`. Letters begin at the best scheme.
    """
    order = _order(pairs)
    groups = [frozenset(order)]
    for pair in pairs:
        if pair.is_decided:
            split = {g - {one} for g in groups if {pair.left, pair.right} <= g for one in (pair.left, pair.right)}
            whole = [g for g in groups if not {pair.left, pair.right} <= g]
            groups = whole + [g for g in split if not any(g <= other for other in whole)]
    place = {name: n for n, name in enumerate(order)}
    groups.sort(key=lambda group: sorted(place[name] for name in group))
    return {name: "".join(_letter(n) for n, group in enumerate(groups) if name in group) for name in order}


def _letter(number: int) -> str:
    return chr(ord("a") + number) if number < 26 else f"({number + 1})"


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
