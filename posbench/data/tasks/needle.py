"""Find the value of a key at some depth of filler (Hsieh et al. 2024, "RULER", arXiv 2404.06654).

    c a d a K2 b c c a ? K2 b          depth 4/7 of 7 letters

The value is a letter like the filler, so only the key before it tells which letter is meant.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from posbench.data.tasks import Task, alphabet


class Needle(Task):
    """A word of `length` random letters that contains a key and its value, a sign, the key, and its value, the answer.

    Options: letters and keys, how many there are; depth, the share of letters before the key (None means drawn).
    """

    version = 2

    def __init__(self, letters: int = 16, keys: int = 8, depth: float | None = None) -> None:
        self.letters = letters
        self.keys = keys
        self.depth = depth
        self.tokens = (*alphabet(letters), *(f"K{n}" for n in range(keys)), "?")

    def chance(self, length: int) -> float:
        return 1 / self.letters

    def problems(self, length: int, number: int, rng: np.random.Generator) -> tuple[ArrayLike, ArrayLike]:
        # Besides the word: the key and its value, and at the end the sign, the key and its value.
        tokens = rng.integers(self.letters, size=(number, length + 5))
        place = rng.integers(length + 1, size=number)
        if self.depth is not None:
            place[:] = round(self.depth * length)
        rows = np.arange(number)
        tokens[rows, place] = tokens[:, -2] = self.letters + rng.integers(self.keys, size=number)
        tokens[:, -3] = self.letters + self.keys  # the sign
        tokens[:, -1] = tokens[rows, place + 1]  # the letter after the key is its value
        return tokens, np.arange(length + 5) == length + 4
