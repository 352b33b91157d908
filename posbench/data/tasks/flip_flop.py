"""Recall the bit that was written last: flip-flop (Liu et al. 2023, arXiv 2306.00946, definition 1 and section 4).

    w 1 i 0 i 1 r 1 w 0 i 1 r 0          write, ignore, read, each with a bit; a read returns the bit written last

FFL(p): p is the share of ignored steps. The rest are writes and reads in equal parts; the first step writes, the last
reads. A model trained at p = 0.8 is tested at 0.8, 0.98 (the write is far away) and 0.1 (many writes are near).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from posbench.data.tasks import Task

IGNORE, WRITE, READ = range(3)


class FlipFlop(Task):
    """A sequence of `length` (2 or more) instructions to write, read or ignore a bit; bits that are read are answers.

    Options: ignored, the share of `ignore` instructions.
    """

    version = 2
    tokens = ("i", "w", "r", "0", "1")

    def __init__(self, ignored: float = 0.8) -> None:
        self.ignored = ignored

    def chance(self, length: int) -> float:
        return 1 / 2

    def problems(self, length: int, number: int, rng: np.random.Generator) -> tuple[ArrayLike, ArrayLike]:
        draws = rng.random((number, length))
        # Two draws of the same number: ignore below p, write in the lower half of the rest, read in the upper half.
        step = (draws >= self.ignored).astype(np.int64) + (draws >= (1 + self.ignored) / 2)
        step[:, 0], step[:, -1] = WRITE, READ
        bit = rng.integers(2, size=(number, length))
        last_write = np.maximum.accumulate(np.where(step == WRITE, np.arange(length), 0), axis=1)
        is_read = step == READ
        # A read repeats the bit of the last write.
        bit = np.where(is_read, np.take_along_axis(bit, last_write, axis=1), bit)
        is_answer = np.stack((np.zeros_like(is_read), is_read), axis=-1)
        # In `tokens` the bits come after the three instructions.
        return np.stack((step, 3 + bit), axis=-1).reshape(number, -1), is_answer.reshape(number, -1)
