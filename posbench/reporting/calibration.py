"""Does the procedure keep its word? Trials with a known truth, run through the same code as a report.

    python -m posbench.reporting.calibration          # about half a minute; prints the table

- A/A: one scheme under several names. Any decided pair is false, and so is any `>` of the chain: at most 5% of trials
  may have one.
- Power: two schemes that differ by what `smallest_visible` promises to see: found in 80% of trials, or more where
  Holm's steps help.
- Beyond the promise: the same where the noise of one scheme is far from symmetric, which a t-test assumes it is not.
- Intervals: how often a 95% interval of the paired gap, and of the choice of documents, holds the truth.

Synthetic losses are a scheme's level, plus what a seed does to all schemes, plus noise of its own, in the sizes of
real small runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from posbench.evaluation.documents import FEWEST, document_error, effective
from posbench.reporting.chains import chain
from posbench.reporting.power import POWER, Spread, smallest_visible
from posbench.reporting.statistics import LEVEL, Floats, compare_all, t_interval
from posbench.reporting.tables import Table

CASES = ((2, 5), (11, 5), (11, 3))  # schemes, seeds
SEED_SD, NOISE_SD = 0.006, 0.0115  # nats/token: of what a seed does to all schemes, and of what remains; measured at
# 1M tokens (at 0.2M: 0.035, 0.031)


@dataclass(frozen=True)
class Rate:
    """How often something happened in trials, and what was promised."""

    what: str
    trials: int
    hits: int
    promised: float
    at_most: bool  # is `promised` an upper bound? Otherwise a lower one

    @property
    def rate(self) -> float:
        return self.hits / self.trials

    @property
    def keeps_promise(self) -> bool:
        """Whether a procedure that keeps the promise gives such a count more often than once in 1000 (binomial)."""
        from scipy import stats

        tail = (
            stats.binom.sf(self.hits - 1, self.trials, self.promised)
            if self.at_most
            else stats.binom.cdf(self.hits, self.trials, self.promised)
        )
        return bool(tail > 0.001)


Noise = Callable[[np.random.Generator, tuple[int, int]], Floats]


def normal(random: np.random.Generator, shape: tuple[int, int]) -> Floats:
    return random.normal(size=shape)


def heavy(random: np.random.Generator, shape: tuple[int, int]) -> Floats:
    """Student's t with 3 degrees of freedom: now and then a seed goes far off."""
    return random.standard_t(3, size=shape) / math.sqrt(3)


def uneven(random: np.random.Generator, shape: tuple[int, int]) -> Floats:
    """Normal, and one scheme five times as noisy as the others."""
    return random.normal(size=shape) * np.where(np.arange(shape[1]) == 0, 5.0, 1.0)


def skewed(random: np.random.Generator, shape: tuple[int, int]) -> Floats:
    """Normal, and one scheme exponential: most seeds a little better than the mean, some far worse."""
    noise = random.normal(size=shape)
    noise[:, 0] = random.exponential(size=shape[0]) - 1
    return noise


def split(random: np.random.Generator, shape: tuple[int, int]) -> Floats:
    """Normal, and one scheme that fails to learn something with three seeds of ten."""
    noise = random.normal(size=shape)
    noise[:, 0] = 20 * ((random.random(shape[0]) < 0.3) - 0.3)
    return noise


def rare(random: np.random.Generator, shape: tuple[int, int]) -> Floats:
    """Normal, and one scheme that fails to learn something with one seed of ten."""
    noise = random.normal(size=shape)
    noise[:, 0] += 20 * ((random.random(shape[0]) < 0.1) - 0.1)
    return noise


def related(random: np.random.Generator, shape: tuple[int, int]) -> Floats:
    """Normal, three families of schemes; those of one family have 90 % of their variance in common."""
    common = random.normal(size=(shape[0], 3))[:, np.arange(shape[1]) % 3]
    return math.sqrt(0.9) * common + math.sqrt(0.1) * random.normal(size=shape)


def same_scheme(trials: int, schemes: int, seeds: int, noise: Noise = normal, seed: int = 0) -> Rate:
    """A/A: trials in which the procedure tells one scheme under several names apart."""
    random = np.random.default_rng(seed)
    hits = 0
    for _ in range(trials):
        pairs = compare_all(_losses(random, np.zeros(schemes), seeds, noise), _names(schemes))
        hits += any(p.is_decided for p in pairs) or ">" in chain(pairs).signs
    return Rate(
        f"A/A: any false difference, {schemes} names, {seeds} seeds, {noise.__name__} noise",
        trials,
        hits,
        LEVEL,
        at_most=True,
    )


def planted(trials: int, schemes: int, seeds: int, seed: int = 1) -> Rate:
    """Trials that find one scheme, worse than another by what is promised to be visible, behind it.

    The promise is made at the first of Holm's levels, LEVEL / pairs; with more than one pair Holm's later steps can
    only help.
    """
    random = np.random.default_rng(seed)
    pairs = schemes * (schemes - 1) // 2
    effect = smallest_visible(Spread(NOISE_SD * math.sqrt(2)), seeds, LEVEL / pairs)
    levels = np.zeros(schemes)
    levels[-1] = effect
    names = _names(schemes)
    hits = 0
    for _ in range(trials):
        made = compare_all(_losses(random, levels, seeds, normal), names)
        hits += any(p.is_decided and (p.left, p.right) == (names[0], names[-1]) for p in made)
    return Rate(
        f"planted {effect:.4f} nats/token found, {schemes} schemes, {seeds} seeds", trials, hits, POWER, at_most=False
    )


def gap_interval(trials: int, seeds: int, seed: int = 2) -> Rate:
    """Trials whose 95% interval of a paired gap holds the true gap."""
    random = np.random.default_rng(seed)
    hits = 0
    for _ in range(trials):
        losses = _losses(random, np.array([0.0, 0.01]), seeds, normal)
        interval = t_interval(losses[:, 1] - losses[:, 0])
        hits += interval.low <= 0.01 <= interval.high
    return Rate(f"interval of a gap over {seeds} seeds holds the truth", trials, hits, 0.95, at_most=False)


def document_interval(trials: int, documents: int, unequal: float = 0.5, seed: int = 3) -> Rate:
    """Trials whose interval over documents holds the token-weighted mean of all documents there could be.

    Documents differ in length (log-normal, a standard deviation of `unequal`; that of Python's own modules is 1.6) and
    in their gap, 0.02 +- 0.03 nats/token. Every 50 trials have the same lengths; lengths of too few effective documents
    have no interval and are drawn again.
    """
    random = np.random.default_rng(seed)
    hits = 0
    for _ in range(trials // 50):
        targets = np.zeros(documents)
        while effective(targets) < FEWEST:
            targets = random.lognormal(7, unequal, documents).round() + 1
        nll = targets * random.normal(0.02, 0.03, (50, documents))
        hits += int((np.abs(nll.sum(axis=1) / targets.sum() - 0.02) <= document_error(nll, targets)).sum())
    lengths = f"lengths e^{unequal} apart"
    what = f"interval over {documents} documents, {lengths}, holds the truth"
    return Rate(what, trials // 50 * 50, hits, 0.95, at_most=False)


def _losses(random: np.random.Generator, levels: Floats, seeds: int, noise: Noise) -> Floats:
    """[seeds, schemes], nats/token."""
    common = random.normal(3.0, SEED_SD, (seeds, 1))
    return common + levels + NOISE_SD * noise(random, (seeds, len(levels)))


def _names(count: int) -> list[str]:
    return [f"scheme_{n:02d}" for n in range(count)]


def calibrate(trials: int = 2000) -> list[Rate]:
    """All of it. With 2000 trials a rate is known to about one percentage point."""
    return [
        same_scheme(trials, 2, 5),
        same_scheme(trials, 3, 5),
        same_scheme(trials, 11, 5),
        same_scheme(trials, 11, 3),
        same_scheme(trials, 3, 2),
        same_scheme(trials, 3, 5, heavy),
        same_scheme(trials, 3, 5, uneven),
        same_scheme(trials, 11, 5, related),
        planted(trials, 2, 5),
        planted(trials, 2, 3),
        planted(trials, 3, 5),
        planted(trials, 11, 5),
        gap_interval(trials, 3),
        gap_interval(trials, 5),
        document_interval(trials, 7),
        document_interval(trials, 12),
        document_interval(trials, 60),
        document_interval(trials, 11, unequal=1.6),
        document_interval(trials, 27, unequal=1.6),
    ]


def beyond(trials: int = 2000) -> list[Rate]:
    """A/A where the test's assumption fails: not promised, only measured."""
    return [same_scheme(trials, count, seeds, noise) for noise in (skewed, rare, split) for count, seeds in CASES]


def calibration_table(rates: list[Rate], title: str = "Calibration of the statistics") -> Table:
    """Promise beside measurement."""
    rows = [
        [
            r.what,
            str(r.trials),
            f"{'at most' if r.at_most else 'at least'} {r.promised:.0%}",
            f"{r.rate:.1%}",
            "yes" if r.keeps_promise else "NO",
        ]
        for r in rates
    ]
    return Table(title, ["what", "trials", "promised", "measured", "kept"], rows)


if __name__ == "__main__":
    from posbench.console import console as new_console
    from posbench.reporting.tables import print_table

    print_table(calibration_table(calibrate()), new_console())
    print_table(calibration_table(beyond(), "Where one scheme's noise is not symmetric"), new_console())
