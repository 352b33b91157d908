"""Repeat a part of a word at a varied distance (repeated random tokens, Olsson et al. 2022, arXiv 2209.11895).

    5 9 2 7 0 4 > 9 2 7          the part is 9 2 7, and its 2 and 7 are answers

The tokens of a word differ, so the previous token tells which one follows, unlike in copying.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from posbench.data.tasks import Task


class Induction(Task):
    """A word of `length` different tokens, a sign, and a part of the word from anywhere in it.

    Every token of the repeated part but its first is an answer. Options: vocabulary, the number of tokens; part, the
    length of the part (or all of a shorter word).
    """

    version = 2

    def __init__(self, vocabulary: int = 128, part: int = 4) -> None:
        self.vocabulary = vocabulary
        self.part = part
        self.tokens = (*map(str, range(vocabulary)), ">")

    def chance(self, length: int) -> float:
        return 1 / self.vocabulary

    def problems(self, length: int, number: int, rng: np.random.Generator) -> tuple[ArrayLike, ArrayLike]:
        if length > self.vocabulary:
            raise ValueError(
                f"its {length} tokens must differ, and vocabulary={self.vocabulary}: raise the option vocabulary"
            )
        word = rng.random((number, self.vocabulary)).argsort(axis=1)[:, :length]
        part = min(self.part, length)
        start = rng.integers(length - part + 1, size=(number, 1))
        again = np.take_along_axis(word, start + np.arange(part), axis=1)
        tokens = np.hstack((word, np.full((number, 1), self.vocabulary), again))
        return tokens, np.arange(length + 1 + part) > length + 1
