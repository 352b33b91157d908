"""What a protocol is: one way to score a model at one length, and the answers to whoever stores, prints or reports it.

A header is what stands beside the stored rows in `eval/`: the figures that `score` gave, and what they were made of.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pandas as pd

from posbench.config import Config, ConfigError, EvaluationConfig
from posbench.config.units import perplexity_text
from posbench.evaluation.protocols.section import ComparedRuns, Section
from posbench.evaluation.windows import too_long
from posbench.runs.results import perplexity

if TYPE_CHECKING:
    from posbench.model.decoder import Decoder

CONTEXT = "What a model uses of its context"  # title of a section of several protocols
Advance = Callable[[int], object]  # is told the tokens that were read
Metric = tuple[str, Any, Any]  # its name, and of each stored row the sum of its values and what it is a sum of


@dataclass(frozen=True)
class Score:
    """A figure of a group of stored rows, nats/token, that schemes are compared by."""

    name: str
    column: str  # of losses
    minus: str = ""  # the column of losses that is taken off it; empty: none

    def of(self, sums: Any) -> Any:
        """The figure, of the sums of a group's columns."""
        with np.errstate(invalid="ignore"):  # infinite losses: whoever stores the figure refuses it
            losses = sums[self.column] - sums[self.minus] if self.minus else sums[self.column]
        return losses / sums["targets"]


class Protocol(ABC):
    """One way to score. By default the figure is a loss (nats per target) and the comparison is of perplexities."""

    name: ClassVar[str]
    rank: ClassVar[int] = 99  # protocols are listed and reported from the lowest rank to the highest
    caption: ClassVar[str]  # what is scored, a sentence for the report, where `is_by_length`
    split: ClassVar[str] = "test"  # of the text
    of_text: ClassVar[bool] = True  # whether it scores text
    of_tasks: ClassVar[bool] = False  # whether it scores problems of tasks
    follows_lengths: ClassVar[bool] = True  # whether lengths that are asked for without a protocol are meant for it
    shares_windows: ClassVar[tuple[str, ...]] = ()  # protocols whose longest length decides which text all score

    is_compared: ClassVar[bool] = True  # whether schemes are ranked by its figures, and its rows are in the tidy table

    # The settings that decide what is scored.
    decided_by: ClassVar[tuple[str, ...]] = ("targets", "windows", "max_tokens", "passage")

    # What results are compared by, besides the loss table of `validation`.
    is_by_length: ClassVar[bool] = False  # perplexity against length
    groups: ClassVar[tuple[str, ...]] = ()  # columns: figures of the rows that agree in them (`scores`)
    scores: ClassVar[tuple[Score, ...]] = ()
    text_column: ClassVar[str] = "document"  # rows that agree in it are one text, for intervals over texts
    count_column: ClassVar[str] = "targets"  # how many were scored
    unit: ClassVar[str] = "tokens"  # of lengths

    figure_names: ClassVar[tuple[str, ...]] = ("nll", "perplexity", "bits_per_byte")  # the keys of `figures`
    headline: ClassVar[str] = "perplexity"  # what `headline_of` gives
    headline_key: ClassVar[str] = ""  # of the header, where the headline is the mean of that and not a perplexity
    columns: ClassVar[Mapping[str, tuple[str, str]]] = {}  # columns of its own in CSV files -> meaning and unit

    @abstractmethod
    def score(
        self,
        model: Decoder,
        corpus: Any,  # text, or the problems of a task
        split: Any,
        length: int,
        settings: EvaluationConfig,
        anchor: int,
        advance: Advance,
    ) -> tuple[pd.DataFrame, dict[str, Any]]:
        """The rows to store, and the header's figures: `nll_mean` (nats per target), `targets_total`, ..."""

    def reads(self, config: Config) -> bool:
        """Return whether it scores what `config` trains on."""
        return self.of_tasks if config.is_task else self.of_text

    def check(self, config: Config) -> None:
        """Raise ConfigError if it does not score what `config` trains on."""
        if not self.reads(config):
            scored, data, other = (
                ("text", "a task", "accuracy") if self.of_text else ("problems of tasks", "text", "fixed")
            )
            raise ConfigError(
                f"protocol {self.name} scores {scored}, and data={config.data.name} is {data}: take another, such as "
                f"{other}"
            )

    def settings(self, config: Config) -> EvaluationConfig:
        """What decides which windows of a run are scored."""
        return config.evaluation

    @abstractmethod
    def tokens_read(self, settings: EvaluationConfig, length: int, anchor: int) -> int:
        """About how many tokens are read at one length where the text is long enough: what a plan counts."""

    def check_length(self, split: Any, length: int, settings: EvaluationConfig) -> None:
        """Raise ConfigError if the text has no window of `length` tokens to score."""
        if length >= split.num_tokens:
            raise ConfigError(too_long(split, length, "in all", split.num_tokens - 1))

    def shortest(self, settings: EvaluationConfig) -> int:
        """The shortest length that can be scored, tokens."""
        return 2

    def default_lengths(self, context_length: int, split: Any = None) -> list[int]:
        """Half the training length, then it times 1, 2, 4 ... 32, as far as the text reaches (tokens)."""
        lengths = [context_length * 2**n // 2 for n in range(7)]
        return [length for length in lengths if split is None or length < split.num_tokens]

    def lengths(
        self,
        asked: Sequence[int],
        context_length: int,
        split: Any = None,
        configured: Sequence[int] = (),
    ) -> list[int]:
        """The lengths to score: those asked for by name, else those of the configuration, else the defaults.

        A protocol that does not follow lengths has the training length unless others are asked for by name.
        """
        if not self.follows_lengths:
            return sorted(set(asked)) or [context_length]
        return sorted(set(asked or configured)) or self.default_lengths(context_length, split)

    def metrics(self, columns: Any) -> Sequence[Metric]:
        """What the tidy table has of stored rows. Arguments: columns, arrays by name."""
        targets = columns[self.count_column].astype(float)
        if self.scores:
            return [(score.name, np.asarray(score.of(columns)) * targets, targets) for score in self.scores]
        losses = [("loss", columns["nll"], targets)]
        if "bytes" in columns:
            losses.append(("bits_per_byte", columns["nll"] / math.log(2), columns["bytes"].astype(float)))
        return losses

    def sections(self, found: ComparedRuns, every_length: bool) -> list[Section]:
        """Return the sections of the report about these results.

        Arguments: every_length, whether to show lengths that are neither a multiple nor a part of the training length.
        """
        return []

    def task_sections(self, task: str, runs: pd.DataFrame, schemes: Sequence[str], length: int) -> list[Section]:
        """Return the sections about the runs of one task. Arguments: length, the longest trained one, in items."""
        return []

    def group_sections(self, groups: Mapping[str, ComparedRuns]) -> list[Section]:
        """Return the sections of a report about groups of runs. Arguments: groups, by the value that they share."""
        return []

    def of_training(self, logged: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Return columns of a run's summary, computed from the rows of its metrics.jsonl."""
        return {}

    def figures(self, header: Mapping[str, Any]) -> dict[str, float | None]:
        """Single figures of one result: nll in nats a token, perplexity, bits a byte. None: not known."""
        known = {**header, "nll": header["nll_mean"], "perplexity": perplexity(header["nll_mean"])}
        return {name: known.get(name) for name in self.figure_names}

    def headline_of(self, headers: Sequence[Mapping[str, Any]]) -> str:
        """One figure of the results of several seeds, as text: the perplexity of their mean loss."""
        if self.headline_key:
            return f"{np.mean([header[self.headline_key] for header in headers]):z.3f}"
        return perplexity_text(perplexity(float(np.mean([header["nll_mean"] for header in headers]))))
