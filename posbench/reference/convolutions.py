"""Define the schemes in which tokens read the few tokens before them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, sqrt
from typing import Any

import numpy as np

from posbench.config import Config
from posbench.reference.definition import Array, Definition


class Canon(Definition):
    """Canon layers: x_t plus a weighted sum of x_t and the tokens before it, by channel (arXiv 2512.17351)."""

    def __init__(
        self,
        config: Config,
        weights: Mapping[str, Array],
        sites: Sequence[str] = ("hidden", "q", "k", "v"),
        width: int = 4,
    ) -> None:
        super().__init__(config, weights)
        self.sites, self.width = sites, width
        self.group = config.model.num_heads // config.model.kv_heads

    def after_hook(self, site: str, x: Array, positions: Sequence[Any], *h: int) -> Array:
        if site not in self.sites:
            return x
        w = self.weights[f"{site}_weight"]
        if h:
            w = w[h[0] // self.group if site in ("k", "v") else h[0], 0]
        y = np.array(x)
        for t in range(len(x)):
            for n in range(min(self.width, t + 1)):
                y[t] += w[:, n] * x[t - n]
        return y


class Smear(Definition):
    """Smear: a gated part of the previous token's embedding is added (karpathy/nanochat, nanochat/gpt.py)."""

    def __init__(self, config: Config, weights: Mapping[str, Array], channels: int = 24) -> None:
        super().__init__(config, weights)

    def after_hook(self, site: str, x: Array, positions: Sequence[Any], *h: int) -> Array:
        if site != "embed":
            return x
        y, w = np.array(x), self.weights["w"][0]
        for t in range(1, len(x)):
            n = x[t] / sqrt(float(x[t] @ x[t]) / len(x[t]) + 2.0**-23)
            y[t] += self.weights["s"][0] / (1 + exp(-float(w @ n[: len(w)]))) * x[t - 1]
        return y
