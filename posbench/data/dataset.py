"""Define the data that a model learns from and is scored on: `Dataset`, which `Corpus` and `Problems` extend."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

from tokenizers import Tokenizer

from posbench.config import TrainConfig


class Batch(NamedTuple):
    """The B token sequences of one training step: NumPy arrays on the host, later tensors on the device."""

    tokens: Any  # [B, T + 1] int64
    answers: Any = None  # [B, T] int64, the next token if it is an answer, else -1; None means all tokens are scored
    positions: Any = None  # [B, T] int64, positions of the inputs; None means 0, 1, 2, ...

    @property
    def inputs(self) -> Any:
        """Return the tokens that the model reads, [B, T]."""
        return self.tokens[:, :-1]

    @property
    def targets(self) -> Any:
        """Return the tokens to predict, [B, T], with -1 for tokens that are not scored."""
        return self.tokens[:, 1:] if self.answers is None else self.answers

    def each(self, function: Callable[[Any], Any]) -> Batch:
        """Return a batch with `function` applied to each part that is not None."""
        parts = [None if part is None else function(part) for part in self]
        return Batch(*parts)

    def chunks(self, number: int) -> list[Batch]:
        """Return this batch split into `number` batches with equally many sequences each."""
        parts = [number * [None] if part is None else part.chunk(number) for part in self]
        return [Batch(*rows) for rows in zip(*parts, strict=True)]


class Batches(Protocol):
    """Interface to the training batches of one run, each found by its number."""

    def batch(self, n: int) -> Batch:
        """Return batch `n`, which depends on the seed, `n` and the dataset only."""


@dataclass(eq=False)
class Dataset(ABC):
    """Base class of the data that a model learns: tokenized text or the problems of a task."""

    unit: ClassVar[str]  # a loss is the mean over this: token or answer

    # `Split` (text) or `ProblemSplit` (tasks) by name. Their `num_tokens` is None if the data never ends.
    splits: Mapping[str, Any]
    fingerprint: str  # hash of the text of all splits, or of the task, its version and its options
    tokenizer_fingerprint: str
    vocab_size: int
    bos_id: int | None  # the token that begins documents; None if there are no documents
    overlap: Mapping[str, Any]  # how much of the held-out text also occurs in train (`posbench.data.text.overlap`)

    @property
    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the vocabulary, which is stored with each run."""

    @abstractmethod
    def batches(self, train: TrainConfig, seed: int) -> Batches:
        """Return the training batches of a run. Raises: ConfigError if there is too little data for one batch."""

    def window(self, length: int) -> int:
        """Return T, the tokens that the model reads when `length` (tokens, or items of a task) is scored."""
        return length

    def with_options(self, config: Any) -> Dataset:
        """Return the dataset with options changed for evaluation, under the same fingerprint; text returns itself.

        Raises: ConfigError if the options change the tokens.
        """
        return self


def chained(previous: str, batch: Batch) -> str:
    """Return the SHA-256 of `previous` (the digest of the earlier batches, "" at first) and this batch."""
    content = b"".join(part.tobytes() for part in batch if part is not None)
    return hashlib.sha256(previous.encode() + content).hexdigest()
