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
from typing import Any

import yaml

from posbench.config import ConfigError, nearest
from posbench.reporting.statistics import Link

_FILE = Path(__file__).with_suffix(".yaml")
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
        raise ConfigError(f"--against {name!r} is not known{nearest(name, known)} (known: {', '.join(known)})")
    return known[name]
