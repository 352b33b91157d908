"""Count how often a letter occurs. Our own definition, and the control: the order of the letters does not matter.

    ^ b a d a d a ? a 3 b 1 c 0 d 2

Counts are at most 8 at every length, so that training shows every number and only the length of the word is new.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from posbench.data.tasks import Task, alphabet


class Count(Task):
    """A sign, a word of `length` letters, a sign, and questions: a letter and the answer, how often it occurs.

    Counts of the letters in the questions are uniform from 0 to `largest`, as far as the word has room. Other letters
    fill the rest. Options: letters, the size of the alphabet; questions, their number per problem; largest, the largest
    count.
    """

    version = 2

    def __init__(self, letters: int = 16, questions: int = 4, largest: int = 8) -> None:
        if questions >= letters:
            raise ValueError(f"questions={questions} must be less than letters={letters}")
        self.letters = letters
        self.questions = questions
        self.tokens = (*alphabet(letters), "^", "?", *map(str, range(largest + 1)))
        self.largest = largest

    def chance(self, length: int) -> float:
        """Return the accuracy of always answering 0 for words of `length` letters."""
        even = np.full(self.largest + 1, 1 / (self.largest + 1))
        used = np.ones(1)  # distribution of the number of letters used up by earlier questions
        share_after_full = 0.0  # of the questions whose letter finds the word full, so that its count is 0
        for _ in range(self.questions):
            share_after_full += used[length:].sum() / self.questions
            used = np.convolve(used, even)
        return float(even[0] + (1 - even[0]) * share_after_full)

    def problems(self, length: int, number: int, rng: np.random.Generator) -> tuple[ArrayLike, ArrayLike]:
        order = rng.random((number, self.letters)).argsort(axis=1)  # letters of the questions first
        # Question n's letter fills the places from the end of the previous one up to ends[:, n].
        ends = rng.integers(self.largest + 1, size=(number, self.questions)).cumsum(axis=1)
        ranks = (np.arange(length)[:, None] >= ends[:, None]).sum(axis=-1)  # indices into `order`
        fillers = rng.integers(self.questions, self.letters, size=(number, length))
        ranks = np.where(ranks < self.questions, ranks, fillers)
        word = rng.permuted(np.take_along_axis(order, ranks, axis=1), axis=1)
        asked = np.sort(order[:, : self.questions], axis=1)
        counts = (word[:, None] == asked[..., None]).sum(axis=-1)
        questions = np.stack((asked, self.letters + 2 + counts), axis=-1).reshape(number, -1)
        first, sign = np.full((number, 1), self.letters), np.full((number, 1), self.letters + 1)
        # Questions begin at `length + 2`, and every second of their tokens is an answer.
        is_answer = np.arange(length + 2 + 2 * self.questions) % 2 == (length + 1) % 2
        is_answer[: length + 2] = False
        return np.hstack((first, word, sign, questions)), is_answer
