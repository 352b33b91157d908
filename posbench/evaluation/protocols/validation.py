"""Score the held-out loss at the training length. The validation curve that training logs ends at this number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from posbench.config import Config, EvaluationConfig
from posbench.data import ProblemSplit, Split
from posbench.evaluation.protocols.accuracy import score_problems
from posbench.evaluation.protocols.protocol import Advance, Scored
from posbench.evaluation.protocols.windowed import Windowed, stretches
from posbench.evaluation.windows import Window

if TYPE_CHECKING:
    from posbench.model.decoder import ScoredModel


class Validation(Windowed):
    """Evaluation protocol for the loss on windows of the training length, spread over the validation split.

    They have `train.validation_tokens` tokens in all.
    """

    name = "validation"
    rank = 2
    split: ClassVar[str] = "validation"
    of_tasks: ClassVar[bool] = True

    def score(
        self,
        model: ScoredModel,
        corpus: Any,
        split: Any,
        length: int,
        settings: EvaluationConfig,
        anchor: int,
        advance: Advance,
    ) -> Scored:
        """Score windows of text or, for a task, answers of problems of trained lengths."""
        if not isinstance(split, ProblemSplit):
            return super().score(model, corpus, split, length, settings, anchor, advance)
        problems = split.at_trained_lengths(max(1, settings.max_tokens // length))
        rows = score_problems(model, problems, settings.batch_tokens, advance)
        # Rows get the columns that results of text have.
        rows = rows.rename(columns={"problem": "document", "answers": "targets"}).assign(start=0)
        targets, nll, right = int(rows["targets"].sum()), float(rows["nll"].sum()), int(rows["right"].sum())
        return rows, {"targets_total": targets, "nll_mean": nll / targets, "accuracy": right / targets}

    def settings(self, config: Config) -> EvaluationConfig:
        """Return settings by which `train.validation_tokens` tokens are read, and at least one window."""
        tokens = max(config.train.validation_tokens, config.train.context_length)
        return replace(config.evaluation, max_tokens=tokens)

    def windows(self, split: Split, length: int, settings: EvaluationConfig, anchor: int) -> list[Window]:
        return stretches(split, length, length, settings)

    def lengths(
        self,
        asked: Sequence[int],
        context_length: int,
        split: Split | None = None,
        configured: Sequence[int] = (),
    ) -> list[int]:
        """Return only the training length, whatever lengths are requested or configured."""
        return [context_length]
