"""The held-out loss at the training length: the loss curve while training and, after the last step, the loss table.

Both are of the same windows, so the curve ends at the number in the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from posbench.evaluation.protocols.windowed import Windowed, stretches

if TYPE_CHECKING:
    from posbench.config import Config, EvaluationConfig
    from posbench.data import Split
    from posbench.evaluation.windows import Window


class Validation(Windowed):
    """Windows of the training length, `train.validation_tokens` in all, spread over the validation split."""

    name = "validation"
    caption = "Held-out loss at the training length: the text is cut into windows and every token scored."
    split: ClassVar[str] = "validation"
    is_loss_table: ClassVar[bool] = True

    def settings(self, config: Config) -> EvaluationConfig:
        """`train.validation_tokens` are read, and one window at least."""
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
        """The training length, whatever is asked for."""
        return [context_length]
