"""Published results beside ours: the same schemes, other set-ups, so orders and gaps are compared and never levels.

They stand in `published.yaml`. A value they do not state is "not published" where that is known.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml
from rich import box
from rich.console import Console
from rich.table import Table

from posbench.config import ConfigError, nearest
from posbench.evaluation.protocols import NONOVERLAPPING, PROTOCOLS, VALIDATION
from posbench.reporting.statistics import Link, equivalent, kendall, verdict

if TYPE_CHECKING:
    import pandas as pd

    from posbench.reporting.comparison import Comparison

_FILE = Path(__file__).with_suffix(".yaml")
NEAR = 1.25  # our length stands for theirs where both, in training lengths, differ by no more than this factor
NOT_PUBLISHED = "not published"
# Each metric as a number that is lower where a scheme is better; losses in nats a token.
_METRICS: dict[str, Callable[[float], float]] = {
    "loss": float,
    "perplexity": math.log,
    "mean reciprocal rank": operator.neg,
}


@dataclass(frozen=True)
class PublishedMeasurement:
    """One column of a published table."""

    metric: str  # loss (nats a token) | perplexity | mean reciprocal rank
    protocol: str | None  # None: not known
    training_length: int | None  # tokens
    length: int | None  # tokens; None: the training length
    values: dict[str, float]
    model: str | None = None  # which, where a publication has several

    @property
    def losses(self) -> dict[str, float]:
        """Nats a token of theirs; of a metric that is not a loss, numbers that are lower where a scheme is better."""
        return {scheme: _METRICS[self.metric](value) for scheme, value in self.values.items()}

    @property
    def ratio(self) -> float:
        """The evaluated length in training lengths."""
        return self.length / self.training_length if self.length and self.training_length else 1.0

    @property
    def what(self) -> str:
        """Such as `perplexity, nonoverlapping, 1012 tokens (trained at 512)`."""
        where = f"{self.length} tokens (trained at {self.training_length})" if self.length else "training length"
        of = f"{self.model}, " if self.model else ""
        return f"{of}{self.metric}, {self.protocol or 'protocol not recorded'}, {where}"


@dataclass(frozen=True)
class Published:
    """One publication's results."""

    name: str
    title: str
    source: str
    baseline: str
    chain: str | None
    setup: dict[str, str]
    measurements: list[PublishedMeasurement]
    notes: list[str]

    @property
    def models(self) -> str:
        """What was trained, in one line."""
        units = {"parameters": "{} parameters", "data": "{}", "training tokens": "{} tokens"}
        units |= {"context length": "context {}"}
        stated = {what: text for what, text in self.setup.items() if text != NOT_PUBLISHED}
        return ", ".join(form.format(stated[what]) for what, form in units.items() if what in stated) or NOT_PUBLISHED

    def links(self, schemes: Iterable[str]) -> list[Link]:
        """Neighbours of the published chain among our schemes, with the sign between them: (better, ">", worse).

        Where a scheme of theirs is not among ours its neighbours are linked, by ">" if one stands between them. Without
        a published chain the order of the first column is taken, with "," between them.
        """
        ours = set(schemes)
        if self.chain:
            words = re.split(r"\s+([~>/])\s+", self.chain)
            names, signs = words[::2], words[1::2]
        else:
            losses = self.measurements[0].losses
            names = sorted(losses, key=lambda name: losses[name])
            signs = [","] * (len(names) - 1)
        places = [place for place, name in enumerate(names) if name in ours]
        return [(names[a], ">" if ">" in signs[a:b] else signs[a], names[b]) for a, b in pairwise(places)]


@cache
def all_published() -> dict[str, Published]:
    """The publications by the names that `--against` accepts."""
    contents: dict[str, Any] = yaml.safe_load(_FILE.read_text(encoding="utf-8"))
    return {
        name: Published(
            name, **{**content, "measurements": [PublishedMeasurement(**m) for m in content["measurements"]]}
        )
        for name, content in contents.items()
    }


def load_published(name: str) -> Published:
    """The published results of this name. Raises: ConfigError for one we do not have."""
    known = all_published()
    if name not in known:
        raise ConfigError(
            f"--against {name!r} is not known{nearest(name, known)} (known: {', '.join(known)}; --against list shows "
            "what each is)"
        )
    return known[name]


def list_published(console: Console) -> None:
    """Print what `--against` accepts: the publication, the models, the lengths, the schemes."""
    table = Table("--against", "publication", "models and text", "schemes", box=box.SIMPLE_HEAD, show_lines=True)
    table.columns[0].no_wrap = True
    for published in all_published().values():
        schemes = dict.fromkeys(scheme for each in published.measurements for scheme in each.values)
        table.add_row(published.name, published.title, published.models, ", ".join(schemes))
    console.print(table)


@dataclass(frozen=True)
class Agreement:
    """One published column beside ours, and how far the two orders agree."""

    theirs: PublishedMeasurement
    where: str  # ours: protocol and length
    baseline: str | None  # of both gaps
    table: pd.DataFrame  # scheme, published, published_gap, gap, gap_low, gap_high; best of theirs first
    tau: float  # Kendall's; NaN below two schemes
    p: float  # of unrelated orders


def agreements(published: Published, comparison: Comparison) -> list[Agreement]:
    """Every published column beside our closest: of its protocol, at the nearest length in training lengths."""
    found = []
    for theirs in published.measurements:
        ours = _counterpart(theirs, comparison)
        both = sorted(set(theirs.values) & set(ours.index), key=lambda scheme: theirs.losses[scheme])
        if not both:
            continue
        table = ours.loc[both, ["seeds", "value", "gap", "gap_low", "gap_high"]]
        base = next((b for b in (comparison.baseline, published.baseline) if b in both), None)
        if base != comparison.baseline:  # ours has no gaps to that one
            table[["gap", "gap_low", "gap_high"]] = math.nan
            table["gap"] = table["value"] - table["value"].get(base, math.nan)
        losses = np.array([theirs.losses[scheme] for scheme in both])
        their_gap = losses - theirs.losses[base] if base and theirs.metric in ("loss", "perplexity") else math.nan
        table.insert(0, "published", [theirs.values[scheme] for scheme in both])
        table.insert(1, "published_gap", their_gap)
        tau, p = kendall(losses, table["value"].to_numpy()) if len(both) > 1 else (math.nan, math.nan)
        where = f"{ours['protocol'].iloc[0]} at {ours['length'].iloc[0]} tokens"
        found.append(Agreement(theirs, where, base, table.drop(columns="value"), float(tau), float(p)))
    return found


def _counterpart(theirs: PublishedMeasurement, comparison: Comparison) -> pd.DataFrame:
    """Our cells by scheme; empty where no length of ours is near theirs."""
    cells = comparison.at(metric="loss", last=0)
    if theirs.ratio == 1 and theirs.protocol in (None, NONOVERLAPPING.name):
        protocols = [VALIDATION.name]
    elif theirs.protocol:
        protocols = [theirs.protocol]
    else:
        protocols = [NONOVERLAPPING.name, *(name for name, protocol in PROTOCOLS.items() if protocol.is_by_length)]
    wanted = theirs.ratio * comparison.training_length
    for protocol in protocols:
        lengths = set(cells.loc[cells["protocol"] == protocol, "length"])
        near = min(sorted(lengths), key=lambda n: abs(math.log(n / wanted)), default=None)
        if near and 1 / NEAR <= near / wanted <= NEAR:
            return comparison.at(protocol, near, metric="loss", last=0).set_index("scheme")
    return cells.set_index("scheme").iloc[:0]


def link_verdict(comparison: Comparison, link: Link) -> str:
    """Whether our runs say so too: `holds`, `fails` or `open`; empty where the pair was not tested.

    ">" holds if `better` is significantly better, and fails if `worse` is or both are equal within the margin. "~"
    holds if both are equal, and fails if one is significantly better.
    """
    better, sign, worse = link
    ours = verdict(comparison.pairs, better, worse, "published")
    if ours in ("", "open"):
        return ours
    if sign in "~/":
        return "holds" if frozenset((better, worse)) in equivalent(comparison.pairs, "published") else "fails"
    return "holds" if ours == "better" else "fails"
