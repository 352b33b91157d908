"""Copy a word of few letters, or spell it backwards (Kazemnejad et al. 2023, arXiv 2305.19466, section 4).

    a c a b = a c a b          reverse:  a c a b = b a c a

Letters repeat, so the previous letter does not determine the next one: the model has to find the position.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from posbench.data.tasks import Task, alphabet


class Copy(Task):
    """A word of `length` random letters, the sign `=`, and the same letters again, which are the answers.

    Options: letters, the size of the alphabet, from 1 to 26.
    """

    version = 2
    step = 1

    def __init__(self, letters: int = 16) -> None:
        self.letters = letters
        self.tokens = (*alphabet(letters), "=")

    def chance(self, length: int) -> float:
        return 1 / self.letters

    def problems(self, length: int, number: int, rng: np.random.Generator) -> tuple[ArrayLike, ArrayLike]:
        word = rng.integers(self.letters, size=(number, length))
        sign = np.full((number, 1), self.letters)
        is_answer = np.arange(2 * length + 1) > length  # everything after the sign
        return np.hstack((word, sign, word[:, :: self.step])), is_answer


class Reverse(Copy):
    """A word of `length` random letters, the sign `=`, and the same letters in reverse order, which are the answers."""

    step = -1
