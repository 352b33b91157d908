"""Windows of the length moved by a stride, only the last `stride` targets of each scored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from posbench.config import ConfigError, EvaluationConfig
from posbench.evaluation.protocols.windowed import ByLength
from posbench.evaluation.windows import Window, rooms_of, spread, too_long

if TYPE_CHECKING:
    from posbench.data import Split


class Sliding(ByLength):
    """Windows moved by `targets` tokens."""

    name = "sliding"
    caption = "Sliding windows: windows overlap and only the last tokens of each are scored."
    facts: ClassVar[Mapping[str, type]] = {**ByLength.facts, "anchor": int}
    has_anchor: ClassVar[bool] = True
    same_rows: ClassVar[bool] = True
    shares_windows: ClassVar[tuple[str, ...]] = ("sliding",)

    def windows(self, split: Split, length: int, settings: EvaluationConfig, anchor: int) -> list[Window]:
        """Each scores its last `targets`. The targets are the same at every length: those behind `anchor` tokens.

        As many are scored as make `max_tokens` read at the longest length, spread evenly over all documents.
        """
        stride = min(settings.targets, length)
        ends = np.arange(anchor, split.num_tokens, stride)  # the last target of each window
        if not len(ends):
            raise ConfigError(too_long(split, anchor, "in all", split.num_tokens - 1))
        chosen = ends[spread(rooms_of(split, ends - stride + 1), max(1, settings.max_tokens // anchor))]
        return [Window(int(last) - length, length, stride) for last in chosen]

    def tokens_read(self, settings: EvaluationConfig, length: int, anchor: int) -> int:
        return max(1, settings.max_tokens // anchor) * length
