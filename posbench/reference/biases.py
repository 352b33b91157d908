"""Schemes that add to the scores, entry by entry."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from math import exp, floor, log

from posbench.config import Config
from posbench.reference.definition import Array, Definition, Gates


class Alibi(Definition):
    """`-m_h (i - j)`."""

    def bias(self, h: int, i: int, j: int, q: Array, gates: Gates) -> float:
        return -alibi_slopes(self.config.model.num_heads)[h] * (i - j)


class T5(Definition):
    """A learned number of the head for each bucket of distances (arXiv 1910.10683).

    Half the buckets hold one distance each, the others ever wider ranges up to `max_distance`; beyond it is the last.
    """

    def __init__(
        self, config: Config, weights: Mapping[str, Array], num_buckets: int = 32, max_distance: int = 128
    ) -> None:
        super().__init__(config, weights)
        self.exact, self.last, self.max_distance = num_buckets // 2, num_buckets - 1, max_distance

    def bias(self, h: int, i: int, j: int, q: Array, gates: Gates) -> float:
        d, n = i - j, self.exact
        wider = n + floor(n * log(d / n) / log(self.max_distance / n)) if d >= n else 0
        return float(self.weights["table"][d if d < n else min(self.last, wider), h])


class Kerple(Definition):
    """`-a ln(1 + b d)` (arXiv 2205.09921)."""

    def bias(self, h: int, i: int, j: int, q: Array, gates: Gates) -> float:
        a, b = (softplus(float(self.weights[name][h])) for name in "ab")
        return -a * log(1 + b * (i - j))


def softplus(x: float) -> float:
    """A positive number for any: ln(1 + e^x)."""
    return log(1 + exp(x))


@cache
def alibi_slopes(num_heads: int) -> list[float]:
    """Section 3 of arXiv 2108.12409: the geometric series from 2 ** (-8 / H) with that ratio, for H a power of two.

    Otherwise the series of the power of two below, then every second entry of the series of the power of two above.
    """
    power = 1
    while 2 * power <= num_heads:
        power *= 2
    series = [(2 ** (-8 / power)) ** h for h in range(1, power + 1)]
    return series if power == num_heads else series + alibi_slopes(2 * power)[::2][: num_heads - power]
