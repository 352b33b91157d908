"""Define the schemes in which tokens read the few tokens before them."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, sqrt
from typing import Any, ClassVar

import numpy as np

from posbench.reference.definition import Array, Definition, Rows


def convolved(x: Array, w: Array) -> Array:
    """Return `sum_n w[:, n] x[t - n]` for each row t of x [T, C], with weights w [C, width] and zeros before row 0."""
    y = np.zeros_like(x)
    for t in range(len(x)):
        for n in range(min(w.shape[1], t + 1)):
            y[t] += w[:, n] * x[t - n]
    return y


class Canon(Definition):
    """Canon layers: x_t plus a weighted sum of x_t and the tokens before it, by channel (arXiv 2512.17351)."""

    sites: Sequence[str] = ("hidden", "q", "k", "v")
    sizes = ("width",)

    def after_hook(self, site: str, x: Array, positions: Sequence[Any], *h: int) -> Array:
        if site not in self.sites:
            return x
        w = self.weights[f"{site}_weight"]
        if h:
            [head] = h
            if site in ("k", "v"):
                head = head // self.group  # heads of a group share a key head
            # Weights of heads have a row for each head.
            w = w[head, 0]
        return x + convolved(x, w)


class Smear(Definition):
    """Smear: a gated part of the previous token's embedding is added (karpathy/nanochat, nanochat/gpt.py)."""

    sizes = ("channels",)

    def after_hook(self, site: str, x: Array, positions: Sequence[Any], *h: int) -> Array:
        if site != "embed":
            return x
        y, w = np.array(x), self.weights["w"][0]
        # The first token has none before it.
        for t in range(1, len(x)):
            # RMSNorm with torch's float32 epsilon.
            n = x[t] / sqrt(float(x[t] @ x[t]) / len(x[t]) + 2.0**-23)
            gate = self.weights["s"][0] / (1 + exp(-float(w @ n[: len(w)])))
            y[t] += gate * x[t - 1]
        return y


class Inkling(Definition):
    """Inkling: normalised q and k, and a bias of profiles over distances (transformers, models/inkling)."""

    profiles: int = 16
    sizes: ClassVar[Sequence[str]] = ("extent",)

    def gate(self, x: Array, h: int) -> Array:
        return np.asarray(self.weights["W"][h * self.profiles : (h + 1) * self.profiles] @ x)

    def q(self, x: Array, p: Any, h: int) -> Array:
        # Scores are divided by sqrt(D) once more.
        return self._normed(x) * self.weights["q_weight"] / sqrt(self.D)

    def k(self, x: Array, p: Any, h: int) -> Array:
        return self._normed(x) * self.weights["k_weight"]

    def _normed(self, x: Array) -> Array:
        return x / sqrt(float(x @ x) / self.D + 1e-6)

    def bias(self, h: int, t: int, s: int, rows: Rows) -> float:
        distance, P = rows.distance(t, s), self.weights["P"]
        # Distances beyond the table add nothing.
        if distance >= P.shape[1]:
            return 0.0
        return float(rows.gates[h][t] @ P[:, distance])


class InklingConv(Inkling):
    """Inkling with a convolution of keys before their norm, and one of values."""

    sizes = ("extent", "width")

    def after_hook(self, site: str, x: Array, positions: Sequence[Any], *h: int) -> Array:
        if site in ("k", "v"):
            x = x + convolved(x, self.weights[f"{site}_convolution"][h[0] // self.group, 0])
        return super().after_hook(site, x, positions, *h)
