"""Schemes that add to the scores, entry by entry."""

from __future__ import annotations

from functools import cache

from posbench.reference.definition import Array, Definition, Gates


class Alibi(Definition):
    """`-m_h (i - j)`."""

    def bias(self, h: int, i: int, j: int, q: Array, gates: Gates) -> float:
        return -alibi_slopes(self.config.model.num_heads)[h] * (i - j)


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
