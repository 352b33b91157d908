"""What a task is: problems with exact answers, drawn from a generator of random numbers at a length in items.

    problems(length, number, rng) -> tokens, is_answer

Many are drawn at once, because NumPy is ten times as fast then. A problem is a sequence of tokens, of which some are
answers: a model reads all of it, and is scored on each answer given the true tokens before it. Everything else
(batches, seeds, schemes, resume, tables) is the framework's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")


class Task(ABC):
    """A subclass names its tokens and draws problems. Its options are its constructor's keyword arguments.

    A class that changes what it draws raises its `version`, so that results of both are never compared.
    """

    version: ClassVar[int] = 1
    tokens: Sequence[str]  # the vocabulary, in the order of the tokens' numbers
    learnt: ClassVar[float] = 0.95  # accuracy at the longest trained length from which a seed has learnt the task

    @abstractmethod
    def problems(self, length: int, number: int, rng: np.random.Generator) -> tuple[ArrayLike, ArrayLike]:
        """`number` problems of `length` items.

        Returns: their tokens, int [number, W], where W follows from the length; and which of them are answers, bool
        [number, W], or [W] for all of them. The first token never is.
        """

    @abstractmethod
    def chance(self, length: int) -> float:
        """The share of answers that is right where the most common answer is always given."""

    def width(self, length: int) -> int:
        """W, the tokens of a problem of `length` items."""
        return int(np.shape(self.problems(length, 1, np.random.default_rng(0))[0])[1])
