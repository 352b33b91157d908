"""Text cut into windows of the length, every target scored (Press et al. 2022 compare this way)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from posbench.evaluation.protocols.windowed import ByLength, stretches

if TYPE_CHECKING:
    from posbench.config import EvaluationConfig
    from posbench.data import Split
    from posbench.evaluation.windows import Window


class Nonoverlapping(ByLength):
    """Windows back to back, in stretches of `anchor` tokens, the same at every length.

    Longer ones gain already because fewer targets stand near a window's start.
    """

    name = "nonoverlapping"
    caption = (
        "Non-overlapping windows: the text is cut into windows and every token scored. A longer window can gain "
        "already by having fewer tokens near its start."
    )

    facts: ClassVar[Mapping[str, type]] = {**ByLength.facts, "anchor": int}
    has_anchor: ClassVar[bool] = True
    shares_windows: ClassVar[tuple[str, ...]] = ("nonoverlapping", "position")

    def windows(self, split: Split, length: int, settings: EvaluationConfig, anchor: int) -> list[Window]:
        return stretches(split, anchor, length, settings)
