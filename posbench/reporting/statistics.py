"""How sure a difference is: paired over seeds, corrected for many comparisons, and what could not have been seen.

One seed gives every scheme the same initial weights and the same batches, so a difference is taken within each seed and
what the seeds have in common drops out. Two kinds of doubt, never added up:

over seeds      would other seeds, on this text, say the same? Student's t on the differences.
over documents  would other documents, with these models, say the same? (`document_error`)

Holm's correction holds the chance of any false claim in a family of pairs to 5 %. The families: the pairs with the
baseline, the links of a published chain, those that an experiment fixed before it was trained, and all pairs.
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

CONFIDENCE = 0.95  # of intervals
LEVEL = 0.05  # chance of any false claim in a family
POWER = 0.80  # of the smallest detectable difference
FEWEST_SEEDS = 3  # to rank schemes
ALLOWED = 2.0  # of the spread of a difference, for a choice of rates by one pilot seed
ENOUGH_SEEDS = 5  # to rank schemes where seeds of one split in two
SIGNS = 0.5  # p of the sign test above which so few seeds agree in sign that the t-test is not believed
FEWEST_DOCUMENTS = 4.0  # effective ones: with fewer, one or two decide
ENOUGH_DOCUMENTS = 200.0  # effective ones from which on unequal weights no longer matter: Student's t
DRAWS = 10_000  # that tell a quantile: to 0.2 percentage points of coverage
Link = tuple[str, str, str]  # of a published chain: better, sign, worse


def interval(values: Any) -> tuple[float, float, float]:
    """The mean of independent values and its 95 % interval by Student's t; NaN ends for fewer than FEWEST_SEEDS."""
    values = np.asarray(values, dtype=np.float64)
    count = len(values)
    mean = float(values.sum()) / count if count else math.nan
    if count < FEWEST_SEEDS:
        return mean, math.nan, math.nan
    half = student(count - 1) * math.sqrt(float(((values - mean) ** 2).sum()) / (count - 1) / count)
    return mean, mean - half, mean + half


def holm(p: Floats, size: int = 0) -> Floats:
    """Adjusted p-values of Holm (1979): sorted upwards, the i-th of m times (m - i + 1), made monotone, at most 1.

    Arguments: size, m where the family has more members than were tested.
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
    """Every pair of schemes over the seeds that both have; `left` has the lower mean loss on them.

    Arguments: losses, a row a seed and a column a scheme, nats a token, NaN where there is no run; links of the
    published chain; margin of equivalence; pilots, seeds by which each scheme's learning rate was chosen (0: it was
    not): then a difference is tested against their `allowance`; primary, groups of schemes whose pairs were fixed
    before training: their tests do not depend on other rows; fewest, seeds of a pair that is tested. Columns: see
    `posbench.reporting.table.COLUMNS`.
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
    """All pairs within groups of schemes, names with spaces between them."""
    return {frozenset(pair) for group in groups for pair in combinations(group.split(), 2)}


def allowance(pairs: pd.DataFrame, pilots: int) -> float:
    """What a wrong choice of learning rates may cost, nats a token: ALLOWED times the median spread of a difference.

    Over seeds, divided by the root of the number of pilot seeds. Without it equal schemes are called different in up to
    half of tables of 8 seeds, because one pilot seed often takes the rate beside the best (`benchmarks.calibration`).
    """
    spread = pairs["sd"].dropna()
    return ALLOWED * float(spread.median()) / math.sqrt(pilots) if pilots and len(spread) else 0.0


def _test(difference: Floats, margin: float) -> dict[str, Any]:
    """The paired t-test of differences over seeds, and two one-sided tests of `margin`."""
    mean, low, high = interval(difference)
    row = {"seeds": len(difference), "difference": mean, "difference_low": low, "difference_high": high}
    row["p_sign"] = sign_test(difference)
    if len(difference) < FEWEST_SEEDS:
        return row | {"sd": math.nan, "p": math.nan, "p_equal": math.nan}
    freedom, sd = len(difference) - 1, float(difference.std(ddof=1))
    error = sd / math.sqrt(len(difference))
    with np.errstate(divide="ignore", invalid="ignore"):
        t, t_equal = np.float64(abs(mean)) / error, np.float64(margin - abs(mean)) / error
    if not error:  # runs that are the same to the last bit
        return row | {"sd": sd, "p": float(mean == 0), "p_equal": float(abs(mean) >= margin)}
    return row | {"sd": sd, "p": float(2 * stdtr(freedom, -t)), "p_equal": float(stdtr(freedom, -t_equal))}


def best_rate(losses: Mapping[float, float]) -> float:
    """The learning rate that pilots choose: the middle one of those whose loss is within MARGIN of the lowest.

    So a rate at the end of a range in which all solve a task is not taken for its digits. Of two in the middle the
    lower; the lowest of all where every pilot died. Arguments: losses, nats by rate, infinite where a pilot died.
    """
    lowest = min(losses.values())
    near = sorted(lr for lr, loss in losses.items() if loss <= lowest + MARGIN)
    return near[(len(near) - 1) // 2] if math.isfinite(lowest) else near[0]


def sign_test(difference: Floats) -> float:
    """The two-sided p of as many positive (or negative) values among those that are not 0; 1 without such values."""
    more, count = max((difference > 0).sum(), (difference < 0).sum()), int((difference != 0).sum())
    return min(1.0, 2 * float(bdtrc(more - 1, count, 0.5))) if count else 1.0


def detectable(sd: float, seeds: int, level: float) -> float:
    """The true difference that a paired t-test at `level` finds with probability POWER, in the unit of `sd`."""
    if seeds < 2 or math.isnan(sd):
        return math.nan
    return _shift(seeds, level) * sd / math.sqrt(seeds)


@cache
def _shift(seeds: int, level: float) -> float:
    """The noncentrality of t at which a two-sided test finds a difference in its true direction with POWER."""
    return float(nctdtrinc(seeds - 1, 1 - POWER, stdtrit(seeds - 1, 1 - level / 2)))


def letters(order: list[str], decided: Collection[frozenset[str]]) -> dict[str, str]:
    """Letters for each scheme, such as `a`, `ab`: two schemes share one if and only if their pair is not decided.

    The compact letter display of Piepho (2004) by insertion and absorption; letters begin at the best scheme.
    """
    groups = [frozenset(order)]
    for pair in decided:
        split = {group - {one} for group in groups if pair <= group for one in pair}
        groups = [group for group in groups if not pair <= group]
        groups += [group for group in split if not any(group <= other for other in groups)]
        groups = [group for group in groups if not any(group < other for other in groups)]
    place = {name: n for n, name in enumerate(order)}
    groups.sort(key=lambda group: sorted(place[name] for name in group))
    names = [chr(ord("a") + n) if n < 26 else f"({n + 1})" for n in range(len(groups))]
    return {name: "".join(letter for letter, of in zip(names, groups, strict=True) if name in of) for name in order}


def decided(pairs: pd.DataFrame, family: str = "all") -> dict[frozenset[str], str]:
    """Pair -> the better scheme, of the pairs that differ significantly in their family.

    By the t-test, unless too few seeds agree in sign: where seeds split in two, a mean hides it.
    """
    found = pairs[(pairs[f"p_{family}"] <= LEVEL) & (pairs["p_sign"] <= SIGNS)]
    return {frozenset((left, right)): left for left, right in zip(found["left"], found["right"], strict=True)}


def equivalent(pairs: pd.DataFrame, family: str = "all") -> set[frozenset[str]]:
    """The pairs found to differ by less than the margin."""
    found = pairs[pairs[f"p_equal_{family}"] <= LEVEL]
    return {frozenset(pair) for pair in zip(found["left"], found["right"], strict=True)}


def verdict(pairs: pd.DataFrame, one: str, other: str, family: str) -> str:
    """`better`, `worse`, `equal` or `open`, of `one` against `other`; empty where the pair was not tested."""
    left, right = pairs["left"].to_numpy(), pairs["right"].to_numpy()
    of_pair = pairs[((left == one) & (right == other)) | ((left == other) & (right == one))]
    if of_pair.empty or math.isnan(of_pair[f"p_{family}"].iloc[0]):
        return ""
    if better := decided(of_pair, family).get(frozenset((one, other))):
        return "better" if better == one else "worse"
    return "equal" if of_pair[f"p_equal_{family}"].iloc[0] <= LEVEL else "open"


def conclusions(order: list[str], pairs: pd.DataFrame) -> Mapping[str, Any]:
    """Who leads, whom all leaders beat and by how much at least, and who stands between; by the tests of all pairs."""
    better, equal = decided(pairs), equivalent(pairs)
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
    """The number of equally long documents that would weigh the same: (sum n)^2 / sum n^2 (Kish 1965)."""
    targets = np.asarray(targets, dtype=np.float64)
    squares = float((targets**2).sum())
    return float(targets.sum()) ** 2 / squares if squares else 0.0


def document_error(nll: Floats, targets: Floats) -> Floats:
    """Half the interval around token-weighted means that the choice of documents leaves, drawn independently.

    A mean is m = sum y / sum n, with y the summed nll of a document and n its targets: a ratio, in which document i
    weighs w_i = n_i / sum n. Its variance is estimated from the residuals e_i = y_i / n_i - m, each divided by what it
    would be on average were all documents equally variable (the correction CR2 of Bell and McCaffrey 2002):

        V = sum of w_i^2 e_i^2 / (1 - 2 w_i + sum of w^2)

    Half the interval is q sqrt(V). With equal weights this is Student's t. With unequal ones neither count of degrees
    of freedom holds (Kish's, 1 / sum w^2 - 1, covers too little, Satterthwaite's too much), so q is what |m| / sqrt(V)
    stays below in 95 % of draws of normal documents with these very weights. `python -m benchmarks.calibration`
    measures how often such an interval holds the truth.

    Arguments: nll [means, documents], the summed nll (or difference of nll) of each document in nats; targets
    [documents], its scored tokens.
    Returns: [means] in nats/token; NaN where documents weigh like fewer than FEWEST_DOCUMENTS, or where a loss is not a
    number.
    """
    scored = np.asarray(targets) > 0
    nll, targets = np.asarray(nll, dtype=np.float64)[:, scored], np.asarray(targets, dtype=np.float64)[scored]
    if effective(targets) < FEWEST_DOCUMENTS:
        return np.full(len(nll), math.nan)
    weights = targets / targets.sum()
    return quantile(weights) * np.sqrt(document_variance(nll, targets))


def document_variance(nll: Floats, targets: Floats) -> Floats:
    """V of each mean, (nats/token)^2. Shape nll.shape[:-1]; NaN where a loss is not finite."""
    weights = targets / targets.sum()
    with np.errstate(invalid="ignore"):
        apart = nll / targets.sum() - weights * nll.sum(axis=-1, keepdims=True) / targets.sum()  # w e
        variance = (apart**2 / (1 - 2 * weights + (weights**2).sum())).sum(axis=-1)
    return np.where(np.isfinite(variance), variance, math.nan)


def quantile(weights: Floats) -> float:
    """q, by how many sqrt(V) the mean of documents with these weights (they sum to 1) may be off."""
    alike = effective(weights)
    if alike >= ENOUGH_DOCUMENTS or np.ptp(weights) <= 1e-9 * float(weights.max()):
        return student(alike - 1)
    return _drawn_quantile(tuple(np.sort(weights).round(12).tolist()))


@cache
def _drawn_quantile(weights: tuple[float, ...]) -> float:
    """By DRAWS seeded draws of normal documents that are all equally variable."""
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
    """The two-sided quantile of Student's t."""
    return float(stdtrit(freedom, (1 + CONFIDENCE) / 2))
