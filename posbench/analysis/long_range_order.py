"""Compare schemes by order beyond 32: what the order of tokens more than 32 back is worth to them.

It is the mean of lost_order over the targets with d = 33 to 64, from results of the protocol `order`. Its tests, and
those on copyable targets, are families of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

import pandas as pd

from posbench.analysis.cells import as_trained, cells_of, differences_of, means
from posbench.analysis.statistics import FEWEST_SEEDS, LEVEL, beats, compare, holm, pairs_of
from posbench.analysis.table import where
from posbench.config.units import plus_minus
from posbench.evaluation.protocols.order import COPYABLE_ORDER, FAR_FIRST, FAR_LAST, LOST_IDENTITY, LOST_ORDER

_PAIRS = {  # columns of `statistics.compare` and their names here
    "left": "more",
    "right": "less",
    "seeds": "seeds",
    "difference": "order_difference",
    "difference_low": "order_difference_low",
    "difference_high": "order_difference_high",
    "difference_documents": "order_difference_documents",
    "p": "order_p",
    "p_claimed": "order_p_claimed",
}


@dataclass(frozen=True)
class Worth:
    """The worth of order beyond 32 tokens to each scheme on some targets, with its tests."""

    by_seed: pd.DataFrame  # nats per token, a row per seed and a column per scheme
    second: pd.DataFrame | None  # the same at each scheme's second kept rate; None without a finished search
    figures: pd.DataFrame  # a row per scheme: mean and intervals (as of table.csv), p of the test against 0, is_used
    # A row per pair, see `statistics.compare`, with half the interval over documents (difference_documents); `left` is
    # the scheme to which order is worth more.
    tests: pd.DataFrame
    undecided: set[frozenset[str]]  # pairs that stay open, most because documents vary too much

    @property
    def pairs(self) -> pd.DataFrame:
        """Return the tests, as they are stored beside a report."""
        return self.tests[list(_PAIRS)].rename(columns=_PAIRS)

    @property
    def users(self) -> list[str]:
        """Return the schemes that use order beyond 32 tokens, by the tests."""
        return self.figures.loc[self.figures["is_used"], "scheme"].to_list()

    @property
    def users_with_worth(self) -> list[str]:
        """Return the users, each with what order is worth to it, as text."""
        figures = self.figures.set_index("scheme")
        texts = []
        for scheme in self.users:
            value, low, high = figures.loc[scheme, ["value", "value_low", "value_high"]].to_numpy(float)
            texts.append(f"{scheme} ({plus_minus(value, (high - low) / 2)} nats)")
        return texts

    @property
    def is_tested(self) -> bool:
        return bool(self.figures["p"].notna().any())

    def decided(self, scheme: str) -> tuple[int, int]:
        """Return to how many schemes this order is worth less than to `scheme`, of how many tested pairs with it."""
        tested = self.pairs.dropna(subset="order_p_claimed")  # NaN: not tested
        is_more = tested["more"] == scheme
        is_decided = tested["order_p_claimed"] <= LEVEL
        return int((is_more & is_decided).sum()), int((is_more | (tested["less"] == scheme)).sum())


@dataclass(frozen=True)
class LongRangeOrder:
    """The worth of order beyond 32 tokens to each scheme at one length, with two families of tests."""

    length: int  # of the windows, in tokens
    on_all: Worth  # over all targets
    on_copyable: Worth | None  # over copyable targets; None if no result has them
    identity: pd.DataFrame  # figures of all targets if the tokens are another document's, without tests


def long_range_order(
    rows: pd.DataFrame,
    runs: pd.DataFrame,
    cells: pd.DataFrame,
    at_second: pd.DataFrame | None = None,
    primary: Iterable[str] = (),
    fewest: int = FEWEST_SEEDS,
    failed: Iterable[str] = (),
) -> LongRangeOrder | None:
    """Return what order beyond 32 tokens is worth to each scheme, or None without such results.

    Arguments: cells, the report's figures; at_second, the runs at each scheme's second kept rate, or None; primary and
    fewest, as of `compare`; failed, schemes whose pairs stay open.
    """
    far = where(cells, protocol="order", first=FAR_FIRST, last=FAR_LAST, under="", text="")
    lengths = far.loc[far["metric"] == LOST_ORDER, "length"].unique()
    if not len(lengths):
        return None
    training_length = int(runs["train.context_length"].iloc[0])
    # At the scored length nearest to the training length.
    length = min(lengths, key=lambda n: abs(n - training_length))
    at_length = far[far["length"] == length]

    def worth(metric: str) -> Worth | None:
        figures = at_length[at_length["metric"] == metric]
        if figures.empty:
            return None
        of_metric = _far_rows(rows, runs, length, metric)
        by_seed = _by_seed(of_metric)
        second: pd.DataFrame | None = None
        if at_second is not None:
            at_rates = _by_seed(_far_rows(rows, at_second, length, metric))
            second = at_rates.reindex(index=by_seed.index, columns=by_seed.columns)
        errors = _document_errors(of_metric)
        undecided = pairs_of(failed, by_seed) | {pair for pair, (gap, error) in errors.items() if not abs(gap) > error}
        tests = compare(by_seed, second, primary=primary, fewest=fewest, undecided=undecided, lower_is_better=False)
        pairs = map(frozenset, zip(tests["left"], tests["right"], strict=True))
        tests["difference_documents"] = [errors[pair][1] for pair in pairs]
        return Worth(by_seed, second, _used(figures, by_seed, fewest), tests, undecided)

    on_all = worth(LOST_ORDER)
    assert on_all is not None
    identity = at_length[at_length["metric"] == LOST_IDENTITY]
    return LongRangeOrder(int(length), on_all, worth(COPYABLE_ORDER), identity)


def _far_rows(rows: pd.DataFrame, runs: pd.DataFrame, length: float, metric: str) -> pd.DataFrame:
    return as_trained(rows, runs, protocol="order", length=length, first=FAR_FIRST, last=FAR_LAST, metric=metric)


def _document_errors(rows: pd.DataFrame) -> dict[frozenset[str], tuple[float, float]]:
    # Return {pair: (gap, half its 95 % interval over documents)}. All seeds are scored on the same windows, so a test
    # over seeds alone could show a peculiarity of these windows.
    cells = dict(cells_of(rows))
    names = [(a, b) for a, b in combinations(cells, 2) if {*cells[a].seeds} & {*cells[b].seeds}]
    gaps = differences_of("gap", [(cells[a], cells[b]) for a, b in names])
    return {frozenset(pair): (row["gap"], row["gap_documents"]) for pair, row in zip(names, gaps, strict=True)}


def _by_seed(of_metric: pd.DataFrame) -> pd.DataFrame:
    by_seed = means(of_metric, ["seed", "scheme"]).unstack()
    # Categories, which the tidy table uses for schemes, become plain names.
    by_seed.columns = list(map(str, by_seed.columns))
    return by_seed


def _used(figures: pd.DataFrame, by_seed: pd.DataFrame, fewest: int) -> pd.DataFrame:
    """Return the figures with p of the test against 0 (NaN for too few seeds), after Holm's correction, and is_used."""
    p = []
    for scheme in figures["scheme"]:
        worth = by_seed[scheme].dropna().to_numpy(float)
        if len(worth) >= fewest:
            p.append(float(beats(0 * worth, [worth])))  # paired with zeros: a t-test of the mean against 0
        else:
            p.append(math.nan)
    corrected = holm(p)
    # The interval over documents must be above 0 too: all seeds are scored on the same windows, so the test alone could
    # show a peculiarity of these windows.
    is_above = figures["value"] - figures["value_documents"] > 0
    return figures.assign(p=corrected, is_used=(corrected <= LEVEL) & is_above.to_numpy())
