"""Define the schemes in which position depends on what the tokens are, not only on their indices."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, floor, log1p, sqrt
from typing import Any

import numpy as np

from posbench.reference.biases import alibi_slopes
from posbench.reference.convolutions import convolved
from posbench.reference.definition import Array, Definition, Rows
from posbench.reference.rotations import rotation_by


def frequencies(head_dim: int, base: float) -> Array:
    """Return the D/2 frequencies of RoPE, in radians per token."""
    return np.array([base ** (-2 * t / head_dim) for t in range(head_dim // 2)])


class Cope(Definition):
    """CoPE: the bias `q . e[p] / sqrt(D)`, p summing sigmoid(score) from key to query, e learned (arXiv 2405.18719)."""

    positions: int = 64

    def bias(self, h: int, t: int, s: int, rows: Rows) -> float:
        q, e = rows.queries[h][t], self.weights["e"]
        D = e.shape[1]
        # Every key from s on counts as far as its gate opens.
        gates = 1 / (1 + np.exp(-rows.keys[h][s : t + 1] @ q / sqrt(D)))
        last = self.positions - 1
        p = min(float(sum(gates)), last)
        # Interpolate between the vectors of the two whole positions around p.
        low = floor(p)
        vector = e[low] + (p - low) * (e[min(low + 1, last)] - e[low])
        # Another scheme's hook may have appended channels to q and k.
        return float(q[:D] @ vector) / sqrt(D)


class Dape(Definition):
    """DAPE: ALiBi's bias plus a small network of that bias and the scores of all heads (arXiv 2405.14722)."""

    sizes = ("width",)

    def bias(self, h: int, t: int, s: int, rows: Rows) -> float:
        W, H = self.weights, len(rows.queries)
        # The network reads the scores of all heads and their ALiBi biases.
        a = [-slope * rows.distance(t, s) for slope in alibi_slopes(H)]
        scores = [float(rows.queries[g][t] @ rows.keys[g][s]) / sqrt(self.D) for g in range(H)]
        hidden = W["inner"] @ np.array(scores + a) + W["inner_constant"]
        # LeakyReLU with the slope of the authors' code.
        hidden = np.where(hidden > 0, hidden, 0.01 * hidden)
        return float(a[h] + W["outer"][h] @ hidden + W["outer_constant"][h])


class Path(Definition):
    """PaTH (arXiv 2505.16381): the query is reflected by each token after the key, in turn, its own token first."""

    sizes = ("rank", "convolution")

    def gates(self, x: Array, h: int) -> list[Array]:
        W = self.weights
        # Heads that share a key head share its reflections.
        key_head = h // self.group
        channels = slice(key_head * self.D, (key_head + 1) * self.D)
        w = x @ (W["B"][channels] @ W["A"]).T
        if "convolution" in W:
            w = convolved(w, W["convolution"][channels])
            # SiLU.
            w = w / (1 + np.exp(-w))
        reflections = []
        for direction, token in zip(w, x, strict=True):
            b = 2 / (1 + np.exp(-(W["u"][key_head] @ token + W["c"][key_head])))
            # 1 - b w w^T for the unit vector w along `direction`.
            reflections.append(np.eye(self.D) - b * np.outer(direction, direction) / float(direction @ direction))
        return reflections

    def bias(self, h: int, t: int, s: int, rows: Rows) -> float:
        q = rows.queries[h][t]
        # The query's own token first.
        for between in range(t, s, -1):
            q = rows.gates[h][between] @ q
        # The plain score is added outside, so only what the reflections change is the bias.
        return float(rows.keys[h][s] @ (q - rows.queries[h][t])) / sqrt(self.D)


class SelectiveRope(Definition):
    """Selective RoPE: q and k are rotated by angles that sum a term of every token so far (arXiv 2511.17388)."""

    base: float = 500000.0
    sizes = ("rank", "convolution")

    def pairs(self, h: int) -> slice:
        """Return the pairs of the key head of head h."""
        key_head, half = h // self.group, self.D // 2
        return slice(key_head * half, (key_head + 1) * half)

    def gates(self, x: Array, h: int) -> list[Array]:
        W, head_slice = self.weights, self.pairs(h)
        angles = np.stack([W["u"][head_slice] @ (W["V"] @ token) / sqrt(float(token @ token)) for token in x])
        if "convolution" in W:
            angles = convolved(angles, W["convolution"][head_slice])
        return list(angles)

    def locate(self, p: int, gates: Sequence[Any], h: int) -> Array:
        speed = np.exp(self.weights["b"][self.pairs(h)])
        # Every token so far adds its angles.
        return np.asarray(frequencies(self.D, self.base) * (p * speed + np.sum(gates, axis=0)))

    def q(self, x: Array, p: Any, h: int) -> Array:
        return rotation_by(tuple(p), len(x)) @ x

    k = q


class SelectiveQkvoRope(SelectiveRope):
    """Selective RoPE that also rotates values, and the attention output by the inverse (arXiv 2606.24975)."""

    v = SelectiveRope.k

    def o(self, x: Array, p: Any, h: int) -> Array:
        return rotation_by(tuple(p), len(x)).T @ x


class Repo(Definition):
    """RePo: q and k are rotated by a position computed from the token's hidden state (arXiv 2512.14391)."""

    base: float = 500000.0
    sizes = ("width",)

    def gate(self, x: Array, h: int) -> float:
        gate, content = self.weights["G"] @ x, self.weights["A"] @ x
        return float(self.weights["u"][h // self.group] @ (gate / (1 + np.exp(-gate)) * content))

    def locate(self, p: int, gates: Sequence[Any], h: int) -> Array:
        # The computed position replaces the index p.
        return np.asarray(gates[-1] * frequencies(self.D, self.base))

    def q(self, x: Array, p: Any, h: int) -> Array:
        return rotation_by(tuple(p), len(x)) @ x

    k = q


class GrapeAp(Definition):
    """GRAPE-AP: ALiBi's slope times a sum of ln sigmoid(query . token) over tokens after the key (arXiv 2512.07805)."""

    width: int = 8

    def gate(self, x: Array, h: int) -> Array:
        return np.asarray(self.weights["W"][h * self.width : (h + 1) * self.width] @ x)

    def bias(self, h: int, t: int, s: int, rows: Rows) -> float:
        P, slope = self.width, alibi_slopes(len(rows.queries))[h]
        total = 0.0
        for between in range(s + 1, t + 1):
            # R_l n(p_l): every pair of channels turns by l radians.
            p = rows.gates[h][between]
            angles = (float(rows.positions[between]),) * (P // 2)
            # torch's rms_norm adds the epsilon of the number format to the mean square.
            turned = rotation_by(angles, P) @ p / sqrt(float(p @ p) / P + np.finfo(float).eps)
            total += slope * -log1p(exp(-float(rows.gates[h][t] @ turned) / P))
        return total
