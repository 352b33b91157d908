"""Multi-query associative recall (Arora et al. 2023, "Zoology", arXiv 2312.04927; its generator `multiquery_ar`).

    k3 v1 k0 v7 k2 v1 . . k0 v7 . . k3 v1 k2 v1 . .

Pairs of a key and its value, then every key once more, in slots whose distance from the pairs follows a power law. As
there, the keys of a problem differ. Here values may repeat, so that few are enough; empty slots hold a filler (random
tokens there could write a pair anew); a query is followed by its value, as in text; and lengths are mixed in training.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from posbench.data.tasks.task import Task


class Mqar(Task):
    """`length` pairs, then slots of two tokens: in `length` of them a key of a pair and its value, which is the answer.

    Options: keys and values, how many there are; room, slots for each pair; power, a of the power law s^(a - 1) by
    which slot s = 1, 2, ... is drawn (1: evenly).
    """

    version = 2

    def __init__(self, keys: int = 64, values: int = 16, room: int = 2, power: float = 0.01) -> None:
        self.keys = keys
        self.values = values
        self.room = room
        self.power = power
        self.tokens = (*(f"k{n}" for n in range(keys)), *(f"v{n}" for n in range(values)), ".")

    def chance(self, length: int) -> float:
        return 1 / self.values

    def problems(self, length: int, number: int, rng: np.random.Generator) -> tuple[ArrayLike, ArrayLike]:
        if length > self.keys:
            raise ValueError(f"{length} pairs need as many keys, and there are {self.keys}: raise the option keys")
        keys = rng.random((number, self.keys)).argsort(axis=1)[:, :length]
        pairs = np.stack((keys, self.keys + rng.integers(self.values, size=(number, length))), axis=-1)
        # The order of exponentials with rates w is that of draws without replacement with weights w.
        size = (number, length * self.room)
        slots = (rng.standard_exponential(size) / slot_weights(size[1], self.power)).argsort(axis=1)[:, :length]
        rows = np.arange(number)[:, None]
        queries = np.full((*size, 2), self.keys + self.values)
        queries[rows, slots] = pairs
        is_answer = np.zeros((number, length + size[1], 2), bool)
        is_answer[rows, length + slots, 1] = True
        return np.hstack((pairs, queries)).reshape(number, -1), is_answer.reshape(number, -1)


@lru_cache
def slot_weights(slots: int, power: float) -> NDArray[np.float64]:
    """Zoology's power law over slots, nearest first, not normalised."""
    return np.arange(1, slots + 1, dtype=np.float64) ** (power - 1)
