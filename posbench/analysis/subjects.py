"""Compare a model that was not trained here with itself under other options: its schemes are the options."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from posbench.analysis.card import Card, card_of
from posbench.analysis.cells import measure
from posbench.analysis.comparison import Comparison, damage
from posbench.config import ConfigError
from posbench.evaluation.protocols import PROTOCOLS
from posbench.runs import Run, run_at
from posbench.runs.results import MARKS, row_name

_NUMBERS = ["scheme", "length", "value", "value_documents", "perplexity", "gap", "gap_documents"]


@dataclass(frozen=True, kw_only=True)
class ModelComparison(Comparison):
    """A comparison of one model with itself under other options, over documents, because it has no seeds.

    Models with different tokenizers score different windows, so they are compared by bits per byte only.
    """

    metric: str = "bits_per_byte"
    doubt: str = "documents"

    @property
    def name(self) -> str:
        return self.wanted_baseline  # the model as it is

    @property
    def title(self) -> str:
        return self.name

    @cached_property
    def run(self) -> Run:
        return run_at(str(self.runs["path"].iloc[0]))

    @cached_property
    def card(self) -> Card | None:
        return card_of(self.run)

    @property
    def subject(self) -> dict[str, Any]:
        """Return what the manifest says about the model."""
        assert self.run.manifest.subject is not None
        return self.run.manifest.subject

    @cached_property
    def losses(self) -> pd.DataFrame:
        """Return the figures of the first protocol that scores perplexity by length, a row per option and length."""
        cells = self.at(metric="loss", last=0)
        for protocol in PROTOCOLS.values():
            of_protocol = cells[cells["protocol"] == protocol.name]
            if protocol.is_by_length and len(of_protocol):
                return of_protocol
        return cells.head(0)

    @property
    def as_it_is(self) -> pd.DataFrame:
        """Return the figures of the model without options, by length."""
        return self.losses[self.losses["scheme"] == self.name].set_index("length")

    @property
    def reference(self) -> int | None:
        """Return the longest scored length within the training length, in tokens."""
        return max((length for length in self.as_it_is.index if length <= self.training_length), default=None)

    @property
    def longest(self) -> int:
        """Return the longest scored length in tokens."""
        return max(self.losses["length"], default=self.training_length)

    @property
    def at_longest(self) -> pd.DataFrame:
        """Return the figures of all options at the longest length, the best first."""
        return self.losses[self.losses["length"] == self.longest].sort_values("value")

    @property
    def documents(self) -> int:
        return len(self.subject["document_tokens"])

    @property
    def long_enough(self) -> int:
        """Return how many documents are longer than the longest scored length."""
        return int((np.asarray(self.subject["document_tokens"]) > self.longest).sum())

    @property
    def numbers(self) -> list[dict[str, Any]]:
        rows: list[Any] = self.losses[_NUMBERS].to_dict("records")
        return rows


def compare_models(summary: pd.DataFrame, rows: pd.DataFrame) -> list[ModelComparison]:
    """Return a comparison for each model with results, by name. Arguments: summary, a row per model; rows, tidy.

    Raises: ConfigError if no model has a result, or different programs scored them.
    """
    by_name = [_compared_options(of_model, rows) for _, of_model in summary.groupby("scheme", sort=True)]
    comparisons = list(filter(None, by_name))
    if not comparisons:
        raise ConfigError("these models have no results: score them first (posbench eval FOLDER --length 2k)")
    _check_versions(comparisons)
    return comparisons


def _compared_options(model: pd.DataFrame, rows: pd.DataFrame) -> ModelComparison | None:
    rows = rows[rows["run"].isin(model.index)].copy()
    if rows.empty:
        return None
    rows["under"] = rows["under"].astype(str).map(_without_marks)  # categories would include other models' options
    name = str(model["scheme"].iloc[0])
    # "" is the model as it is; it comes first.
    options = sorted({"", *rows["under"]}, key=lambda text: (text != "", text))
    schemes = [row_name(name, text.split()) for text in options]
    number = rows["under"].map(options.index)
    # Each option becomes a scheme with one run, scored as trained.
    rows = rows.assign(run=number, scheme=number.map(dict(enumerate(schemes))), under="")
    runs = pd.concat([model.assign(scheme=scheme) for scheme in schemes], ignore_index=True)
    notes = damage(runs)
    holes: dict[tuple[str, str], list[str]] = {}
    length = int(runs["train.context_length"].iloc[0])
    return ModelComparison(
        runs=runs,
        schemes=schemes,
        wanted_baseline=name,
        cells=measure(rows, runs, name, length, notes, holes),
        holes=holes,
        left_out=[],
        notes=notes,
    )


def _without_marks(options: object) -> str:
    return " ".join(word for word in str(options).split() if word not in MARKS)


def _check_versions(comparisons: list[ModelComparison]) -> None:
    # Other versions of transformers or of the adapter may compute other losses for the same weights.
    by_versions: dict[str, list[str]] = {}
    for c in comparisons:
        versions = c.subject.get("versions")
        described = "posbench's own decoder"
        if versions is not None:
            described = f"transformers {versions['transformers']} (adapter {versions['adapter']})"
        by_versions.setdefault(described, []).append(c.name)
    if len(by_versions) > 1:
        parts = "; ".join(f"{', '.join(names)} by {versions}" for versions, names in by_versions.items())
        raise ConfigError(
            f"these models were scored by different programs: {parts}. Report one group with --schemes, or delete the "
            "results of the others and score them again"
        )
