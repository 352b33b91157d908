"""Published results beside ours: the same schemes, other set-ups, so orders and gaps are compared and never levels.

Each is a data file in `published/`. A value they do not state is "not published" where that is known, and absent
otherwise (reports then say "not recorded here").
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from posbench.config import ConfigError, nearest
from posbench.evaluation.protocols import NONOVERLAPPING, PROTOCOLS, VALIDATION
from posbench.reporting.statistics import NOTHING, Interval, Pair, compare_all, t_interval

if TYPE_CHECKING:
    from rich.console import Console

    from posbench.config import Config
    from posbench.reporting.measure import Measurement

_FOLDER = Path(__file__).parent / "published"
FEWEST = 4  # schemes: the order of fewer agrees by chance too often for Kendall's tau to say anything
NEAR = 1.25  # our length stands for theirs where both, in training lengths, differ by no more than this factor
NOT_PUBLISHED = "not published"
SETUP = (
    "runs a scheme",
    "parameters",
    "architecture",
    "data",
    "training tokens",
    "context length",
    "learning rate",
    "seeds",
    "unit",
)
_LISTED = {  # of the set-up, in one line
    "parameters": "{} parameters",
    "data": "{}",
    "training tokens": "{} tokens",
    "context length": "context {}",
}


# Each metric as a number that is lower where a scheme is better; losses in nats/token.
_METRICS: dict[str, Callable[[float], float]] = {
    "loss": float,
    "perplexity": math.log,
    "mean reciprocal rank": operator.neg,
}


@dataclass(frozen=True)
class PublishedMeasurement:
    """One column of a published table."""

    metric: str  # loss (nats/token) | perplexity | mean reciprocal rank
    protocol: str | None  # None: not known
    training_length: int | None  # tokens
    length: int | None  # tokens; None: the training length
    values: dict[str, float]
    model: str | None = None  # which, where a publication has several

    @property
    def is_loss(self) -> bool:
        """Whether the values are losses, so that gaps between them can be set beside ours."""
        return self.metric in ("loss", "perplexity")

    @property
    def losses(self) -> dict[str, float]:
        """nats/token of their tokens; of a metric that is no loss, numbers that are lower where a scheme is better."""
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


def published_names() -> list[str]:
    """What `--against` accepts."""
    return sorted(file.stem for file in _FOLDER.glob("*.yaml"))


def load_published(name: str) -> Published:
    """The published results of this name. Raises: ConfigError for one we do not have."""
    known = published_names()
    if name not in known:
        raise ConfigError(
            f"--against {name!r} is not known{nearest(name, known)} (known: {', '.join(known)}; --against list shows "
            "what each is)"
        )
    content: dict[str, Any] = yaml.safe_load((_FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    measurements = [PublishedMeasurement(**m) for m in content.pop("measurements")]
    return Published(measurements=measurements, **content)


def list_published(console: Console) -> None:
    """Print what `--against` accepts: the publication, the models, the lengths, the schemes."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False, show_lines=True)
    table.add_column("--against", no_wrap=True)
    for column in ("publication", "models and text", "schemes"):
        table.add_column(column)
    for published in map(load_published, published_names()):
        stated = {what: text for what, text in published.setup.items() if text != NOT_PUBLISHED}
        units = {
            "parameters": "{} parameters",
            "data": "{}",
            "training tokens": "{} tokens",
            "context length": "context {}",
        }
        models = ", ".join(form.format(stated[what]) for what, form in units.items() if what in stated)
        schemes = dict.fromkeys(scheme for each in published.measurements for scheme in each.values)
        table.add_row(published.name, published.title, models or NOT_PUBLISHED, ", ".join(schemes))
    console.print(table)


@dataclass(frozen=True)
class Row:
    """One scheme on both sides. Losses and gaps in nats/token, each side of its own tokens; NaN: not there."""

    scheme: str
    theirs: float  # in their metric
    their_gap: float
    ours: Measurement
    our_gap: Interval  # paired over seeds


@dataclass(frozen=True)
class Disagreement:
    """Two schemes whose order is reversed in our runs."""

    better: str  # by them
    worse: str
    their_difference: float  # worse - better, positive; of a metric that is no loss, in its own units
    pair: Pair  # ours: `left` is their worse one


@dataclass(frozen=True)
class Comparison:
    """One published column beside ours."""

    published: Published
    measurement: PublishedMeasurement
    where: str  # ours: protocol and length; empty where we have nothing to set beside it
    baseline: str | None  # of both gap columns
    rows: list[Row]
    tau: float  # Kendall's, of the orders; NaN below two schemes
    p: float  # of tau = 0
    taus: tuple[float, ...]  # tau of each seed alone; empty below two schemes
    disagreements: list[Disagreement]


def set_against(
    published: Published, measurements: list[Measurement], pairs: list[Pair], config: Config
) -> list[Comparison]:
    """Every published column beside our closest: of its protocol, at the nearest length in training lengths."""
    return [_compare(published, theirs, measurements, pairs, config) for theirs in published.measurements]


def _compare(
    published: Published,
    theirs: PublishedMeasurement,
    measurements: list[Measurement],
    pairs: list[Pair],
    config: Config,
) -> Comparison:
    from scipy import stats

    ours = _counterpart(theirs, measurements, config.train.context_length)
    both = sorted((s for s in theirs.values if s in ours), key=lambda s: theirs.losses[s])
    wanted = (config.experiment.baseline, published.baseline)
    base = next((b for b in wanted if b in both), None)
    rows = [
        Row(
            scheme=s,
            theirs=theirs.values[s],
            their_gap=theirs.losses[s] - theirs.losses[base] if base and theirs.is_loss else math.nan,
            ours=ours[s],
            our_gap=t_interval(np.subtract(ours[s].losses, ours[base].losses)) if base else NOTHING,
        )
        for s in both
    ]
    tau, p = math.nan, math.nan
    taus: tuple[float, ...] = ()
    if len(both) > 1:
        order = [theirs.losses[s] for s in both]
        result = stats.kendalltau(order, [ours[s].loss.mean for s in both])
        tau, p = float(result.statistic), float(result.pvalue)
        by_seed = zip(*(ours[s].losses for s in both), strict=True)
        taus = tuple(float(stats.kendalltau(order, losses).statistic) for losses in by_seed)
    one = next(iter(ours.values()), None)
    if one is not None and one.protocol != VALIDATION.name:
        names = sorted(s for s in ours if np.isfinite(ours[s].losses).all())
        pairs = compare_all(np.array([ours[s].losses for s in names]).T, names)
    reversed_pairs = {(p.right, p.left): p for p in pairs}
    disagreements = [
        Disagreement(a, b, theirs.losses[b] - theirs.losses[a], reversed_pairs[a, b])
        for n, a in enumerate(both)
        for b in both[n + 1 :]
        if (a, b) in reversed_pairs and theirs.losses[a] < theirs.losses[b]
        if round(reversed_pairs[a, b].difference, 4) > 0  # what is 0 at the digits shown is a tie
    ]
    where = f"{one.protocol} at {one.length} tokens" if one and both else ""
    return Comparison(published, theirs, where, base, rows, tau, p, taus, disagreements)


def _counterpart(
    theirs: PublishedMeasurement, measurements: list[Measurement], training_length: int
) -> dict[str, Measurement]:
    """Ours, by scheme; empty where no length of ours is near theirs."""
    if theirs.ratio == 1 and theirs.protocol in (None, NONOVERLAPPING.name):
        protocols = [VALIDATION.name]
    elif theirs.protocol:
        protocols = [theirs.protocol]
    else:
        protocols = [NONOVERLAPPING.name, *(name for name, protocol in PROTOCOLS.items() if protocol.is_by_length)]
    for protocol in protocols:
        lengths = sorted({m.length for m in measurements if m.protocol == protocol})
        wanted = theirs.ratio * training_length
        near = min(lengths, key=lambda n: abs(math.log(n / wanted)), default=None)
        if near and 1 / NEAR <= near / wanted <= NEAR:
            return {m.scheme: m for m in measurements if (m.protocol, m.length) == (protocol, near)}
    return {}
