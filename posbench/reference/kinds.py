"""What each kind of attention is: one head, one query at a time, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp, inf, sqrt
from typing import Any

import numpy as np

from posbench.reference.definition import Array, Definition, Rows

# (definition of the scheme, q, k, v [H][T, D] before the hooks, stream x [T, C], positions) -> o [H][T, D]
Kind = Callable[..., list[Array]]


def softmax_weights(scores: Sequence[float], sink: float = -inf) -> Array:
    """exp(s) / sum exp(s) of the scores that one query may see, and of a sink, whose own weight is dropped."""
    e = np.exp(np.array([*scores, sink]) - max(*scores, sink))
    return np.asarray(e[:-1] / e.sum())


def softmax(
    scheme: Definition,
    q: list[Array],
    k: list[Array],
    v: list[Array],
    x: Array,
    positions: Sequence[int],
    sink: Sequence[float] | None = None,
    window: int | None = None,
) -> list[Array]:
    """`o_i = sum_j a_ij v_j`, where a_i. is the softmax over j <= i of `q_i . k_j / sqrt(D) + bias_ij`, and the sink's.

    Arguments: sink, a learned logit for each head; window, how many j a query sees at most, i - window < j <= i.
    """
    rows, places = _rows(scheme, q, k, x, positions, len(v))

    def mixed(h: int, t: int, values: Array) -> Array:
        first = 0 if window is None else max(0, t + 1 - window)
        products = rows.keys[h][first : t + 1] @ rows.queries[h][t] / sqrt(q[h].shape[1])
        scores = products + np.array([scheme.bias(h, t, s, rows) for s in range(first, t + 1)])
        weights = softmax_weights(list(scores), -inf if sink is None else sink[h])
        return np.asarray(weights @ values[first : t + 1])

    return _outputs(scheme, v, places, mixed)


def linear(
    scheme: Definition, q: list[Array], k: list[Array], v: list[Array], x: Array, positions: Sequence[int]
) -> list[Array]:
    """`o_i = sum_j (R phi(q_i) . R phi(k_j)) e^bias v_j / sum_j phi(q_i) . phi(k_j) e^bias` over j <= i."""
    q, k = [elu(head) + 1 for head in q], [elu(head) + 1 for head in k]
    rows, places = _rows(scheme, q, k, x, positions, len(v))

    def mixed(h: int, t: int, values: Array) -> Array:
        above, below = np.zeros(v[h].shape[1]), 0.0
        for s in range(t + 1):
            e = exp(scheme.bias(h, t, s, rows))
            above = above + (rows.queries[h][t] @ rows.keys[h][s]) * e * values[s]
            below = below + (q[h][t] @ k[h][s]) * e
        return np.asarray(above / below)

    return _outputs(scheme, v, places, mixed)


def elu(x: Array) -> Array:
    """x above 0, e^x - 1 below."""
    return np.array([[y if y >= 0 else exp(y) - 1 for y in row] for row in x])


def decay(
    scheme: Definition,
    q: list[Array],
    k: list[Array],
    v: list[Array],
    x: Array,
    positions: Sequence[int],
    normalise: bool = False,
) -> list[Array]:
    """`o_i = sum_j e^bias v_j` over j <= i, divided by the sum of the weights where that is asked for."""
    nothing = [np.zeros_like(head) for head in v]  # there are no queries and no keys
    rows, places = _rows(scheme, nothing, nothing, x, positions, len(v), moved=False)

    def mixed(h: int, t: int, values: Array) -> Array:
        o, total = np.zeros(v[h].shape[1]), 0.0
        for s in range(t + 1):
            e = exp(scheme.bias(h, t, s, rows))
            o, total = o + e * values[s], total + e
        return np.asarray(o / total if normalise else o)

    return _outputs(scheme, v, places, mixed)


def _outputs(
    scheme: Definition, v: list[Array], places: list[list[Any]], mixed: Callable[[int, int, Array], Array]
) -> list[Array]:
    """`mixed(h, t, values)` behind the hook o, for every head and query; values are behind theirs, [T, D]."""
    heads = []
    for h, place in enumerate(places):
        values = np.stack([scheme.v(v[h][t], p, h) for t, p in enumerate(place)])
        heads.append(np.stack([scheme.o(mixed(h, t, values), p, h) for t, p in enumerate(place)]))
    return heads


def _rows(
    scheme: Definition,
    q: list[Array],
    k: list[Array],
    x: Array,
    positions: Sequence[int],
    num_heads: int,
    moved: bool = True,
) -> tuple[Rows, list[list[Any]]]:
    """What a bias may look at, and what the hooks get as the position of each token in each head."""
    gates = [[scheme.gate(row, h) for row in x] for h in range(num_heads)]
    places = [[scheme.locate(p, gates[h][: t + 1], h) for t, p in enumerate(positions)] for h in range(num_heads)]

    def behind(hook: Callable[[Array, Any, int], Array], parts: list[Array]) -> list[Array]:
        if not moved:
            return parts
        return [
            np.stack([hook(row, p, h) for row, p in zip(parts[h], places[h], strict=True)]) for h in range(num_heads)
        ]

    return Rows(positions, behind(scheme.q, q), behind(scheme.k, k), gates), places


KINDS: dict[str, Kind] = {"softmax": softmax, "linear": linear, "decay": decay}
