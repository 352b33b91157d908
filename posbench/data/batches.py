"""What training reads: batch `n`, a pure function of the seed, `n` and the tokens.

No loader state exists, so there is none to save, none that a scheme could disturb, and resuming is exact.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from posbench.config import ConfigError
from posbench.data.text.corpus import Split


class Batch(NamedTuple):
    """What one step reads, a row a sequence: NumPy's arrays on the host, then tensors on the device."""

    tokens: Any  # [B, T + 1] int64
    answers: Any = None  # [B, T] int64, the next token where it is an answer, else -1; None: every token is scored
    positions: Any = None  # [B, T] int64, of the inputs; None: from 0 on

    @property
    def inputs(self) -> Any:
        """What the model reads, [B, T]."""
        return self.tokens[:, :-1]

    @property
    def targets(self) -> Any:
        """What it is to say next, [B, T]; below 0 where that is not scored."""
        return self.tokens[:, 1:] if self.answers is None else self.answers

    def each(self, function: Callable[[Any], Any]) -> Batch:
        """The same with `function` of each part that there is."""
        return Batch(*(None if part is None else function(part) for part in self))

    def chunks(self, number: int) -> list[Batch]:
        """Tensors cut into as many parts with equally many rows."""
        parts = [number * [None] if part is None else part.chunk(number) for part in self]
        return [Batch(*rows) for rows in zip(*parts, strict=True)]


class Batches:
    """Windows of `context_length + 1` tokens of a split, each once an epoch, in an order drawn from the seed.

    An epoch cuts the whole stream (documents back to back, each led by its BOS) into W windows of T tokens and the one
    that follows, beginning at a phase below T that is drawn anew each epoch, so that the cuts fall elsewhere. Window
    s = n * batch_size + b of the run is window `order[s % W]` of epoch `s // W`.

    Raises: ConfigError with the counts where the split is shorter than one window.
    """

    def __init__(self, split: Split, context_length: int, batch_size: int, seed: int) -> None:
        if split.num_tokens < context_length + 1:
            raise ConfigError(
                f"the {split.name} split has {split.num_tokens:,} tokens in {split.num_documents:,} documents, too few "
                f"for one window of {context_length + 1:,} (train.context_length={context_length} and one behind): "
                f"shorten the context or give more text"
            )
        self.tokens = split.tokens
        self.context_length = context_length
        self.batch_size = batch_size
        self.seed = seed
        spare = split.num_tokens - 1  # tokens that can be a target
        self.windows_per_epoch = max(1, (spare - context_length + 1) // context_length)
        self._num_phases = min(context_length, spare - self.windows_per_epoch * context_length + 1)
        self._epoch = lru_cache(maxsize=2)(self._draw_epoch)

    def batch(self, n: int) -> Batch:
        """Batch `n` of the run."""
        windows = [self.tokens[start : start + self.context_length + 1] for start in self.starts(n)]
        return Batch(np.stack(windows).astype(np.int64))

    def starts(self, n: int) -> list[int]:
        """Where in the split each window of batch `n` begins, [B]."""
        first = n * self.batch_size
        return [self._start(number) for number in range(first, first + self.batch_size)]

    def _start(self, number: int) -> int:
        epoch, place = divmod(number, self.windows_per_epoch)
        phase, order = self._epoch(epoch)
        return phase + int(order[place]) * self.context_length

    def _draw_epoch(self, epoch: int) -> tuple[int, NDArray[np.int64]]:
        # Raw draws of a bit generator are the same in every version of NumPy (NEP 19); shuffles are not promised to be.
        draws = np.random.Philox(np.random.SeedSequence([self.seed, epoch])).random_raw(self.windows_per_epoch + 1)
        return int(draws[-1] % self._num_phases), np.argsort(draws[:-1], kind="stable")


def chained(before: str, batch: Batch) -> str:
    """The digest of the batches up to this one: SHA-256 of that of those before it, empty at first, and its rows."""
    return hashlib.sha256(before.encode() + b"".join(part.tobytes() for part in batch if part is not None)).hexdigest()
