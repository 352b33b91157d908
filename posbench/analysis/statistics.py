"""Measure how sure a difference between two schemes is, and how large one must be to be seen.

One seed gives every scheme the same initial weights and batches, so differences are taken within each seed. There are
two kinds of uncertainty, which are never added:

    over seeds      would other seeds, on this text, say the same? Student's t on the differences.
    over documents  would other documents, with these models, say the same? (`document_error`)

A scheme beats another if it does so at both learning rates that the other's search kept (`beats`). Holm's correction
keeps the chance of any false claim in a family of pairs at 5 %. Letters, verdicts and the paragraph of a report come
from one family, the claimed pairs: those that the experiment fixed before training, or all pairs if it fixed none.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import nctdtrinc, stdtr, stdtrit

from posbench.analysis.options import MARGIN

Floats = NDArray[np.float64]

CONFIDENCE = 0.95  # coverage of intervals
WIDE = 1.0  # nats per token: a mean over seeds that differ by more says little, so the range is shown
LEVEL = 0.05  # chance of any false claim in a family
POWER = 0.80  # chance of finding the smallest detectable difference
FEWEST_SEEDS = 3  # seeds needed to rank schemes
ENOUGH_SEEDS = 5  # seeds needed to rank schemes if the seeds of one scheme split in two
FEWEST_DOCUMENTS = 4.0  # effective documents; with fewer, one or two decide the result
ENOUGH_DOCUMENTS = 200.0  # effective documents beyond which unequal weights no longer matter and Student's t holds
BELOW_MARGIN = ", below margin"  # the end of a verdict on a difference that is shown to be smaller than the margin
CONFIRMING = range(100, 108)  # seeds that confirm the winner of a loop, and are left out of all other comparisons
ROUNDING = 1e-12  # nats per token: losses over seeds that differ by less were only rounded differently
DRAWS = 10_000  # random draws for a quantile: its coverage is then right to 0.2 percentage points


def interval(values: Any) -> tuple[float, float, float]:
    """Return the mean of independent values and the ends of its 95 % t-interval, NaN below FEWEST_SEEDS values."""
    values = np.asarray(values, dtype=np.float64)
    count = len(values)
    mean = float(values.sum()) / count if count else math.nan
    if count < FEWEST_SEEDS:
        return mean, math.nan, math.nan
    half = student(count - 1) * math.sqrt(float(((values - mean) ** 2).sum()) / (count - 1) / count)
    return mean, mean - half, mean + half


def interval_of(name: str, values: Any) -> dict[str, float]:
    """Return what `interval` returns, as `{name}`, `{name}_low` and `{name}_high`."""
    return dict(zip((name, f"{name}_low", f"{name}_high"), interval(values), strict=True))


def holm(p: Any, size: int = 0) -> Floats:
    """Return the p-values after Holm's correction (1979), in the given order; NaN stays, and does not count.

    Arguments: size, the number m of planned tests, if it is larger than the number of p-values.
    """
    p = np.asarray(p, dtype=np.float64)
    count = int(np.isfinite(p).sum())
    order = np.argsort(p, kind="stable")[:count]  # NaN is last
    adjusted = np.full_like(p, math.nan)
    # Sorted upwards, the i-th of m is multiplied by m - i + 1; the products are made monotone and at most 1.
    factors = max(size, count) - np.arange(count)
    adjusted[order] = np.minimum(np.maximum.accumulate(p[order] * factors), 1.0)
    return adjusted


def beats(best: Floats, at_kept_rates: Sequence[Floats]) -> Floats:
    """Return the p-value of the claim that one scheme beats another at each rate that the other's search kept.

    It is the largest one-sided paired p over the kept rates (an intersection-union test), doubled because either scheme
    may win. With one kept rate this is the two-sided paired t-test, for the winner.
    Arguments: best [..., seeds], losses of the first scheme at its best rate; at_kept_rates, losses [..., seeds] of the
    other scheme with the same seeds, an array per kept rate, infinite if a run diverged.
    """
    with np.errstate(invalid="ignore"):  # infinite losses are subtracted
        # Per kept rate: whether every loss is finite, and the one-sided p.
        is_finite, at_rates = [], []
        for losses in at_kept_rates:
            differences = losses - best
            finite = np.isfinite(differences).all(-1)
            # Differences that are all the same say nothing about noise.
            p = np.where(is_constant(differences), 1.0, _above(differences))
            # A kept rate at which a run diverged counts as beaten if the first scheme is ahead with every seed there.
            p_if_diverged = np.where((differences > 0).all(-1), 0.0, 1.0)
            is_finite.append(finite)
            at_rates.append(np.where(finite, p, p_if_diverged))
    two_sided = np.minimum(1.0, 2 * np.max(at_rates, axis=0))
    # The p is 1 if a run of the first scheme or of each kept rate diverged.
    return np.where(np.any(is_finite, axis=0), two_sided, 1.0)


def is_constant(differences: Floats) -> NDArray[np.bool_]:
    """Return whether differences over the last axis are all the same, except for rounding."""
    return np.asarray(np.ptp(differences, axis=-1) <= ROUNDING)


def equals(differences: Sequence[Floats], margin: float) -> float:
    """Return the p-value of the claim that the mean of each of `differences` [seeds] is closer to 0 than `margin`."""
    # The largest p of the two one-sided tests of each mean.
    p_values = []
    for values in differences:
        p_values += [_above(margin - values), _above(margin + values)]
    return float(np.max(p_values))


def _above(difference: Floats) -> Floats:
    """Return the one-sided p-value of the claim that the mean over the last axis is above 0; 1 if it is exactly 0."""
    seeds, mean = difference.shape[-1], difference.mean(-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        p = stdtr(seeds - 1, -mean / (difference.std(-1, ddof=1) / math.sqrt(seeds)))
    return np.where(mean == 0, 1.0, p)


def compare(
    losses: pd.DataFrame,
    second: pd.DataFrame | None = None,
    margin: float = MARGIN,
    primary: Iterable[str] = (),
    fewest: int = FEWEST_SEEDS,
    size: int = 0,
    undecided: Collection[frozenset[str]] = (),
    lower_is_better: bool = True,
) -> pd.DataFrame:
    """Return the tests of every pair of schemes over the seeds that both have, as a table with a row per pair.

    Arguments: losses, nats per token, a row per seed and a column per scheme, NaN for a missing run; second, the same
    at the second learning rate that each scheme's search kept, infinite if a run diverged, or None without a search;
    margin, nats per token below which losses count as equal; primary, groups of schemes whose pairs were fixed before
    training, strings of names; fewest, seeds that a test needs; size, the number of planned tests, if it is larger
    (unused with `primary`); undecided, pairs that no test may decide, which get 1 for `p` and `p_equal`;
    lower_is_better, False for values of which the higher one is better.
    Returns: columns as in `posbench.analysis.table.COLUMNS`; `left` is the scheme with the better mean, and differences
    say how much better it is.
    """
    if not lower_is_better:
        losses = -losses
        if second is not None:
            second = -second
    rows = []
    losses_of = {scheme: losses[scheme].to_numpy(float) for scheme in losses}
    for a, b in combinations(losses.columns, 2):
        gap = losses_of[b] - losses_of[a]
        gap = gap[~np.isnan(gap)]
        if len(gap):
            # The difference is that of `right` minus `left`, so it is never negative.
            left, right, sign = (a, b, 1) if gap.mean() >= 0 else (b, a, -1)
            rows.append({"left": left, "right": right, **_test(sign * gap, margin)})
    # The test of a zero gives only the names of its columns, for a table without rows.
    pairs = pd.DataFrame(rows, columns=["left", "right", *_test(np.zeros(1), margin)])
    pairs.loc[pairs["seeds"] < fewest, ["p_at_rates", "p_equal"]] = math.nan
    # p_at_rates: at the learning rates of these runs. p: at both kept rates of the other scheme, after a search.
    pairs["p"] = pairs["p_at_rates"]
    if second is not None:
        names_of_pairs = zip(pairs["left"], pairs["right"], strict=True)
        tests = [_at_both(losses, second, left, right, margin, fewest) for left, right in names_of_pairs]
        pairs[["p", "p_equal"]] = np.reshape(tests, (-1, 2))
    fixed = fixed_pairs(primary)
    scheme_pairs = list(map(frozenset, zip(pairs["left"], pairs["right"], strict=True)))
    is_open = np.array([pair in undecided for pair in scheme_pairs], dtype=bool) & pairs["p"].notna()
    pairs.loc[is_open, ["p", "p_equal"]] = 1.0
    # Without a search there is only one test.
    if second is None:
        pairs.loc[is_open, "p_at_rates"] = 1.0
    is_fixed = np.array([pair in fixed for pair in scheme_pairs], dtype=bool)
    is_claimed, planned = np.ones(len(pairs), dtype=bool), size
    # If pairs were fixed before training, only these are claimed.
    if is_fixed.any():
        is_claimed, planned = is_fixed, len(fixed)
    # Only claimed pairs are corrected, for all that were planned.
    for p in ("p", "p_at_rates", "p_equal"):
        pairs[f"{p}_claimed"] = holm(pairs[p].where(is_claimed), planned)
    # The smallest p is tested at this level, the strictest of the correction.
    level = LEVEL / max(1, planned, int(is_claimed.sum()))
    rates = 1 if second is None else 2
    pairs["detectable"] = [detectable(*row, level, rates) for row in zip(pairs["sd"], pairs["seeds"], strict=True)]
    return pairs


def _at_both(
    losses: pd.DataFrame, second: pd.DataFrame, left: str, right: str, margin: float, fewest: int
) -> tuple[float, float]:
    """Return the p-values of a pair after a search: that `left` beats `right`, and that both are equal.

    Arguments: as of `compare`. Both are NaN for fewer than `fewest` seeds.
    """
    runs = pd.DataFrame(
        {
            "left_best": losses[left],
            "left_second": second[left],
            "right_best": losses[right],
            "right_second": second[right],
        }
    )
    # The search is complete, so a run that is missing at a best rate has died.
    runs = runs.dropna(subset=["left_second", "right_second"]).fillna(math.inf)
    left_best, left_second, right_best, right_second = runs.to_numpy(float).T
    if len(runs) < fewest:
        return math.nan, math.nan
    # Equal means close at both best rates, and with either scheme at its second rate.
    with np.errstate(invalid="ignore"):  # infinite losses are subtracted
        differences = right_best - left_best, right_second - left_best, right_best - left_second
    # A pair with a diverged run is not shown to be equal.
    p_equal = 1.0
    if np.isfinite(differences).all():
        p_equal = equals(differences, margin)
    return float(beats(left_best, [right_best, right_second])), p_equal


def differs(values: Floats) -> float:
    """Return the two-sided p-value of a t-test that the mean of `values` is 0; NaN for fewer than FEWEST_SEEDS."""
    if len(values) < FEWEST_SEEDS:
        return math.nan
    positive = values if values.mean() >= 0 else -values  # `beats` tests whether a mean is above 0
    return float(beats(0 * positive, [positive]))  # paired with zeros


def fixed_pairs(groups: Iterable[str]) -> set[frozenset[str]]:
    """Return all pairs of schemes within each group, a string of names separated by spaces."""
    return {frozenset(pair) for group in groups for pair in combinations(group.split(), 2)}


def pairs_of(schemes: Iterable[str], losses: pd.DataFrame) -> set[frozenset[str]]:
    """Return the pairs of each of these schemes with every column of `losses`."""
    return {frozenset((scheme, partner)) for scheme in schemes for partner in losses.columns}


def _test(difference: Floats, margin: float) -> dict[str, Any]:
    """Return the columns of `compare` for one pair: seeds, difference with interval, sd and p-values.

    Arguments: difference [seeds], of losses at the rates of the runs, the worse scheme's minus the better one's.
    """
    row = {"seeds": len(difference)} | interval_of("difference", difference)
    if len(difference) < FEWEST_SEEDS:
        return row | {"sd": math.nan, "p_at_rates": math.nan, "p_equal": math.nan}
    tests = {"p_at_rates": float(beats(0 * difference, [difference])), "p_equal": equals([difference], margin)}
    return row | {"sd": float(difference.std(ddof=1))} | tests


def detectable(sd: float, seeds: int, level: float, rates: int = 1) -> float:
    """Return the true difference between two schemes, in the unit of `sd`, that `beats` finds with probability POWER.

    Arguments: sd, the standard deviation of differences over seeds; level, of significance; rates,
    number of learning rates at which the test must succeed.
    """
    if seeds < 2 or math.isnan(sd):
        return math.nan
    # An upper bound with two rates: it holds even if their noise is independent.
    return _shift(seeds, level, rates) * sd / math.sqrt(seeds)


@cache
def _shift(seeds: int, level: float, rates: int) -> float:
    """Return the true mean in standard errors at which the two-sided t-test succeeds with probability POWER."""
    # Each of several independent tests must succeed with this probability.
    power = POWER ** (1 / rates)
    return float(nctdtrinc(seeds - 1, 1 - power, stdtrit(seeds - 1, 1 - level / 2)))


def letters(order: list[str], significant: Collection[frozenset[str]]) -> dict[str, str]:
    """Return letters for each scheme, such as `ab`: two share one exactly if their pair is not `significant`.

    Arguments: order, from best to worst; letters begin at the best.
    """
    # The compact letter display of Piepho (2004) by insertion and absorption. A letter stands for a group of schemes
    # without a significant pair; at first all are in one group.
    groups = [frozenset(order)]
    for pair in significant:
        # Each group with both schemes of the pair is replaced by two, each without one of them.
        smaller = set()
        for group in groups:
            if pair <= group:
                smaller |= {group - {scheme} for scheme in pair}
        groups = [group for group in groups if not pair <= group]
        for group in sorted(smaller, key=len, reverse=True):
            if not any(map(group.issubset, groups)):  # else another group shows the same
                groups.append(group)
    place = {name: n for n, name in enumerate(order)}
    # The group with the best scheme gets the letter a.
    groups.sort(key=lambda group: sorted(place[name] for name in group))
    letters_of = dict.fromkeys(order, "")
    for n, group in enumerate(groups):
        letter = chr(ord("a") + n) if n < 26 else f"({n + 1})"
        for name in group:
            letters_of[name] += letter
    return letters_of


def significant_pairs(pairs: pd.DataFrame, test: str = "p_claimed") -> dict[frozenset[str], str]:
    """Return the better scheme of each pair that differs significantly, by the p-values in column `test`."""
    significant = pairs[pairs[test] <= LEVEL]
    better = {}
    for left, right in zip(significant["left"], significant["right"], strict=True):
        better[frozenset((left, right))] = left
    return better


def equivalent_pairs(pairs: pd.DataFrame) -> set[frozenset[str]]:
    """Return the pairs of schemes shown to differ by less than the margin."""
    pairs_equal = pairs[pairs["p_equal_claimed"] <= LEVEL]
    return set(map(frozenset, zip(pairs_equal["left"], pairs_equal["right"], strict=True)))


def verdict(pairs: pd.DataFrame, scheme: str, reference: str) -> str:
    """Return how `scheme` compares with `reference`: better, worse, equal, open (undecided), or "" if not tested.

    `better, below margin` and `worse, below margin`: there is a difference, and it is shown to be below the margin.
    """
    # Either scheme may be the left one.
    lefts, rights = pairs["left"].to_numpy(), pairs["right"].to_numpy()
    of_pair = pairs[((lefts == scheme) & (rights == reference)) | ((lefts == reference) & (rights == scheme))]
    if of_pair.empty or math.isnan(of_pair["p_claimed"].iloc[0]):
        return ""
    is_equal = bool(of_pair["p_equal_claimed"].iloc[0] <= LEVEL)
    better = significant_pairs(of_pair).get(frozenset((scheme, reference)))
    # Not significant.
    if better is None:
        return "equal" if is_equal else "open"
    outcome = "better" if better == scheme else "worse"
    return f"{outcome}{BELOW_MARGIN}" if is_equal else outcome


def beaten_by(scheme: str, order: list[str], pairs: pd.DataFrame, test: str = "p_claimed") -> list[str]:
    """Return the schemes that `scheme` beats significantly, in the given order."""
    better = significant_pairs(pairs, test)
    return [name for name in order if better.get(frozenset((scheme, name))) == scheme]


def conclusions(order: list[str], pairs: pd.DataFrame) -> Mapping[str, Any]:
    """Return which claimed pairs are decided, equal and open.

    Keys: pairs (number of tested claims), decided (their number), beats (scheme -> schemes it beats by more than
    the margin), small (decided, but below the margin), equal and open (lists of pairs, the scheme with the lower loss
    first), has_letters (whether all pairs are claimed).
    """
    tested = pairs.dropna(subset="p_claimed")
    better, equal = significant_pairs(tested), equivalent_pairs(tested)
    beats = {}
    for scheme in order:
        # Differences below the margin are in a list of their own.
        beaten = [name for name in beaten_by(scheme, order, tested) if frozenset((scheme, name)) not in equal]
        if beaten:
            beats[scheme] = beaten
    equal_pairs, open_pairs, small_pairs = [], [], []
    for names in zip(tested["left"], tested["right"], strict=True):
        pair = frozenset(names)
        if pair in better and pair in equal:
            small_pairs.append(names)
        elif pair in better:
            continue
        elif pair in equal:
            equal_pairs.append(names)
        else:
            open_pairs.append(names)
    return {
        "pairs": len(tested),
        "decided": len(better),
        "beats": beats,
        "small": small_pairs,
        "equal": equal_pairs,
        "open": open_pairs,
        "has_letters": len(tested) == math.comb(len(order), 2),
    }


# ---------------------------------------------------------------- over documents


def effective(targets: Floats) -> float:
    """Return how many equally long documents would carry the same information: (sum n)^2 / sum n^2 (Kish 1965)."""
    targets = np.asarray(targets, dtype=np.float64)
    squares = float((targets**2).sum())
    if not squares:
        return 0.0
    return float(targets.sum()) ** 2 / squares


def document_error(nll: Floats, targets: Floats) -> Floats:
    """Return half the 95 % interval over documents of token-weighted means, for documents drawn independently.

    A mean is m = sum y / sum n, with y the summed nll of a document and n its targets: a ratio, in which document i
    weighs w_i = n_i / sum n. Its variance is estimated from the residuals e_i = y_i / n_i - m, each squared and divided
    by its expected value if all documents were equally variable (CR2 of Bell and McCaffrey 2002):

        V = sum of w_i^2 e_i^2 / (1 - 2 w_i + sum of w^2)

    Half the interval is q sqrt(V), with q of `quantile`. `python -m benchmarks.calibration` measures its coverage.

    Arguments: nll [means, documents], the summed nll (or difference of nll) of each document in nats; targets
    [documents], its scored tokens.
    Returns: [means] in nats/token; NaN if there are fewer than FEWEST_DOCUMENTS effective documents, or a loss is not
    finite.
    """
    scored = np.asarray(targets) > 0
    nll = np.asarray(nll, dtype=np.float64)[:, scored]
    targets = np.asarray(targets, dtype=np.float64)[scored]
    if effective(targets) < FEWEST_DOCUMENTS:
        return np.full(len(nll), math.nan)
    weights = targets / targets.sum()
    return quantile(weights) * np.sqrt(document_variance(nll, targets))


def document_variance(nll: Floats, targets: Floats) -> Floats:
    """Return the variance of token-weighted mean losses over documents, (nats/token)^2.

    NaN if a loss is not finite. Arguments: nll [..., documents] and targets, as of `document_error`.
    """
    weights = targets / targets.sum()
    with np.errstate(invalid="ignore"):
        apart = nll / targets.sum() - weights * nll.sum(axis=-1, keepdims=True) / targets.sum()  # w e
        variance = (apart**2 / (1 - 2 * weights + (weights**2).sum())).sum(axis=-1)
    return np.where(np.isfinite(variance), variance, math.nan)


def quantile(weights: Floats) -> float:
    """Return the factor that turns the standard error of a mean over documents into half its 95 % interval.

    Arguments: weights, of the documents, with sum 1.
    """
    documents = effective(weights)
    are_equal = np.ptp(weights) <= 1e-9 * float(weights.max())
    if documents >= ENOUGH_DOCUMENTS or are_equal:
        return student(documents - 1)
    # With unequal weights neither count of degrees of freedom works (Kish's, 1 / sum w^2 - 1, covers too little,
    # Satterthwaite's too much). So it is the value that |m| / sqrt(V) stays below in 95 % of random draws of normal
    # documents with the same weights.
    return _drawn_quantile(tuple(np.sort(weights).round(12).tolist()))


@cache
def _drawn_quantile(weights: tuple[float, ...]) -> float:
    w = np.array(weights)
    random = np.random.default_rng(0)  # a fixed seed, so that equal weights always give the same quantile
    batch = max(1, 2_000_000 // len(w))  # draws at once: a batch has about two million numbers
    shares = w**2 / (1 - 2 * w + (w**2).sum())  # the factors of e^2 in V, see `document_error`
    ratios = []  # |m| / sqrt(V) of each draw
    batch_sizes = np.diff([*range(0, DRAWS, batch), DRAWS])
    for size in batch_sizes:
        values = random.normal(size=(size, len(w)))
        mean = values @ w
        ratios.append(np.abs(mean) / np.sqrt(np.square(values - mean[:, None]) @ shares))
    return float(np.quantile(np.concatenate(ratios), CONFIDENCE, method="higher"))


@cache
def student(freedom: float) -> float:
    """Return the two-sided CONFIDENCE quantile of Student's t with this many degrees of freedom."""
    return float(stdtrit(freedom, (1 + CONFIDENCE) / 2))


def flip_test(difference: np.ndarray) -> float:
    """Return the exact two-sided p of a sign-flip test that the mean of `difference` (one number per seed) is 0.

    If two schemes are equal, each seed's difference is equally often positive and negative, whatever the distribution
    of times and the censoring at one budget.
    """
    # Exact, unlike a paired log-rank test: for five pairs that agree, its normal approximation gives 0.025, but the
    # exact value is 2 of 2^5 choices, 0.0625.
    difference = difference[difference != 0]  # pairs that are both censored, or equal, tell nothing
    # All choices of signs, [2^n, n]: row m has -1 at i if bit i of m is set, and 1 elsewhere.
    choice_numbers = np.arange(2 ** len(difference))[:, None]
    signs = 1 - 2 * ((choice_numbers >> np.arange(len(difference))) & 1)
    rounding = 1e-9 * np.abs(difference).sum()
    # p is the share of all choices of signs whose mean is at least as far from 0.
    return float((np.abs(signs @ difference) >= np.abs(difference.sum()) - rounding).mean())
