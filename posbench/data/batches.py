"""Draw the batches of training: batch `n` is a pure function of the seed, `n` and the tokens.

A loader without state has nothing to save and nothing that a scheme could disturb, so resuming is exact.
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
    """The sequences of one step, one per row: NumPy arrays on the host, then tensors on the device."""

    tokens: Any  # [B, T + 1] int64
    answers: Any = (
        None  # [B, T] int64, the next token if it is an answer, else -1; None means that every token is scored
    )
    positions: Any = None  # [B, T] int64, positions of the inputs; None means 0, 1, 2, ...

    @property
    def inputs(self) -> Any:
        """Return the tokens that the model reads, [B, T]."""
        return self.tokens[:, :-1]

    @property
    def targets(self) -> Any:
        """Return the tokens to predict, [B, T], with -1 for those that are not scored."""
        return self.tokens[:, 1:] if self.answers is None else self.answers

    def each(self, function: Callable[[Any], Any]) -> Batch:
        """Return a batch with `function` applied to every part that is not None."""
        return Batch(*(None if part is None else function(part) for part in self))

    def chunks(self, number: int) -> list[Batch]:
        """Split the tensors into `number` batches with equally many rows."""
        parts = [number * [None] if part is None else part.chunk(number) for part in self]
        return [Batch(*rows) for rows in zip(*parts, strict=True)]


class Batches:
    """Windows of `context_length + 1` tokens of a split: all of them once per epoch, in an order drawn from the seed.

    An epoch cuts the whole stream (documents one after another, each with its BOS) into W windows of T + 1 tokens that
    begin T tokens apart. The first begins at a phase below T, drawn for each epoch, so that the cuts move. Window
    s = n * batch_size + b of the run is window `order[s % W]` of epoch `s // W`.

    Raises: ConfigError with the counts if the split is shorter than one window.
    """

    def __init__(self, split: Split, context_length: int, batch_size: int, seed: int) -> None:
        if split.num_tokens < context_length + 1:
            raise ConfigError(
                f"the {split.name} split has {split.num_tokens:,} tokens in {split.num_documents:,} documents, too few "
                f"for one window of {context_length + 1:,} (train.context_length={context_length} and one more): "
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
        """Return batch `n` of the run."""
        windows = [self.tokens[start : start + self.context_length + 1] for start in self.starts(n)]
        return Batch(np.stack(windows).astype(np.int64))

    def starts(self, n: int) -> list[int]:
        """Return the index in the split at which each window of batch `n` begins, [B]."""
        first = n * self.batch_size
        return [self._start(number) for number in range(first, first + self.batch_size)]

    def _start(self, number: int) -> int:
        epoch, place = divmod(number, self.windows_per_epoch)
        phase, order = self._epoch(epoch)
        return phase + int(order[place]) * self.context_length

    def _draw_epoch(self, epoch: int) -> tuple[int, NDArray[np.int64]]:
        # NumPy promises that raw draws of a bit generator never change (NEP 19), but not that shuffles do not.
        draws = np.random.Philox(np.random.SeedSequence([self.seed, epoch])).random_raw(self.windows_per_epoch + 1)
        return int(draws[-1] % self._num_phases), np.argsort(draws[:-1], kind="stable")


def chained(before: str, batch: Batch) -> str:
    """Return the SHA-256 of the previous digest ("" at first) and this batch."""
    return hashlib.sha256(before.encode() + b"".join(part.tobytes() for part in batch if part is not None)).hexdigest()
