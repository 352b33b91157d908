"""How often does a letter occur? Own definition; the control, because the order of the letters does not matter.

    ^ b a d a d a ? a 3 b 1 c 0 d 2

A count is at most 8 at every length, so that training shows every number and only the length of the word is new.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from posbench.data.tasks.task import LETTERS, Task


class Count(Task):
    """A sign, `length` letters, a sign, and questions: a letter and how often it occurs, which is the answer.

    The counts of the letters that are asked for are drawn evenly from 0 to `largest`, as far as the word has room;
    other letters fill the rest. Options: letters, how many there are; questions a problem; largest, the largest count.
    """

    def __init__(self, letters: int = 16, questions: int = 4, largest: int = 8) -> None:
        self.letters = letters
        self.questions = questions
        self.tokens = (*LETTERS[:letters], "^", "?", *map(str, range(largest + 1)))
        self.largest = largest
        self.chance = 1 / (largest + 1)

    def problem(self, length: int, rng: np.random.Generator) -> tuple[ArrayLike, ArrayLike]:
        order = rng.permutation(self.letters)
        asked, others = order[: self.questions], order[self.questions :]
        word = np.repeat(asked, rng.integers(self.largest + 1, size=self.questions))[:length]
        word = np.concatenate((word, others[rng.integers(len(others), size=length - len(word))]))
        rng.shuffle(word)
        questions = np.empty((self.questions, 2), dtype=np.int64)
        questions[:, 0] = np.sort(asked)
        questions[:, 1] = self.letters + 2 + np.bincount(word, minlength=self.letters)[questions[:, 0]]
        is_answer = np.zeros(length + 2 + questions.size, dtype=bool)
        is_answer[length + 3 :: 2] = True
        return np.concatenate(([self.letters], word, [self.letters + 1], questions.reshape(-1))), is_answer
