"""Add two numbers (the task of McLeish et al. 2024, "abacus embeddings", arXiv 2405.17399).

    5 7 + 6 8 = 1 2 5          least digit first:  7 5 + 8 6 = 5 2 1

With the least digit first, a carry is known when it is needed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from posbench.data.tasks import Task

PLUS, EQUALS = 10, 11


class Addition(Task):
    """Two uniform numbers of `length` digits and their sum of `length` + 1 digits, the answers, with leading zeros.

    Options: least_first, whether each number begins with its least digit.
    """

    version = 2
    tokens = (*map(str, range(10)), "+", "=")

    def __init__(self, least_first: bool = True) -> None:
        self.least_first = least_first

    def chance(self, length: int) -> float:
        """Return the accuracy of always answering 0 for numbers of `length` digits."""
        # Each digit of the sum is 0 in a tenth of problems, but the highest is 0 unless there is a carry.
        return (length / 10 + (1 + 0.1**length) / 2) / (length + 1)

    def problems(self, length: int, number: int, rng: np.random.Generator) -> tuple[ArrayLike, ArrayLike]:
        first, second = rng.integers(10, size=(2, number, length))  # least digit first
        total = np.pad(first + second, ((0, 0), (0, 1)))
        # Carries, from the least digit on.
        for place in range(length):
            total[:, place + 1] += total[:, place] // 10
        step = 1 if self.least_first else -1  # -1 turns the digits around
        plus, equals = np.full((number, 1), PLUS), np.full((number, 1), EQUALS)
        tokens = np.hstack((first[:, ::step], plus, second[:, ::step], equals, total[:, ::step] % 10))
        equals_at = 2 * length + 1
        return tokens, np.arange(3 * length + 3) > equals_at
