"""What each kind of attention is: one head, one query at a time, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp, sqrt
from typing import Any

import numpy as np

from posbench.reference.definition import Array, Definition, Gates

# (definition of the scheme, q, k, v [T, D] before the hooks, stream x [T, C], positions, head) -> o [T, D]
Kind = Callable[[Definition, Array | None, Array | None, Array, Array, Sequence[int], int], Array]


def softmax_weights(scores: Sequence[float]) -> Array:
    """exp(s) / sum exp(s) of the scores that one query may see."""
    e = np.exp(np.array(scores) - max(scores))
    return np.asarray(e / e.sum())


def softmax(
    scheme: Definition, q: Array | None, k: Array | None, v: Array, x: Array, positions: Sequence[int], h: int
) -> Array:
    """`o_i = sum_j a_ij v_j`, where a_i. is the softmax over j <= i of `q_i . k_j / sqrt(D) + bias_ij`."""
    assert q is not None and k is not None
    D = q.shape[1]
    gates = gates_of(scheme, x, positions, h)
    queries = [scheme.q(q[t], p, h) for t, p in enumerate(positions)]
    keys = [scheme.k(k[t], p, h) for t, p in enumerate(positions)]
    values = np.stack([scheme.v(v[t], p, h) for t, p in enumerate(positions)])
    rows = []
    for t, i in enumerate(positions):
        products = np.stack(keys[: t + 1]) @ queries[t] / sqrt(D)
        biases = [scheme.bias(h, i, j, queries[t], gates) for j in positions[: t + 1]]
        weights = softmax_weights(products + np.array(biases))
        rows.append(scheme.o(weights @ values[: t + 1], i, h))
    return np.stack(rows)


def linear(
    scheme: Definition, q: Array | None, k: Array | None, v: Array, x: Array, positions: Sequence[int], h: int
) -> Array:
    """`o_i = sum_j (R phi(q_i) . R phi(k_j)) e^bias v_j / sum_j phi(q_i) . phi(k_j) e^bias` over j <= i."""
    assert q is not None and k is not None
    gates = gates_of(scheme, x, positions, h)
    q, k = elu(q) + 1, elu(k) + 1
    rows = []
    for t, i in enumerate(positions):
        turned = scheme.q(q[t], i, h)
        above, below = np.zeros(v.shape[1]), 0.0
        for s, j in enumerate(positions[: t + 1]):
            e = exp(scheme.bias(h, i, j, turned, gates))
            above = above + (turned @ scheme.k(k[s], j, h)) * e * scheme.v(v[s], j, h)
            below = below + (q[t] @ k[s]) * e
        rows.append(scheme.o(above / below, i, h))
    return np.stack(rows)


def elu(x: Array) -> Array:
    """x above 0, e^x - 1 below."""
    return np.array([[y if y >= 0 else exp(y) - 1 for y in row] for row in x])


def decay(
    scheme: Definition,
    q: Array | None,
    k: Array | None,
    v: Array,
    x: Array,
    positions: Sequence[int],
    h: int,
    normalise: bool = False,
) -> Array:
    """`o_i = sum_j e^bias v_j` over j <= i, divided by the sum of the weights where that is asked for."""
    gates = gates_of(scheme, x, positions, h)
    nothing = np.zeros(v.shape[1])  # there are no queries
    rows = []
    for i in positions:
        o, total = nothing, 0.0
        for s, j in enumerate(positions):
            if j <= i:
                e = exp(scheme.bias(h, i, j, nothing, gates))
                o, total = o + e * scheme.v(v[s], j, h), total + e
        rows.append(scheme.o(o / total if normalise else o, i, h))
    return np.stack(rows)


def gates_of(scheme: Definition, x: Array, positions: Sequence[int], h: int) -> Gates:
    """What the scheme's gate gives for the token at each position, none where it has no gate."""
    none = np.zeros(0)
    gates = {p: scheme.gate(x[t], h) for t, p in enumerate(positions)}
    return lambda p: none if (gate := gates[p]) is None else gate


KINDS: dict[str, Callable[..., Array]] = {"softmax": softmax, "linear": linear, "decay": decay}


def options_of(attention: dict[str, Any]) -> dict[str, Any]:
    """The options of the kind itself: what is not its name, nor where its values come from."""
    return {name: value for name, value in attention.items() if name not in ("kind", "shared_kv")}
