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

    def __init__(self, keys: int = 64, values: int = 16, room: int = 2, power: float = 0.01) -> None:
        self.keys = keys
        self.values = values
        self.room = room
        self.power = power
        self.tokens = (*(f"k{n}" for n in range(keys)), *(f"v{n}" for n in range(values)), ".")
        self.chance = 1 / values

    def problem(self, length: int, rng: np.random.Generator) -> tuple[ArrayLike, ArrayLike]:
        if length > self.keys:
            raise ValueError(f"{length} pairs need as many keys, and there are {self.keys}: raise the option keys")
        pairs = np.empty((length, 2), dtype=np.int64)
        pairs[:, 0] = rng.permutation(self.keys)[:length]
        pairs[:, 1] = self.keys + rng.integers(self.values, size=length)
        # The order of exponentials with rates w is that of draws without replacement with weights w.
        waits = rng.standard_exponential(length * self.room) / slot_weights(length * self.room, self.power)
        slots = np.argsort(waits)[:length]
        queries = np.full((length * self.room, 2), self.keys + self.values)
        queries[slots] = pairs
        is_answer = np.zeros((length + len(queries), 2), dtype=bool)
        is_answer[length + slots, 1] = True
        return np.concatenate((pairs, queries)).reshape(-1), is_answer.reshape(-1)


@lru_cache
def slot_weights(slots: int, power: float) -> NDArray[np.float64]:
    """Zoology's power law over slots, nearest first, not normalised."""
    return np.arange(1, slots + 1, dtype=np.float64) ** (power - 1)
