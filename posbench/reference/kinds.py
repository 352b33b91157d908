"""What each kind of attention is: one head, one query at a time, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt
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


def gates_of(scheme: Definition, x: Array, positions: Sequence[int], h: int) -> Gates:
    """What the scheme's gate gives for the token at each position, none where it has no gate."""
    none = np.zeros(0)
    gates = {p: scheme.gate(x[t], h) for t, p in enumerate(positions)}
    return lambda p: none if (gate := gates[p]) is None else gate


KINDS: dict[str, Callable[..., Array]] = {"softmax": softmax}


def options_of(attention: dict[str, Any]) -> dict[str, Any]:
    """The options of the kind itself: what is not its name, nor where its values come from."""
    return {name: value for name, value in attention.items() if name not in ("kind", "shared_kv")}
