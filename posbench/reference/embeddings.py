"""Schemes that add position once, to the token embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from math import cos, sin

import numpy as np

from posbench.config import Config
from posbench.reference.definition import Array, Definition


class Sinusoidal(Definition):
    """Section 3.5 of arXiv 1706.03762: channel 2i is sin(p / base ** (2i / C)), channel 2i + 1 the cosine.

    `amplitude` in standard deviations of the token embeddings at initialisation.
    """

    def __init__(
        self, config: Config, weights: Mapping[str, Array], amplitude: float = 1.0, base: float = 10000.0
    ) -> None:
        super().__init__(config, weights)
        self.size, self.base = float(amplitude) * config.model.init_std, float(base)

    def embed(self, x: Array, p: int) -> Array:
        return x + self.size * sinusoids(p, len(x), self.base)


class Learned(Definition):
    """Row p of the table; none beyond it."""

    def embed(self, x: Array, p: int) -> Array:
        return x + self.weights["table"][p]


def sinusoids(position: int, width: int, base: float = 10000.0) -> Array:
    """The sines and cosines of one position, [C]."""
    angles = [position / base ** ((channel - channel % 2) / width) for channel in range(width)]
    return np.array([cos(angle) if channel % 2 else sin(angle) for channel, angle in enumerate(angles)])
