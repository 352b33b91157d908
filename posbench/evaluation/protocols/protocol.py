"""Define a protocol: one way to score a model at one length, and how to store, print and report the score."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pandas as pd

from posbench.config import Config, ConfigError, EvaluationConfig
from posbench.config.units import perplexity_text
from posbench.evaluation.windows import too_long
from posbench.runs.results import perplexity

if TYPE_CHECKING:
    from posbench.model.decoder import ScoredModel

Advance = Callable[[int], object]  # called with the number of tokens that were read
Scored = tuple[pd.DataFrame, dict[str, Any]]  # the rows and the header of a result
Metric = tuple[str, Any, Any]  # its name, and for each stored row the sum of its values and their number


class EvalProtocol(ABC):
    """A way to score a model at one length, and to store and report the score. By default it scores losses.

    A report shows losses as perplexity unless a subclass changes it.
    """

    name: str
    place: str = ""  # of a protocol of one's own: its file, class and options, as results record them
    rank: ClassVar[int] = 99  # protocols are listed and reported from the lowest rank to the highest
    caption: ClassVar[str]  # a sentence for the report that says what is scored, if `is_by_length`
    split: ClassVar[str] = "test"  # split of the text to score
    of_text: ClassVar[bool] = True  # whether it scores text
    of_tasks: ClassVar[bool] = False  # whether it scores problems of tasks
    follows_lengths: ClassVar[bool] = True  # whether lengths that are requested without a protocol apply to it
    shares_targets: ClassVar[bool] = False  # whether all lengths are scored on the longest one's targets
    is_compared: ClassVar[bool] = True  # whether schemes are ranked by its figures, and its rows are in the tidy table

    # The settings of `evaluation` that decide what is scored.
    decided_by: ClassVar[tuple[str, ...]] = ("targets", "windows", "max_tokens", "bos")

    # The figures by which results are compared, besides the loss table of `validation`.
    is_by_length: ClassVar[bool] = False  # perplexity against length
    text_column: ClassVar[str] = "document"  # rows with equal values are one text, for intervals over texts
    count_column: ClassVar[str] = "targets"  # column with the number of scored targets
    unit: ClassVar[str] = "tokens"  # unit of lengths

    figure_names: ClassVar[tuple[str, ...]] = ("nll", "perplexity", "bits_per_byte")  # the keys of `figures`
    headline: ClassVar[str] = "perplexity"  # name of the figure that `headline_of` returns
    headline_key: ClassVar[str] = ""  # key of the header whose mean is the headline; empty means perplexity
    columns: ClassVar[Mapping[str, tuple[str, str]]] = {}  # columns that only it has in CSV files -> meaning and unit

    @abstractmethod
    def score(
        self,
        model: ScoredModel,
        corpus: Any,  # text, or the problems of a task
        split: Any,
        length: int,
        settings: EvaluationConfig,
        anchor: int,
        advance: Advance,
    ) -> Scored:
        """Score a model at one length.

        Arguments: corpus, the text or task; split, its part to score; length, in tokens or items of a task; anchor, the
        longest length of the comparison, which decides what text is scored; advance, called with the number of tokens
        after each forward pass.
        Returns: the table to store, a row per scored window or problem, and numbers for its header, such as `nll_mean`
        (nats/target) and `targets_total`.
        """

    def reads(self, config: Config) -> bool:
        """Return whether this protocol scores what `config` trains on, text or a task."""
        return self.of_tasks if config.is_task else self.of_text

    def check(self, config: Config) -> None:
        """Raise ConfigError if this protocol does not score what `config` trains on."""
        if not self.reads(config):
            # It scores only tasks and `config` trains on text, or the other way round.
            scored, data, suggestion = "problems of tasks", "text", "fixed"
            if self.of_text:
                scored, data, suggestion = "text", "a task", "accuracy"
            raise ConfigError(
                f"protocol {self.name} scores {scored}, and data={config.data.name} is {data}: take another, such as "
                f"{suggestion}"
            )

    def settings(self, config: Config) -> EvaluationConfig:
        """Return the settings of the group `evaluation` that decide which windows of a run are scored."""
        return config.evaluation

    @abstractmethod
    def tokens_read(self, settings: EvaluationConfig, length: int, anchor: int) -> int:
        """Estimate how many tokens are read to score one length of a text that is long enough."""

    def check_length(self, split: Any, length: int, settings: EvaluationConfig) -> None:
        """Raise ConfigError if the text `split` has no window of `length` tokens to score."""
        if length >= split.num_tokens:
            raise ConfigError(too_long(split, length, "in all", split.num_tokens - 1))

    def shortest(self, settings: EvaluationConfig) -> int:
        """Return the shortest length that can be scored, in tokens."""
        return 2

    def default_lengths(self, context_length: int, split: Any = None) -> list[int]:
        """Return the training length times 0.5, 1, 2, 4 ... 32, in tokens, as far as the text is long enough."""
        lengths = [context_length * 2**n // 2 for n in range(7)]
        return [length for length in lengths if split is None or length < split.num_tokens]

    def lengths(
        self,
        asked: Sequence[int],
        context_length: int,
        split: Any = None,
        configured: Sequence[int] = (),
    ) -> list[int]:
        """Return the lengths to score: the requested ones, else the configured ones, else the defaults.

        Arguments: asked, the requested lengths; context_length, the training length; configured, the run's.
        """
        # Such a protocol is about the training length unless another is requested; configured lengths do not count.
        if not self.follows_lengths:
            return sorted(set(asked)) or [context_length]
        return sorted(set(asked or configured)) or self.default_lengths(context_length, split)

    def metrics(self, columns: Any) -> Sequence[Metric]:
        """Return (name, sums, counts) for each metric of a stored result, from which reports compute all means.

        Arguments: columns, {name: array} of the stored table. Returns: sums over the targets of each stored row, and
        their numbers.
        """
        targets = columns[self.count_column].astype(float)
        losses = [("loss", columns["nll"], targets)]
        if "bytes" in columns:
            losses.append(("bits_per_byte", columns["nll"] / math.log(2), columns["bytes"].astype(float)))
        return losses

    def sections(self, comparison: Any) -> Sequence[Any]:
        """Return the sections (`posbench.reporting.section`) that a report shows of a protocol of one's own.

        Arguments: comparison, with the runs and their figures (`posbench.analysis.comparison.Comparison`).
        """
        return []

    def of_training(self, logged: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Return columns to add to a run's row of the summary, from its metrics.jsonl."""
        return {}

    def figures(self, header: Mapping[str, Any]) -> dict[str, float | None]:
        """Return a result's nll in nats/token, perplexity and bits per byte; None if unknown."""
        known = {**header, "nll": header["nll_mean"], "perplexity": perplexity(header["nll_mean"])}
        return {name: known.get(name) for name in self.figure_names}

    def headline_of(self, headers: Sequence[Mapping[str, Any]]) -> str:
        """Return, as text, the protocol's main number, mean over seeds; by default the mean loss as perplexity."""
        if self.headline_key:
            return f"{np.mean([header[self.headline_key] for header in headers]):z.3f}"
        return perplexity_text(perplexity(float(np.mean([header["nll_mean"] for header in headers]))))
