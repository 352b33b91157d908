"""Compare our runs with published results (`posbench report --against`): the order of schemes, and each claim."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from posbench.analysis.comparison import Comparison
from posbench.analysis.published import Published, PublishedMeasurement
from posbench.analysis.statistics import Link, equivalent_pairs, verdict
from posbench.evaluation.protocols import NONOVERLAPPING, PROTOCOLS, VALIDATION

NEAR = 1.25  # lengths, in training lengths, are compared if they differ by at most this factor


@dataclass(frozen=True)
class Agreement:
    """A column of a published table next to our results, and how well the two orders of schemes agree."""

    theirs: PublishedMeasurement
    ours: str  # protocol and length of our figures
    baseline: str | None  # scheme that both gaps are measured against
    table: pd.DataFrame  # scheme, published, published_gap, gap, gap_low, gap_high; their best scheme first
    tau: float  # Kendall's tau; NaN for fewer than two schemes
    p: float  # p-value if the two orders were unrelated


def agreements(published: Published, comparison: Comparison) -> list[Agreement]:
    """Return, for each published column that our runs can be compared with, its order of schemes next to ours.

    A column is compared with our results of the same protocol at the nearest length, in multiples of the training
    length.
    Arguments: published, the publication; comparison, of our runs.
    """
    from scipy.stats import kendalltau  # this import takes half a second

    pairs = []
    for theirs in published.measurements:
        ours = _counterpart(theirs, comparison)
        both = sorted(set(theirs.values) & set(ours.index), key=lambda scheme: theirs.losses[scheme])
        if not both:
            continue
        table = ours.loc[both, ["seeds", "value", "gap", "gap_low", "gap_high"]]
        base = next((b for b in (comparison.baseline, published.baseline) if b in both), None)
        if base != comparison.baseline:  # our intervals hold only for gaps to our own baseline
            table[["gap", "gap_low", "gap_high"]] = math.nan
            table["gap"] = table["value"] - table["value"].get(base, math.nan)
        losses = np.array([theirs.losses[scheme] for scheme in both])
        their_gap = losses - theirs.losses[base] if base and theirs.metric in ("loss", "perplexity") else math.nan
        table.insert(0, "published", [theirs.values[scheme] for scheme in both])
        table.insert(1, "published_gap", their_gap)
        tau, p = kendalltau(losses, table["value"]) if len(both) > 1 else (math.nan, math.nan)
        place = f"{ours['protocol'].iloc[0]} at {ours['length'].iloc[0]} tokens"
        pairs.append(Agreement(theirs, place, base, table.drop(columns="value"), float(tau), float(p)))
    return pairs


def _counterpart(theirs: PublishedMeasurement, comparison: Comparison) -> pd.DataFrame:
    """Return our losses to compare with a published column, a row per scheme.

    They have a matching protocol and the nearest length, in multiples of the training length. There are no rows if no
    length is within a factor of NEAR.
    Arguments: theirs, the published column; comparison, of our runs.
    """
    cells = comparison.at(metric="loss", last=0)
    if theirs.ratio == 1 and theirs.protocol in (None, NONOVERLAPPING.name):
        protocols = [VALIDATION.name]
    elif theirs.protocol:
        protocols = [theirs.protocol]
    else:
        protocols = [NONOVERLAPPING.name, *(name for name, protocol in PROTOCOLS.items() if protocol.is_by_length)]
    length_wanted = theirs.ratio * comparison.training_length
    for protocol in protocols:
        lengths = set(cells.loc[cells["protocol"] == protocol, "length"])
        near = min(sorted(lengths), key=lambda n: abs(math.log(n / length_wanted)), default=None)
        if near and 1 / NEAR <= near / length_wanted <= NEAR:
            return comparison.at(protocol, near, metric="loss", last=0).set_index("scheme")
    return cells.set_index("scheme").iloc[:0]


def link_verdict(comparison: Comparison, link: Link) -> str:
    """Return what our runs say about a published claim: `holds`, `fails` or `open`; "" if its pair was not tested.

    A claim (`link`) is (better, sign, worse), two schemes and the published sign between them. With ">" or "," it holds
    if `better` is significantly better, and fails if `worse` is, or if the two are equal within the margin. With "~" or
    "/" it holds if the two are equal, and fails if one is significantly better.
    """
    better, sign, worse = link
    ours = verdict(comparison.pairs, better, worse, "published")
    if ours in ("", "open"):
        return ours
    if sign in "~/":
        return "holds" if frozenset((better, worse)) in equivalent_pairs(comparison.pairs, "published") else "fails"
    return "holds" if ours == "better" else "fails"
