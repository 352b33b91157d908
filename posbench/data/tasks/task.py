"""What a task is: problems with exact answers, drawn from a generator of random numbers at a length in items.

    problem(length, rng) -> tokens, is_answer

A problem is a sequence of tokens, of which some are answers: a model reads all of it, and is scored on each answer
given the true tokens before it. Everything else (batches, seeds, schemes, resume, tables) is the framework's.
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
    chance: float  # the share of answers that guessing gets right
    learnt: ClassVar[float] = 0.95  # accuracy at the longest trained length from which a seed has learnt the task

    @abstractmethod
    def problem(self, length: int, rng: np.random.Generator) -> tuple[ArrayLike, ArrayLike]:
        """One problem of `length` items.

        Returns: its tokens, int [W], and which of them are answers, bool [W]; the first token never is.
        """

    def width(self, length: int) -> int:
        """W, the most tokens of a problem of `length` items: what batches are padded to, on the right.

        By default that of one problem: a task whose problems of one length differ in tokens overrides it.
        """
        return len(np.asarray(self.problem(length, np.random.default_rng(0))[0]))
