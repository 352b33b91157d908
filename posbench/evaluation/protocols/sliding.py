"""Windows of the length moved by a stride, only the last `stride` targets of each scored."""

from __future__ import annotations

from typing import TYPE_CHECKING

from posbench.config import ConfigError, EvaluationConfig
from posbench.evaluation.protocols.windowed import ByLength
from posbench.evaluation.windows import Window, too_long

if TYPE_CHECKING:
    from posbench.data import Split


class Sliding(ByLength):
    """Windows moved by `targets` tokens."""

    name = "sliding"
    caption = "Sliding windows: windows overlap and only the last tokens of each are scored."

    def windows(self, split: Split, length: int, settings: EvaluationConfig, anchor: int) -> list[Window]:
        """Each scores its last `targets`; at most `max_tokens` are read."""
        stride = min(settings.targets, length)
        last = min(split.num_tokens - 1 - length, length * (settings.max_tokens // stride))
        if last < 0:
            raise ConfigError(too_long(split, length, "in all", split.num_tokens - 1))
        count = min(last // stride + 1, max(1, settings.max_tokens // length))
        return [Window(n * stride, length, stride) for n in range(count)]
