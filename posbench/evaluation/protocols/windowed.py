"""Protocols that are a list of windows over a split: which tokens are scored with how much left context."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from posbench.config import ConfigError, EvaluationConfig
from posbench.evaluation.protocols.protocol import Advance, Protocol
from posbench.evaluation.windows import Window, rooms_of, spread, tabulate_windows, too_long

if TYPE_CHECKING:
    import pandas as pd

    from posbench.data import Corpus, Split
    from posbench.model import Decoder


class Windowed(Protocol):
    """Windows over the split, and their losses put into a table: one row a window and document in it."""

    columns: ClassVar[tuple[str, ...]] = ("document", "start", "targets", "nll", "bytes")

    @abstractmethod
    def windows(self, split: Split, length: int, settings: EvaluationConfig, anchor: int) -> list[Window]:
        """The windows of `length` tokens to score. Raises: ConfigError where the text has none."""

    def tabulate(self, losses: np.ndarray, windows: Sequence[Window], split: Split, bos_id: int) -> pd.DataFrame:
        """The rows to store, of the losses [windows, scored] in nats."""
        return tabulate_windows(losses, windows, split, bos_id)

    def score(
        self,
        model: Decoder,
        corpus: Corpus,
        split: Split,
        length: int,
        settings: EvaluationConfig,
        anchor: int,
        advance: Advance,
    ) -> tuple[pd.DataFrame, dict[str, Any]]:
        from posbench.evaluation.scoring import score

        windows = self.windows(split, length, settings, anchor)
        losses = score(model, split, windows, settings.batch_tokens, advance)
        rows = self.tabulate(losses, windows, split, corpus.bos_id)
        figures: dict[str, Any] = {"windows": len(windows), "documents": int(rows["document"].nunique())}
        nll, targets = float(rows["nll"].sum()), int(rows["targets"].sum())
        figures |= {"targets_total": targets, "nll_mean": nll / targets}
        if "bytes" in rows:
            figures["bits_per_byte"] = nll / math.log(2) / int(rows["bytes"].sum())
        return rows, figures

    def tokens_read(self, settings: EvaluationConfig, length: int, anchor: int) -> int:
        return settings.max_tokens


class ByLength(Windowed):
    """Perplexity against length, on the test split."""

    is_by_length: ClassVar[bool] = True


def stretches(split: Split, size: int, length: int, settings: EvaluationConfig) -> list[Window]:
    """Windows of `length` back to back in stretches of `size` tokens, every target scored, crossing documents.

    The whole stream is cut into stretches; as many of them as make `max_tokens` are read, spread evenly over all
    documents (a stretch counts to the one of its first target). They do not depend on `length`, so that all lengths
    that divide `size` score the same targets; else the tail of a stretch that fills no window is left out.
    """
    scorable = split.num_tokens - 1
    if scorable < size:
        raise ConfigError(too_long(split, size, "in all", scorable))
    if settings.max_tokens < size:
        raise ConfigError(
            f"evaluation.max_tokens={settings.max_tokens} is less than one window of length {size}: raise it, or ask "
            "for a shorter length"
        )
    begins = np.arange(0, scorable - size + 1, size)
    chosen = begins[spread(rooms_of(split, begins + 1), settings.max_tokens // size)]
    return [Window(int(begin) + n * length, length, length) for begin in chosen for n in range(size // length)]
