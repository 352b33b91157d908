"""Load what others have published about the same schemes, from `published.yaml`.

Their set-ups differ from ours, so orders and gaps are compared, never losses. A value that a publication is known not
to state is "not published".
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

from posbench.analysis.statistics import Link
from posbench.config import ConfigError, nearest

_FILE = Path(__file__).with_suffix(".yaml")
NOT_PUBLISHED = "not published"
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
        """Return {scheme: loss in nats per token}; for other metrics, a number that is lower for better schemes."""
        return {scheme: _METRICS[self.metric](value) for scheme, value in self.values.items()}

    @property
    def ratio(self) -> float:
        """Return the evaluated length divided by the training length; 1 if either is unknown."""
        return self.length / self.training_length if self.length and self.training_length else 1.0

    @property
    def description(self) -> str:
        """Return metric, protocol and length as text: `perplexity, nonoverlapping, 1012 tokens (trained at 512)`."""
        length = f"{self.length} tokens (trained at {self.training_length})" if self.length else "training length"
        model = f"{self.model}, " if self.model else ""
        return f"{model}{self.metric}, {self.protocol or 'protocol not recorded'}, {length}"


@dataclass(frozen=True)
class Published:
    """The results of one publication, with its description of models and training."""

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
        """Return the trained models in one line: parameters, data, tokens and context; "not published" if unknown."""
        units = {"parameters": "{} parameters", "data": "{}", "training tokens": "{} tokens"}
        units |= {"context length": "context {}"}
        facts = {name: text for name, text in self.setup.items() if text != NOT_PUBLISHED}
        return ", ".join(form.format(facts[name]) for name, form in units.items() if name in facts) or NOT_PUBLISHED

    def links(self, schemes: Iterable[str]) -> list[Link]:
        """Return the published claims about these schemes, each about two that are neighbours in the published order.

        A claim is (better, sign, worse), such as ("qk", ">", "k"). If a published scheme is missing from `schemes`, its
        neighbours form a pair, with ">" if any sign between them is ">". If no order was claimed, schemes are ordered
        by the first column of the published table, with "," as the sign.
        """
        ours = set(schemes)
        if self.chain:
            words = re.split(r"\s+([~>/])\s+", self.chain)
            names, signs = words[::2], words[1::2]
        else:
            losses = self.measurements[0].losses
            names = sorted(losses, key=lambda name: losses[name])
            signs = [","] * (len(names) - 1)
        indices = [n for n, name in enumerate(names) if name in ours]
        return [(names[a], ">" if ">" in signs[a:b] else signs[a], names[b]) for a, b in pairwise(indices)]


@cache
def all_published() -> dict[str, Published]:
    """Return all publications, keyed by the names that `--against` accepts."""
    contents: dict[str, Any] = yaml.safe_load(_FILE.read_text(encoding="utf-8"))
    return {
        name: Published(
            name, **{**content, "measurements": [PublishedMeasurement(**m) for m in content["measurements"]]}
        )
        for name, content in contents.items()
    }


def load_published(name: str) -> Published:
    """Return the published results of this name. Raises: ConfigError for an unknown name."""
    known = all_published()
    if name not in known:
        raise ConfigError(f"--against {name!r} is not known{nearest(name, known)} (known: {', '.join(known)})")
    return known[name]
