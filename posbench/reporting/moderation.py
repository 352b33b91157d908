"""A pair's variance helped by those of the other pairs: the t-test `own`, made for few seeds.

With three seeds a pair's own variance has two degrees of freedom, and a paired t-test can tell little apart. limma's
moderated t (Smyth 2004, "Linear models and empirical Bayes methods", doi 10.2202/1544-6115.1027) shrinks a pair's
variance towards a prior that all pairs are fitted to. It trusts the prior too much where one scheme is noisier than
the others: then that scheme's variances are shrunk below what they are. The rule `own` shrinks only upwards: where a
pair's own variance exceeds the shrunk one, it stays what it is, and the test is Student's. How often each rule is
wrong is simulated by `python -m benchmarks.calibration`.

Arrays are [..., pairs]; what stands before the last axis are independent experiments (a simulation's trials).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FEWEST_SCHEMES = 6  # 15 pairs; with fewer a prior cannot be estimated
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Prior:
    """A scaled inverse chi-square distribution of the variances, one an experiment: [..., 1]."""

    variance: Floats  # s0^2, (nats/token)^2
    freedom: Floats  # d0; infinity where the variances differ by no more than chance


@dataclass(frozen=True)
class Variances:
    """What a t-test divides by, [..., pairs]: the variance of a difference and its degrees of freedom."""

    variance: Floats
    freedom: Floats

    def p_values(self, differences: Floats, seeds: int) -> Floats:
        """Two-sided p of `mean = 0` for mean differences of so many seeds. Nothing over no variance: p = 1."""
        from scipy.special import stdtr

        with np.errstate(divide="ignore", invalid="ignore"):
            t = np.abs(differences) / np.sqrt(self.variance / seeds)
        return np.where(np.isnan(t), 1.0, 2 * stdtr(self.freedom, -t))

    def p_equivalence(self, differences: Floats, seeds: int, margin: float) -> Floats:
        """p of `the mean lies margin or more from 0`: the larger of two one-sided tests (Schuirmann 1987)."""
        from scipy.special import stdtr

        with np.errstate(divide="ignore", invalid="ignore"):
            t = (margin - np.abs(differences)) / np.sqrt(self.variance / seeds)
        return np.where(np.isnan(t), 1.0, stdtr(self.freedom, -t))


def plain(variances: Floats, freedom: int) -> Variances:
    """Student's: a pair's own variance."""
    return Variances(variances, np.full_like(variances, freedom))


def moderated(variances: Floats, freedom: int) -> Variances:
    """limma's: every pair's variance shrunk towards the prior, which adds at most `freedom` degrees of freedom."""
    prior = fit_prior(variances, freedom)
    added = np.minimum(prior.freedom, freedom)
    shrunk = (added * prior.variance + freedom * variances) / (added + freedom)
    return Variances(shrunk, np.broadcast_to(freedom + added, variances.shape))


def own(variances: Floats, freedom: int) -> Variances:
    """Student's wherever a pair's own variance exceeds the shrunk one, limma's elsewhere."""
    shrunk = moderated(variances, freedom)
    is_own = variances > shrunk.variance
    return Variances(np.where(is_own, variances, shrunk.variance), np.where(is_own, freedom, shrunk.freedom))


def fit_prior(variances: Floats, freedom: int) -> Prior:
    """The prior of Smyth (2004, section 6.2): by mean and variance of the logarithms of the pairs' variances.

    Variances below 1e-5 of the median one count as that, as in limma (equal losses have no logarithm).
    """
    from scipy.special import digamma, polygamma

    median = np.median(variances, axis=-1, keepdims=True)
    floor = np.where(median > 0, 1e-5 * median, np.finfo(np.float64).tiny)
    e = np.log(np.maximum(variances, floor)) - digamma(freedom / 2) + np.log(freedom / 2)
    mean = e.mean(axis=-1, keepdims=True)
    excess = e.var(axis=-1, ddof=1, keepdims=True) - polygamma(1, freedom / 2)  # beyond what chance would give
    half = inverse_trigamma(np.where(excess > 0, excess, 1.0))  # d0 / 2
    d0 = np.where(excess > 0, 2 * half, np.inf)
    return Prior(np.exp(mean + np.where(excess > 0, digamma(half) - np.log(half), 0.0)), d0)


def inverse_trigamma(values: Floats) -> Floats:
    """y with trigamma(y) = value > 0, by Newton's steps on 1 / trigamma, which is nearly a line (Smyth's appendix)."""
    from scipy.special import polygamma

    y = 0.5 + 1 / values
    for _ in range(50):
        trigamma = polygamma(1, y)
        step = trigamma * (1 - trigamma / values) / polygamma(2, y)
        y = y + step
        if np.all(np.abs(step) <= 1e-10 * y):
            break
    return np.asarray(y)
