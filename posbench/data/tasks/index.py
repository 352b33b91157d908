"""Find the i-th letter of a word, counted from its start or its end.

    c a b d ? 2 a 4 d 1 c          from the end:  c a b d ? 2 b 4 c 1 d

No problem asks for a number twice, because the second answer could be copied from the first. At every length i is at
most 16, so that only the length of the word is new. With `digits`, i is written in decimal digits and goes up to the
length of the word, so the number is new as well. This is our own definition, after the indexing tasks of Kazemnejad et
al. 2023 (arXiv 2305.19466) and Gopalakrishnan et al. 2025 (arXiv 2509.10534).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from posbench.data.tasks import Task, alphabet


class Index(Task):
    """A word of `length` random letters, a sign, and questions: a number i and the answer, the i-th letter.

    Options: letters, the size of the alphabet; questions per problem, fewer if there are not enough numbers; largest,
    the largest i; digits, the number of decimal digits of i (0 means one token per number).
    """

    version = 2

    def __init__(self, letters: int = 16, questions: int = 8, largest: int = 16, digits: int = 0) -> None:
        self.letters = letters
        self.questions = questions
        self.largest = 10**digits - 1 if digits else largest
        self.digits = digits
        numbers = range(10) if digits else range(1, largest + 1)
        self.tokens = (*alphabet(letters), "?", *map(str, numbers))

    def chance(self, length: int) -> float:
        return 1 / self.letters

    def problems(self, length: int, number: int, rng: np.random.Generator) -> tuple[ArrayLike, ArrayLike]:
        word = rng.integers(self.letters, size=(number, length))
        # Drawn without repetition: the second answer could be copied from the first.
        places = rng.random((number, min(self.largest, length))).argsort(axis=1)[:, : self.questions]  # i - 1
        asked = places.shape[1]
        width = (self.digits or 1) + 1  # tokens of a question: the number, and the answer
        questions = np.empty((number, asked, width), np.int64)
        questions[..., -1] = np.take_along_axis(word, self.place(places), axis=1)
        if self.digits:
            powers = 10 ** np.arange(self.digits)[::-1]
            questions[..., :-1] = self.letters + 1 + (places[..., None] + 1) // powers % 10
        else:
            questions[..., 0] = self.letters + 1 + places
        # One mask for all problems.
        is_answer = np.append(np.zeros(length + 1, bool), np.tile(np.arange(width) == width - 1, asked))
        return np.hstack((word, np.full((number, 1), self.letters), questions.reshape(number, -1))), is_answer

    def place(self, places: np.ndarray) -> np.ndarray:
        """Return the places of letters in the word, counted from 0. `before` is the numbers asked for, less one."""
        return places


class IndexFromEnd(Index):
    """A word, a sign, and questions: a number i and the answer, the i-th letter counted from the end."""

    def place(self, places: np.ndarray) -> np.ndarray:
        return -1 - places
