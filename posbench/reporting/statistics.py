"""Measure how sure a difference between two schemes is, and how large one must be to be seen.

One seed gives every scheme the same initial weights and the same batches. So differences are taken within each seed,
which removes the effect of the seed. There are two kinds of uncertainty, which are never added:

over seeds      would other seeds, on this text, say the same? Student's t on the differences.
over documents  would other documents, with these models, say the same? (`document_error`)

Holm's correction keeps the chance of any false claim in a family of pairs at 5 %. The families: the pairs with the
baseline, the pairs of published claims, the pairs that an experiment fixed before training, and all pairs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import bdtrc, nctdtrinc, stdtr, stdtrit

from posbench.reporting.options import MARGIN

Floats = NDArray[np.float64]

CONFIDENCE = 0.95  # coverage of intervals
LEVEL = 0.05  # chance of any false claim in a family
POWER = 0.80  # chance of finding the smallest detectable difference
FEWEST_SEEDS = 3  # seeds needed to rank schemes
ALLOWED = 2.0  # allowance for rates chosen by one pilot seed, in standard deviations of a difference
ENOUGH_SEEDS = 5  # seeds needed to rank schemes if the seeds of one scheme split in two
SIGNS = 0.5  # p of the sign test above which too few seeds agree in sign for the t-test to be trusted
FEWEST_DOCUMENTS = 4.0  # effective documents; with fewer, one or two decide the result
ENOUGH_DOCUMENTS = 200.0  # effective documents beyond which unequal weights no longer matter and Student's t holds
DRAWS = 10_000  # random draws for a quantile: its coverage is then right to 0.2 percentage points
Link = tuple[str, str, str]  # a claim of a published chain: better scheme, sign, worse scheme


def interval(values: Any) -> tuple[float, float, float]:
    """Return the mean of independent values and ends of its 95 % t-interval (NaN for fewer than FEWEST_SEEDS)."""
    values = np.asarray(values, dtype=np.float64)
    count = len(values)
    mean = float(values.sum()) / count if count else math.nan
    if count < FEWEST_SEEDS:
        return mean, math.nan, math.nan
    half = student(count - 1) * math.sqrt(float(((values - mean) ** 2).sum()) / (count - 1) / count)
    return mean, mean - half, mean + half


def holm(p: Floats, size: int = 0) -> Floats:
    """Return the p-values after Holm's correction (1979) for several tests, in the given order.

    Sorted upwards, the i-th of m is multiplied by m - i + 1; the products are made monotone and at most 1.
    Arguments: size, the number m of planned tests, if it is larger than len(p).
    """
    p = np.asarray(p, dtype=np.float64)
    order = np.argsort(p, kind="stable")
    adjusted = np.empty_like(p)
    factors = max(size, len(p)) - np.arange(len(p))
    adjusted[order] = np.minimum(np.maximum.accumulate(p[order] * factors), 1.0)
    return adjusted


def compare(
    losses: pd.DataFrame,
    baseline: str | None,
    links: Iterable[Link] = (),
    margin: float = MARGIN,
    pilots: int = 0,
    primary: Iterable[str] = (),
    fewest: int = FEWEST_SEEDS,
) -> pd.DataFrame:
    """Return the tests of every pair of schemes over the seeds that both have, as a table with a row per pair.

    Arguments: losses, nats per token, a row per seed and a column per scheme, NaN for a missing run; links, published
    claims about pairs; margin, nats per token below which losses count as equal; pilots, number of pilot seeds that
    chose each scheme's learning rate (differences are then tested against their `allowance`), 0 for none; primary,
    groups of schemes whose pairs were fixed before training, so that their tests do not depend on other rows; fewest,
    number of seeds that a pair needs to be tested.
    Returns: columns as in `posbench.reporting.table.COLUMNS`; `left` is the scheme with the lower mean loss.
    """
    rows = []
    of_scheme = {scheme: losses[scheme].to_numpy() for scheme in losses}
    for a, b in combinations(losses.columns, 2):
        difference = of_scheme[b] - of_scheme[a]
        difference = difference[~np.isnan(difference)]
        if len(difference):
            left, right, sign = (a, b, 1) if difference.mean() >= 0 else (b, a, -1)
            rows.append({"left": left, "right": right, **_test(sign * difference, margin)})
    pairs = pd.DataFrame(rows, columns=["left", "right", *_test(np.zeros(1), margin)])
    claimed = {frozenset((better, worse)) for better, _, worse in links}
    fixed = fixed_pairs(primary)
    names = [frozenset(pair) for pair in zip(pairs["left"], pairs["right"], strict=True)]
    is_fixed = np.array([pair in fixed for pair in names], dtype=bool)
    allowed = allowance(pairs[is_fixed] if is_fixed.any() else pairs, pilots)
    at_rates = pairs["p"].to_numpy(float)
    if allowed:
        error = pairs["sd"] / np.sqrt(pairs["seeds"])
        pairs["p"] = np.minimum(1, 2 * stdtr(pairs["seeds"] - 1, (allowed - pairs["difference"]) / error))
        beyond = stdtr(pairs["seeds"] - 1, (pairs["difference"] + allowed - margin) / error)
        pairs["p_equal"] = beyond if allowed < margin else 1.0
    pairs["allowed"] = allowed
    pairs.loc[pairs["seeds"] < fewest, ["p", "p_equal"]] = math.nan
    families = {
        "baseline": np.array([baseline in pair for pair in names], dtype=bool),
        "published": np.array([pair in claimed for pair in names], dtype=bool),
        "primary": is_fixed,
        "all": np.ones(len(pairs), dtype=bool),
    }
    for family, inside in families.items():
        inside = inside & pairs["p"].notna().to_numpy(bool)
        for p in ("p", "p_equal"):
            pairs[f"{p}_{family}"] = math.nan
            size = len(fixed) if family == "primary" else 0
            pairs.loc[inside, f"{p}_{family}"] = holm(pairs.loc[inside, p].to_numpy(float), size)
    tested = pairs["p_primary"].notna().to_numpy(bool)
    pairs.loc[tested, "p_primary_at_rates"] = holm(at_rates[tested], len(fixed))
    level = LEVEL / max(1, int(families["baseline"].sum()))
    pairs["detectable"] = [
        allowed + detectable(sd, n, level) for sd, n in zip(pairs["sd"], pairs["seeds"], strict=True)
    ]
    return pairs


def fixed_pairs(groups: Iterable[str]) -> set[frozenset[str]]:
    """Return all pairs of schemes within each group; a group is a string of names separated by spaces."""
    return {frozenset(pair) for group in groups for pair in combinations(group.split(), 2)}


def allowance(pairs: pd.DataFrame, pilots: int) -> float:
    """Return how many nats per token a wrong choice of learning rates may cost; 0 without pilots.

    It is ALLOWED times the median standard deviation of a difference over seeds, divided by the square root of the
    number of pilot seeds. Without it, equal schemes are called different in up to half of all tables of 8 seeds,
    because one pilot seed often picks the rate next to the best (`benchmarks.calibration`).
    """
    spread = pairs["sd"].dropna()
    return ALLOWED * float(spread.median()) / math.sqrt(pilots) if pilots and len(spread) else 0.0


def _test(difference: Floats, margin: float) -> dict[str, Any]:
    """Return the mean difference over seeds, its interval, and p-values of a t-test, sign test and equivalence test."""
    mean, low, high = interval(difference)
    row = {"seeds": len(difference), "difference": mean, "difference_low": low, "difference_high": high}
    row["p_sign"] = sign_test(difference)
    if len(difference) < FEWEST_SEEDS:
        return row | {"sd": math.nan, "p": math.nan, "p_equal": math.nan}
    freedom, sd = len(difference) - 1, float(difference.std(ddof=1))
    error = sd / math.sqrt(len(difference))
    with np.errstate(divide="ignore", invalid="ignore"):
        t, t_equal = np.float64(abs(mean)) / error, np.float64(margin - abs(mean)) / error
    if not error:  # the runs agree to the last bit
        return row | {"sd": sd, "p": float(mean == 0), "p_equal": float(abs(mean) >= margin)}
    return row | {"sd": sd, "p": float(2 * stdtr(freedom, -t)), "p_equal": float(stdtr(freedom, -t_equal))}


def best_rate(losses: Mapping[float, float]) -> float:
    """Return the best learning rate: the middle one of all rates whose loss is within MARGIN of the lowest.

    If many rates solve a task equally well, this avoids choosing one at the end of their range by chance. With two
    rates in the middle the lower is chosen; if every pilot died, the lowest rate.
    Arguments: losses, nats per token by learning rate, infinite if training died.
    """
    lowest = min(losses.values())
    near = sorted(lr for lr, loss in losses.items() if loss <= lowest + MARGIN)
    return near[(len(near) - 1) // 2] if math.isfinite(lowest) else near[0]


def sign_test(difference: Floats) -> float:
    """Return the two-sided p-value of the sign test on the differences that are not 0; 1 if all are 0."""
    more, count = max((difference > 0).sum(), (difference < 0).sum()), int((difference != 0).sum())
    return min(1.0, 2 * float(bdtrc(more - 1, count, 0.5))) if count else 1.0


def detectable(sd: float, seeds: int, level: float) -> float:
    """Return the true difference, in the unit of `sd`, that a paired t-test at `level` finds with probability POWER."""
    if seeds < 2 or math.isnan(sd):
        return math.nan
    return _shift(seeds, level) * sd / math.sqrt(seeds)


@cache
def _shift(seeds: int, level: float) -> float:
    """Return the noncentrality of Student's t at which a two-sided test finds the true sign with probability POWER."""
    return float(nctdtrinc(seeds - 1, 1 - POWER, stdtrit(seeds - 1, 1 - level / 2)))


def letters(order: list[str], significant: Collection[frozenset[str]]) -> dict[str, str]:
    """Return letters for each scheme, such as `ab`: two share one exactly if their pair is not `significant`.

    The compact letter display of Piepho (2004) by insertion and absorption. Letters begin at the best scheme, order[0].
    """
    groups = [frozenset(order)]
    for pair in significant:
        split = {group - {scheme} for group in groups if pair <= group for scheme in pair}
        groups = [group for group in groups if not pair <= group]
        groups += [group for group in split if not any(group <= larger for larger in groups)]
        groups = [group for group in groups if not any(group < larger for larger in groups)]
    place = {name: n for n, name in enumerate(order)}
    groups.sort(key=lambda group: sorted(place[name] for name in group))
    names = [chr(ord("a") + n) if n < 26 else f"({n + 1})" for n in range(len(groups))]
    return {
        name: "".join(letter for letter, group in zip(names, groups, strict=True) if name in group) for name in order
    }


def significant_pairs(pairs: pd.DataFrame, family: str = "all") -> dict[frozenset[str], str]:
    """Return the better scheme of each pair that differs significantly, keyed by the pair.

    The t-test decides, unless too few seeds agree in sign: if seeds split in two, their mean would hide it.
    Arguments: pairs, from `compare`; family, the tests that p is corrected for: baseline, published, primary or all.
    """
    significant = pairs[(pairs[f"p_{family}"] <= LEVEL) & (pairs["p_sign"] <= SIGNS)]
    return {
        frozenset((left, right)): left for left, right in zip(significant["left"], significant["right"], strict=True)
    }


def equivalent_pairs(pairs: pd.DataFrame, family: str = "all") -> set[frozenset[str]]:
    """Return the pairs of schemes whose losses were shown to differ by less than the report's margin.

    Arguments: pairs, a row per pair with the column `p_equal_FAMILY`; family, the pairs that were corrected together.
    """
    equal = pairs[pairs[f"p_equal_{family}"] <= LEVEL]
    return {frozenset(pair) for pair in zip(equal["left"], equal["right"], strict=True)}


def verdict(pairs: pd.DataFrame, scheme: str, reference: str, family: str) -> str:
    """Return how `scheme` compares with `reference`: better, worse, equal, open (undecided), or "" if not tested."""
    left, right = pairs["left"].to_numpy(), pairs["right"].to_numpy()
    of_pair = pairs[((left == scheme) & (right == reference)) | ((left == reference) & (right == scheme))]
    if of_pair.empty or math.isnan(of_pair[f"p_{family}"].iloc[0]):
        return ""
    if better := significant_pairs(of_pair, family).get(frozenset((scheme, reference))):
        return "better" if better == scheme else "worse"
    return "equal" if of_pair[f"p_equal_{family}"].iloc[0] <= LEVEL else "open"


def conclusions(order: list[str], pairs: pd.DataFrame) -> Mapping[str, Any]:
    """Return which schemes lead, which all leaders beat (and by at least how much) and which are in between.

    Tests are corrected for all pairs. Leaders are the best scheme and those not significantly worse than it.
    Arguments: order, the schemes from best to worst; pairs, from `compare`.
    """
    better, equal = significant_pairs(pairs), equivalent_pairs(pairs)
    leaders = [name for name in order if frozenset((order[0], name)) not in better]

    def is_beaten(scheme: str) -> bool:
        return all(better.get(frozenset((scheme, leader))) == leader for leader in leaders)

    beaten = [name for name in order if name not in leaders and is_beaten(name)]
    of_beaten = pairs[pairs["left"].isin(leaders) & pairs["right"].isin(beaten)]
    return {
        "leaders": leaders,
        "beaten": beaten,
        "by": float(of_beaten["difference"].min()) if beaten else math.nan,
        "tied": not any(frozenset(pair) in better for pair in combinations(leaders, 2)),
        "between": [name for name in order if name not in leaders and name not in beaten],
        "decided": len(better),
        "pairs": len(pairs),
        "equal": [pair for pair in zip(pairs["left"], pairs["right"], strict=True) if frozenset(pair) in equal],
    }


# ---------------------------------------------------------------- over documents


def effective(targets: Floats) -> float:
    """Return how many equally long documents would carry the same information: (sum n)^2 / sum n^2 (Kish 1965)."""
    targets = np.asarray(targets, dtype=np.float64)
    squares = float((targets**2).sum())
    return float(targets.sum()) ** 2 / squares if squares else 0.0


def document_error(nll: Floats, targets: Floats) -> Floats:
    """Return half the 95 % interval over documents of token-weighted means, for documents drawn independently.

    A mean is m = sum y / sum n, with y the summed nll of a document and n its targets: a ratio, in which document i
    weighs w_i = n_i / sum n. Its variance is estimated from the residuals e_i = y_i / n_i - m. Each squared residual is
    divided by its expected value if all documents were equally variable (CR2 of Bell and McCaffrey 2002):

        V = sum of w_i^2 e_i^2 / (1 - 2 w_i + sum of w^2)

    Half the interval is q sqrt(V). With equal weights q is Student's t. With unequal weights neither count of degrees
    of freedom works (Kish's, 1 / sum w^2 - 1, covers too little, Satterthwaite's too much). So q is the value that
    |m| / sqrt(V) stays below in 95 % of random draws of normal documents with the same weights.
    `python -m benchmarks.calibration` measures how often such an interval contains the true value.

    Arguments: nll [means, documents], the summed nll (or difference of nll) of each document in nats; targets
    [documents], its scored tokens.
    Returns: [means] in nats/token; NaN if there are fewer than FEWEST_DOCUMENTS effective documents, or a loss is not
    finite.
    """
    scored = np.asarray(targets) > 0
    nll, targets = np.asarray(nll, dtype=np.float64)[:, scored], np.asarray(targets, dtype=np.float64)[scored]
    if effective(targets) < FEWEST_DOCUMENTS:
        return np.full(len(nll), math.nan)
    weights = targets / targets.sum()
    return quantile(weights) * np.sqrt(document_variance(nll, targets))


def document_variance(nll: Floats, targets: Floats) -> Floats:
    """Return V of `document_error` for each mean, (nats/token)^2, shape nll.shape[:-1]; NaN if a loss is not finite."""
    weights = targets / targets.sum()
    with np.errstate(invalid="ignore"):
        apart = nll / targets.sum() - weights * nll.sum(axis=-1, keepdims=True) / targets.sum()  # w e
        variance = (apart**2 / (1 - 2 * weights + (weights**2).sum())).sum(axis=-1)
    return np.where(np.isfinite(variance), variance, math.nan)


def quantile(weights: Floats) -> float:
    """Return the quantile q that `document_error` multiplies a standard error by, for documents of these weights.

    Arguments: weights, of the documents, with sum 1.
    """
    alike = effective(weights)
    if alike >= ENOUGH_DOCUMENTS or np.ptp(weights) <= 1e-9 * float(weights.max()):
        return student(alike - 1)
    return _drawn_quantile(tuple(np.sort(weights).round(12).tolist()))


@cache
def _drawn_quantile(weights: tuple[float, ...]) -> float:
    """Return quantile q of `document_error`, estimated from DRAWS seeded draws of documents of equal variance."""
    w = np.array(weights)
    random, batch = np.random.default_rng(0), max(1, 2_000_000 // len(w))
    shares = w**2 / (1 - 2 * w + (w**2).sum())
    ratios = []
    for size in np.diff([*range(0, DRAWS, batch), DRAWS]):
        values = random.normal(size=(size, len(w)))
        mean = values @ w
        ratios.append(np.abs(mean) / np.sqrt(np.square(values - mean[:, None]) @ shares))
    return float(np.quantile(np.concatenate(ratios), CONFIDENCE, method="higher"))


@cache
def student(freedom: float) -> float:
    """Return the two-sided CONFIDENCE quantile of Student's t with this many degrees of freedom."""
    return float(stdtrit(freedom, (1 + CONFIDENCE) / 2))
