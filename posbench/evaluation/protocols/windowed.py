"""Score windows over a split: the base of protocols that read windows of one length and add up losses in them."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np

from posbench.config import ConfigError, EvaluationConfig
from posbench.data import Split
from posbench.evaluation.protocols.protocol import Advance, EvalProtocol, Scored
from posbench.evaluation.windows import Window, choose_evenly, losses_of, tabulate_windows, too_long

if TYPE_CHECKING:
    from posbench.model.decoder import ScoredModel


class Windowed(EvalProtocol):
    """Base class of protocols that score windows of text, and store a table row for each document in each window."""

    @abstractmethod
    def windows(self, split: Split, length: int, settings: EvaluationConfig, anchor: int) -> list[Window]:
        """Return the windows of `length` tokens to score. Raises: ConfigError if the text has none."""

    def check_length(self, split: Split, length: int, settings: EvaluationConfig) -> None:
        self.windows(split, length, settings, length)

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
        windows = self.windows(split, length, settings, anchor)
        window_tokens = np.stack([split.tokens[w.start : w.start + length + 1] for w in windows])
        # The first token of a window is read and never scored, so BOS can take its place.
        if settings.bos:
            window_tokens[:, 0] = corpus.bos_id
        losses = losses_of(model, window_tokens, windows[0].scored, settings.batch_tokens, advance)
        rows = tabulate_windows(losses, windows, split, corpus.bos_id)
        figures: dict[str, Any] = {"windows": len(windows), "documents": int(rows["document"].nunique())}
        nll, targets = float(rows["nll"].sum()), int(rows["targets"].sum())
        figures |= {"targets_total": targets, "nll_mean": nll / targets}
        if "bytes" in rows:
            figures["bits_per_byte"] = nll / math.log(2) / int(rows["bytes"].sum())
        return rows, figures

    def tokens_read(self, settings: EvaluationConfig, length: int, anchor: int) -> int:
        return settings.max_tokens


def stretches(split: Split, size: int, length: int, settings: EvaluationConfig) -> list[Window]:
    """Return windows of `length` tokens, back to back in stretches of `size` tokens of the text; all targets count.

    Stretches of `settings.max_tokens` tokens in all are read, spread evenly over all documents, whose borders windows
    cross. All lengths that divide `size` score the same targets.
    """
    scorable = split.num_tokens - 1  # the first token has nothing before it
    if scorable < size:
        raise ConfigError(too_long(split, size, "in all", scorable))
    if settings.max_tokens < size:
        raise ConfigError(
            f"evaluation.max_tokens={settings.max_tokens} is less than one window of length {size}: raise it, or ask "
            "for a shorter length"
        )
    begins = np.arange(0, scorable - size + 1, size)
    # A stretch belongs to the document of its first target.
    counts = np.bincount(split.document_of(begins + 1), minlength=split.num_documents)
    chosen = begins[choose_evenly(counts, settings.max_tokens // size)]
    return [Window(int(begin) + n * length, length, length) for begin in chosen for n in range(size // length)]
