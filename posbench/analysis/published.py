"""Load what others have published about the same schemes, from `published.yaml`, and compare it with our runs.

Their set-ups differ from ours, so orders and gaps are compared, never losses.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from posbench.analysis.comparison import Comparison
from posbench.config import ConfigError, nearest
from posbench.evaluation.protocols import NONOVERLAPPING, PROTOCOLS, VALIDATION

_FILE = Path(__file__).with_suffix(".yaml")
NEAR = 1.25  # lengths, in training lengths, are compared if they differ by at most this factor
# Convert each metric to a number that is lower for better schemes; losses are in nats per token.
_METRICS: dict[str, Callable[[float], float]] = {
    "loss": float,
    "perplexity": math.log,
    "mean reciprocal rank": operator.neg,
}


@dataclass(frozen=True)
class PublishedMeasurement:
    """A column of a published table: one metric for several schemes."""

    metric: str  # loss (nats per token) | perplexity | mean reciprocal rank
    protocol: str | None  # None: not known
    training_length: int | None  # tokens
    length: int | None  # tokens; None: the training length
    values: dict[str, float]
    model: str | None = None  # name of the model, if the publication has several

    @property
    def losses(self) -> dict[str, float]:
        """Return losses in nats per token by scheme; for other metrics, a number that is lower for better schemes."""
        return {scheme: _METRICS[self.metric](value) for scheme, value in self.values.items()}

    @property
    def ratio(self) -> float:
        """Return the evaluated length divided by the training length; 1 if either is unknown."""
        if not self.length or not self.training_length:
            return 1.0
        return self.length / self.training_length

    @property
    def description(self) -> str:
        """Return metric, protocol and length as text: `perplexity, nonoverlapping, 1012 tokens (trained at 512)`."""
        parts = [self.metric, self.protocol or "protocol not recorded"]
        if self.model:
            parts.insert(0, self.model)
        if self.length:
            parts.append(f"{self.length} tokens (trained at {self.training_length})")
        else:
            parts.append("training length")
        return ", ".join(parts)


@dataclass(frozen=True)
class Published:
    """The results of one publication, with its description of models and training."""

    name: str
    title: str
    source: str
    baseline: str
    setup: dict[str, str]  # such as parameters: 125M
    measurements: list[PublishedMeasurement]
    notes: list[str]


@cache
def all_published() -> dict[str, Published]:
    """Return all publications, keyed by the names that `--against` accepts."""
    contents: dict[str, Any] = yaml.safe_load(_FILE.read_text(encoding="utf-8"))
    published = {}
    for name, content in contents.items():
        content["measurements"] = [PublishedMeasurement(**measurement) for measurement in content["measurements"]]
        published[name] = Published(name, **content)
    return published


def load_published(name: str) -> Published:
    """Return the published results of this name. Raises: ConfigError for an unknown name."""
    known = all_published()
    if name not in known:
        raise ConfigError(f"--against {name!r} is not known{nearest(name, known)} (known: {', '.join(known)})")
    return known[name]


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
    """Return our results next to each published column that our runs can be compared with."""
    from scipy.stats import kendalltau  # this import takes half a second

    pairs = []
    for theirs in published.measurements:
        ours = _counterpart(theirs, comparison)
        both = sorted(set(theirs.values) & set(ours.index), key=lambda scheme: theirs.losses[scheme])
        if not both:
            continue
        table = ours.loc[both, ["seeds", "value", "gap", "gap_low", "gap_high"]]
        # Gaps are to our baseline or, if the publication lacks it, to theirs; None: neither is in both.
        reference = next((b for b in (comparison.baseline, published.baseline) if b in both), None)
        # Our intervals hold only for gaps to our own baseline.
        if reference != comparison.baseline:
            table[["gap", "gap_low", "gap_high"]] = math.nan
            table["gap"] = table["value"] - table["value"].get(reference, math.nan)
        losses = np.array([theirs.losses[scheme] for scheme in both])
        their_gap: Any = math.nan
        # Other metrics have no unit in common with our losses: only orders are compared.
        if reference and theirs.metric in ("loss", "perplexity"):
            their_gap = losses - theirs.losses[reference]
        table.insert(0, "published", [theirs.values[scheme] for scheme in both])
        table.insert(1, "published_gap", their_gap)
        tau, p = math.nan, math.nan
        if len(both) > 1:
            tau, p = kendalltau(losses, table["value"])
        our_place = f"{ours['protocol'].iloc[0]} at {ours['length'].iloc[0]} tokens"
        pairs.append(Agreement(theirs, our_place, reference, table.drop(columns="value"), float(tau), float(p)))
    return pairs


def _counterpart(theirs: PublishedMeasurement, comparison: Comparison) -> pd.DataFrame:
    """Return our losses, indexed by scheme, by the protocol and at the length that match theirs; else no rows."""
    cells = comparison.at(metric="loss", last=0)  # figures of whole windows, not of ranges of positions
    # At the training length, non-overlapping windows are what our validation reads.
    if theirs.ratio == 1 and theirs.protocol in (None, NONOVERLAPPING.name):
        protocols = [VALIDATION.name]
    elif theirs.protocol:
        protocols = [theirs.protocol]
    else:
        by_length = [name for name, protocol in PROTOCOLS.items() if protocol.is_by_length]
        protocols = [NONOVERLAPPING.name, *by_length]
    # The nearest length, in multiples of the training length.
    length_wanted = theirs.ratio * comparison.training_length
    for protocol in protocols:
        lengths = set(cells.loc[cells["protocol"] == protocol, "length"])
        nearest_length = min(sorted(lengths), key=lambda n: abs(math.log(n / length_wanted)), default=None)
        if nearest_length and 1 / NEAR <= nearest_length / length_wanted <= NEAR:
            return comparison.at(protocol, nearest_length, metric="loss", last=0).set_index("scheme")
    # No rows, because no length is near the published one.
    return cells.set_index("scheme").iloc[:0]
