"""Define the schemes that add to or scale single attention scores, or add to the token embeddings once."""

from __future__ import annotations

from functools import cache
from math import cos, exp, floor, inf, log, sin, sqrt
from typing import Any

import numpy as np

from posbench.reference.definition import Array, Definition, Rows


class Alibi(Definition):
    """ALiBi: the bias `-m_h (i - j)` at distance i - j, with fixed slope m_h of head h (arXiv 2108.12409)."""

    exponents: list[float] | None = None

    def bias(self, h: int, t: int, s: int, rows: Rows) -> float:
        slopes = alibi_slopes(self.config.model.num_heads)
        if self.exponents:
            slopes = [2.0**power for power in self.exponents]
        return -slopes[h] * rows.distance(t, s)


class T5(Definition):
    """T5: a learned bias for each head and bucket of distances (arXiv 1910.10683)."""

    num_buckets: int = 32
    max_distance: int = 128

    def bias(self, h: int, t: int, s: int, rows: Rows) -> float:
        d, n = rows.distance(t, s), self.num_buckets // 2
        bucket = d
        # Half of the buckets hold one distance each. The others hold growing ranges up to `max_distance`, and the last
        # one also holds all longer distances.
        if d >= n:
            wider = n + floor(n * log(d / n) / log(self.max_distance / n))
            bucket = min(self.num_buckets - 1, wider)
        return float(self.weights["table"][bucket, h])


class Kerple(Definition):
    """KERPLE: the bias `-a ln(1 + b d)` at distance d, with a and b > 0 learned per head (arXiv 2205.09921)."""

    def bias(self, h: int, t: int, s: int, rows: Rows) -> float:
        a = softplus(float(self.weights["a"][h]))
        b = softplus(float(self.weights["b"][h]))
        return -a * log(1 + b * rows.distance(t, s))


def softplus(x: float) -> float:
    """Return ln(1 + e^x), a positive number."""
    return log(1 + exp(x))


class Fire(Definition):
    """FIRE: the bias `MLP(ln(1 + c d) / ln(1 + c max(L, i)))` at distance d of query i (arXiv 2310.04418)."""

    sizes = ("hidden",)

    def bias(self, h: int, t: int, s: int, rows: Rows) -> float:
        W = self.weights
        c = softplus(float(W["c"]))
        # L is learned as a multiple of the training length.
        L = softplus(float(W["L"])) * self.config.train.context_length
        share = log(1 + c * rows.distance(t, s)) / log(1 + c * max(L, rows.positions[t]))
        # The MLP: one hidden layer with ReLU.
        hidden = np.maximum(0, W["hidden_weight"][:, 0] * share + W["hidden_bias"])
        return float(W["output_weight"][h] @ hidden + W["output_bias"][h])


class Shaw(Definition):
    """Relative keys: the bias `q_i . a_d / sqrt(D)` at distance d, one learned a for d >= `clip` (arXiv 1803.02155)."""

    clip: int = 16

    def bias(self, h: int, t: int, s: int, rows: Rows) -> float:
        a = self.weights["table"][min(rows.distance(t, s), self.clip)]
        # Another scheme's hook may have appended channels to q.
        return float(rows.queries[h][t][: len(a)] @ a) / sqrt(len(a))


class TransformerXL(Definition):
    """Scores `((q_i + u) . k_j + (q_i + v) . W r_d) / sqrt(D)`, r_d sines, then cosines of d (arXiv 1901.02860)."""

    sizes = ("channels",)

    def q(self, x: Array, p: Any, h: int) -> Array:
        return x + self.weights["content"][h]

    def bias(self, h: int, t: int, s: int, rows: Rows) -> float:
        q, d, W = rows.queries[h][t], rows.distance(t, s), self.weights["matrix"]
        D, channels = len(q), W.shape[1]
        frequencies = [10000 ** (-2 * c / channels) for c in range(channels // 2)]
        r = np.array([sin(d * w) for w in frequencies] + [cos(d * w) for w in frequencies])
        q = q - self.weights["content"][h] + self.weights["position"][h]  # q_i + v: the method q has added u
        return float(q @ W[h * D : (h + 1) * D] @ r) / sqrt(D)


class Fox(Definition):
    """Forgetting gates: the bias `sum_{l=j+1..i} ln sigmoid(w_h . x_l + b_h)` (arXiv 2503.02130)."""

    def gate(self, x: Array, h: int) -> float:
        # ln sigmoid, of a number per token and head.
        return -log(1 + exp(-float(self.weights["w"][h] @ x + self.weights["b"][h])))

    def bias(self, h: int, t: int, s: int, rows: Rows) -> float:
        return float(sum(rows.gates[h][s + 1 : t + 1]))


class Ssmax(Definition):
    """Scalable softmax: queries `s_h ln(i + 1) q_i` at position i, s_h learned (arXiv 2501.19399)."""

    def q(self, x: Array, p: Any, h: int) -> Array:
        return np.asarray(float(self.weights["s"][h]) * log(p + 1) * x)


class Chunked(Definition):
    """Attention in chunks: scores of keys before the query's chunk are minus infinity (Llama 4)."""

    chunk: int

    def bias(self, h: int, t: int, s: int, rows: Rows) -> float:
        # Each chunk begins at a multiple of its length.
        is_same_chunk = rows.positions[t] // self.chunk == rows.positions[s] // self.chunk
        return 0.0 if is_same_chunk else -inf


class LogGrowth(Definition):
    """q_i (1 + slope ln(1 + floor((i + 1) / tokens))) (Llama 4's temperature tuning)."""

    tokens: int
    slope: float = 0.1

    def q(self, x: Array, p: Any, h: int) -> Array:
        return x * (1 + self.slope * log(1 + (p + 1) // self.tokens))


class LogLength(Definition):
    """q_i times the logarithm of i + a to the base a (HyPE's softmax layers)."""

    a: int = 362

    def q(self, x: Array, p: Any, h: int) -> Array:
        return x * log(p + self.a, self.a)


@cache
def alibi_slopes(num_heads: int) -> list[float]:
    """Return ALiBi's slopes of H heads: for H a power of two, the geometric series with start and ratio 2 ** (-8 / H).

    Source: section 3 of arXiv 2108.12409.
    """
    power = 1
    while 2 * power <= num_heads:
        power *= 2
    series = [(2 ** (-8 / power)) ** h for h in range(1, power + 1)]
    if power < num_heads:
        # The series for the power of two below H, then every second entry of the series for the one above.
        series += alibi_slopes(2 * power)[::2][: num_heads - power]
    return series


class Sinusoidal(Definition):
    """Sinusoids: add sin(p / base ** (2i / C)) to channel 2i of C and the cosine to channel 2i + 1, at position p.

    Source: section 3.5 of arXiv 1706.03762. `amplitude` is in standard deviations of the initial token embeddings.
    """

    amplitude: float = 1.0
    base: float = 10000.0

    def embed(self, x: Array, p: int) -> Array:
        return x + self.amplitude * self.config.model.init_std * sinusoids(p, len(x), self.base)


class Learned(Definition):
    """Learned positions: add row p of a table to the embedding at position p; IndexError beyond the table."""

    def embed(self, x: Array, p: int) -> Array:
        return x + self.weights["table"][p]


def sinusoids(position: int, width: int, base: float = 10000.0) -> Array:
    """Return the vector [width] of one position: sines in even channels, cosines in odd ones."""
    vector = np.zeros(width)
    for channel in range(width):
        # Channels 2i and 2i + 1 have one frequency.
        angle = position / base ** ((channel - channel % 2) / width)
        vector[channel] = cos(angle) if channel % 2 else sin(angle)
    return vector
