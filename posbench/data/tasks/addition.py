"""The sum of two numbers (the question of McLeish et al. 2024, "abacus embeddings", arXiv 2405.17399).

    5 7 + 6 8 = 1 2 5          least digit first:  7 5 + 8 6 = 5 2 1

With the least digit first a carry is known when it is needed; in the usual order it has to be looked ahead for.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from posbench.data.tasks.task import Task

PLUS, EQUALS = 10, 11


class Addition(Task):
    """Two numbers of `length` digits, drawn evenly, and their sum of `length` + 1, the answers; zeros in front stay.

    Options: least_first, whether each number begins with its least digit.
    """

    tokens = (*map(str, range(10)), "+", "=")
    chance = 0.1

    def __init__(self, least_first: bool = True) -> None:
        self.least_first = least_first

    def problem(self, length: int, rng: np.random.Generator) -> tuple[ArrayLike, ArrayLike]:
        digits = (rng.integers(10, size=2 * length, dtype=np.uint8) + ord("0")).tobytes()
        first, second = digits[:length], digits[length:]
        total = b"%0*d" % (length + 1, int(first) + int(second))
        step = -1 if self.least_first else 1
        text = first[::step] + b":" + second[::step] + b";" + total[::step]  # in ASCII the two follow the digits
        tokens = np.frombuffer(text, dtype=np.uint8).astype(np.int64) - ord("0")
        return tokens, np.arange(len(tokens)) > 2 * length + 1
