"""The final held-out loss at the training length: the loss table. Training writes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from posbench.evaluation.protocols.windowed import Windowed, back_to_back

if TYPE_CHECKING:
    from posbench.config import EvaluationConfig
    from posbench.data import Split
    from posbench.evaluation.windows import Window


class Validation(Windowed):
    """Non-overlapping windows of the training length over the validation split."""

    name = "validation"
    caption = "Held-out loss at the training length: the text is cut into windows and every token scored."
    split: ClassVar[str] = "validation"
    is_loss_table: ClassVar[bool] = True

    def windows(self, split: Split, length: int, settings: EvaluationConfig, anchor: int) -> list[Window]:
        return back_to_back(split, length, settings)

    def lengths(
        self,
        asked: Sequence[int],
        context_length: int,
        split: Split | None = None,
        configured: Sequence[int] = (),
    ) -> list[int]:
        """The training length, whatever is asked for."""
        return [context_length]
