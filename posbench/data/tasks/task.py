"""Define a task: problems with exact answers, drawn by a random generator at a length in items.

    problems(length, number, rng) -> tokens, is_answer

A model reads all tokens of a problem and is scored on each answer, given the true tokens before it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")


def alphabet(size: int) -> tuple[str, ...]:
    """Return the first `size` letters. Raises: ValueError unless `size` is a whole number from 1 to 26."""
    if not isinstance(size, int) or not 1 <= size <= len(LETTERS):
        raise ValueError(f"letters must be a whole number from 1 to {len(LETTERS)}")
    return LETTERS[:size]


class Task(ABC):
    """Base class of tasks: a subclass names its tokens and draws problems; its options are keyword arguments.

    A class that changes what it draws must raise its `version`, so that old and new results are never compared.
    """

    version: ClassVar[int] = 1
    tokens: Sequence[str]  # the vocabulary, in the order of the token ids
    learnt: ClassVar[float] = 0.95  # accuracy at the longest trained length from which a run has learnt the task

    @abstractmethod
    def problems(self, length: int, number: int, rng: np.random.Generator) -> tuple[ArrayLike, ArrayLike]:
        """Draw `number` random problems of `length` items each, and return their tokens and answers.

        Returns: tokens, int [number, W], with a W that depends only on the length; and a mask of the answers, bool
        [number, W], or [W] if all problems have the same. The first token is never an answer.
        """

    @abstractmethod
    def chance(self, length: int) -> float:
        """Return the accuracy, from 0 to 1, of always giving the most common answer at this length."""

    def width(self, length: int) -> int:
        """Return W, the number of tokens of a problem of `length` items."""
        return int(np.shape(self.problems(length, 1, np.random.default_rng(0))[0])[1])
