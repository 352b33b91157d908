"""Multi-query associative recall (Arora et al. 2023, "Zoology", arXiv 2312.04927; its generator `multiquery_ar`).

    k3 v1 k0 v7 k2 v1 . . k0 v7 . . k3 v1 k2 v1 . .

Pairs of a key and its value come first. Then every key comes once more, in slots whose distance from the pairs follows
a power law. As in Zoology, the keys of a problem differ. Unlike there, values may repeat, so that few are enough; empty
slots hold a filler, because random tokens could repeat a pair; a query is followed by its value, as in text; and
training mixes lengths.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from posbench.data.tasks import Task


class Mqar(Task):
    """Pairs of a key and its value, `length` in all, then slots in which each key returns, followed by its value.

    A slot has two tokens, and is filler if it holds no key. The values in slots are the answers. Options: keys and
    values, how many there are; room, slots per pair; power, the exponent a of the power law s^(a - 1) by which slot s =
    1, 2, ... is drawn (1 means uniformly).
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
            raise ValueError(f"{length} pairs need {length} keys, and keys={self.keys}: raise the option keys")
        keys = rng.random((number, self.keys)).argsort(axis=1)[:, :length]
        pairs = np.stack((keys, self.keys + rng.integers(self.values, size=(number, length))), axis=-1)
        # Sorting exponentials with rates w draws without replacement with weights w.
        num_slots = length * self.room
        rates = slot_weights(num_slots, self.power)
        slots = (rng.standard_exponential((number, num_slots)) / rates).argsort(axis=1)[:, :length]
        rows = np.arange(number)[:, None]
        filler = self.keys + self.values  # the last token
        queries = np.full((number, num_slots, 2), filler)
        queries[rows, slots] = pairs
        is_answer = np.zeros((number, length + num_slots, 2), bool)
        is_answer[rows, length + slots, 1] = True
        return np.hstack((pairs, queries)).reshape(number, -1), is_answer.reshape(number, -1)


@lru_cache
def slot_weights(slots: int, power: float) -> NDArray[np.float64]:
    """Return the weight s^(power - 1) of each slot s = 1, 2, ... for a key's return, float64 [slots], nearest first."""
    return np.arange(1, slots + 1, dtype=np.float64) ** (power - 1)
