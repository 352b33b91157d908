"""Cut the text into windows of the length and score every target, as Press et al. 2022 (arXiv 2108.12409) compare."""

from __future__ import annotations

from typing import ClassVar

from posbench.config import EvaluationConfig
from posbench.data import Split
from posbench.evaluation.protocols.windowed import Windowed, stretches
from posbench.evaluation.windows import Window


class Nonoverlapping(Windowed):
    """Evaluation protocol that scores windows back to back, on the same text at every length.

    The text is in stretches of `anchor` tokens, the longest length. Longer windows score better even for a model that
    ignores the additional context, because fewer targets are near a window's start.
    """

    name = "nonoverlapping"
    rank = 1
    is_by_length: ClassVar[bool] = True
    caption = (
        "Non-overlapping windows: the text is cut into windows and every token scored. A longer window can gain "
        "already by having fewer tokens near its start."
    )
    shares_targets: ClassVar[bool] = True

    def windows(self, split: Split, length: int, settings: EvaluationConfig, anchor: int) -> list[Window]:
        return stretches(split, anchor, length, settings)
