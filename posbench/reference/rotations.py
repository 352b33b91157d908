"""Schemes that rotate vectors, by explicit matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from math import cos, sin

import numpy as np

from posbench.config import Config
from posbench.reference.definition import Array, Definition


class Rotated(Definition):
    """R_p on the sites q, k, v; its transpose, the way back, on o."""

    def __init__(
        self, config: Config, weights: Mapping[str, Array], sites: Sequence[str], base: float = 10000.0
    ) -> None:
        super().__init__(config, weights)
        self.sites, self.base = tuple(sites), float(base)

    def q(self, x: Array, p: int, h: int) -> Array:
        return rotation(p, len(x), self.base) @ x if "q" in self.sites else x

    def k(self, x: Array, p: int, h: int) -> Array:
        return rotation(p, len(x), self.base) @ x if "k" in self.sites else x

    def v(self, x: Array, p: int, h: int) -> Array:
        return rotation(p, len(x), self.base) @ x if "v" in self.sites else x

    def o(self, x: Array, p: int, h: int) -> Array:
        return rotation(p, len(x), self.base).T @ x if "o" in self.sites else x


@cache
def rotation(position: int, head_dim: int, base: float) -> Array:
    """R_p, [D, D]: block t turns the coordinates (t, t + D/2) by p * base ** (-2t / D) radians."""
    R = np.zeros((head_dim, head_dim))
    for t in range(head_dim // 2):
        angle, u = position * base ** (-2 * t / head_dim), t + head_dim // 2
        R[t, t], R[t, u] = cos(angle), -sin(angle)
        R[u, t], R[u, u] = sin(angle), cos(angle)
    return R
