"""Define each kind of attention for one head and one query at a time, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp, inf, sqrt
from typing import Any, NamedTuple

import numpy as np

from posbench.reference.definition import Array, Definition, Rows


class Inputs(NamedTuple):
    """The inputs of attention in one layer."""

    scheme: Definition  # which adds position
    q: list[Array]  # H arrays [T, D], without position, as k and v; those that a kind does not use are empty
    k: list[Array]
    v: list[Array]
    x: Array  # hidden states [T, C]
    positions: Sequence[int]  # [T], tokens


Kind = Callable[..., list[Array]]  # (inputs, options, tensors of the kind by name) -> outputs, H arrays [T, D]


def softmax_weights(scores: Sequence[float], sink: float = -inf) -> Array:
    """Return the softmax of one query's visible scores; the logit `sink` only adds to the denominator."""
    # The largest logit is subtracted, so that exp does not overflow.
    e = np.exp(np.array([*scores, sink]) - max(*scores, sink))
    return np.asarray(e[:-1] / e.sum())


def softmax(
    inputs: Inputs,
    sink: Sequence[float] | None = None,
    output_gate: Array | None = None,
    window: int | None = None,
) -> list[Array]:
    """Return the outputs [H][T, D] of softmax attention with scores `q_i . k_j / sqrt(D) + bias_ij`, j <= i.

    Arguments: sink, a logit per head that only adds to the denominator; output_gate, a matrix W [H, C] or [H D, C], by
    whose sigmoid(W x) outputs are multiplied; window, the number of keys a query sees, i - window < j <= i.
    """
    rows, hook_positions = _rows(inputs)

    def attend(h: int, t: int, values: Array) -> Array:
        first = 0 if window is None else max(0, t + 1 - window)
        products = rows.keys[h][first : t + 1] @ rows.queries[h][t] / sqrt(inputs.q[h].shape[1])
        bias = np.array([inputs.scheme.bias(h, t, s, rows) for s in range(first, t + 1)])
        logit = -inf if sink is None else sink[h]
        weights = softmax_weights(list(products + bias), logit)
        return np.asarray(weights @ values[first : t + 1])

    outputs = _outputs(inputs, hook_positions, attend)
    if output_gate is None:
        return outputs
    gates = np.split(sigmoid(inputs.x @ output_gate.T), len(outputs), axis=1)  # [T, 1] or [T, D] per head
    return [o * gate for o, gate in zip(outputs, gates, strict=True)]


def linear(inputs: Inputs) -> list[Array]:
    """Return the outputs [H][T, D] of linear attention with phi = elu + 1; only the numerator is rotated.

    `o_i = sum_j (R phi(q_i) . R phi(k_j)) e^bias v_j / sum_j phi(q_i) . phi(k_j) e^bias` over j <= i.
    """
    q = [elu(head) + 1 for head in inputs.q]
    k = [elu(head) + 1 for head in inputs.k]
    rows, hook_positions = _rows(inputs._replace(q=q, k=k))

    def attend(h: int, t: int, values: Array) -> Array:
        numerator, denominator = np.zeros(values.shape[1]), 0.0
        for s in range(t + 1):
            e = exp(inputs.scheme.bias(h, t, s, rows))
            numerator = numerator + (rows.queries[h][t] @ rows.keys[h][s]) * e * values[s]
            denominator = denominator + (q[h][t] @ k[h][s]) * e
        return np.asarray(numerator / denominator)

    return _outputs(inputs, hook_positions, attend)


def elu(x: Array) -> Array:
    """Return x [T, D] with entries y < 0 replaced by e^y - 1."""
    # NumPy computes both branches, so exp must not overflow at large x.
    return np.where(x >= 0, x, np.exp(np.minimum(x, 0)) - 1)


def decay(
    inputs: Inputs,
    normalise: bool = False,
) -> list[Array]:
    """Return the outputs [H][T, D] of decay attention: `o_i = sum_j e^bias_ij v_j` over j <= i.

    Arguments: normalise, whether to divide by `sum_j e^bias_ij`.
    """
    zeros = [np.zeros_like(head) for head in inputs.v]  # this kind has no queries and keys
    rows, hook_positions = _rows(inputs._replace(q=zeros, k=zeros), use_hooks=False)

    def attend(h: int, t: int, values: Array) -> Array:
        o, total = np.zeros(values.shape[1]), 0.0
        for s in range(t + 1):
            e = exp(inputs.scheme.bias(h, t, s, rows))
            o, total = o + e * values[s], total + e
        return np.asarray(o / total if normalise else o)

    return _outputs(inputs, hook_positions, attend)


def gdn(
    inputs: Inputs,
    **learned: Any,
) -> list[Array]:
    """Return the outputs [H][T, D] of the gated delta rule, token by token (arXiv 2412.06464, equation 10).

    `S_t = S_(t-1) a_t (1 - b_t k_t k_t^T) + b_t v_t k_t^T` and `o_t = S_t q_t / sqrt(D)`, normalised and gated. a_t is
    a number, or with the option decay=channel the diagonal of a matrix (arXiv 2510.26692, equation 1).
    Arguments: learned, the kind's tensors by name, and its options.
    """
    scheme, q, k, v, x, _ = inputs
    group = len(q) // len(learned["A_log"])

    def convolved(part: str, rows: Array, h: int) -> Array:
        y = np.array(rows)
        if f"{part}_taps" in learned:
            taps = learned[f"{part}_taps"][h, 0]  # [D, tokens back]
            for t in range(len(rows)):
                y[t] = sum(taps[:, n] * rows[t - n] for n in range(min(t + 1, taps.shape[1])))
        # SiLU.
        return y * sigmoid(y)

    gate_input = x
    if "W_f" in learned:
        gate_input = x @ learned["W_f"].T
    decay_gates = gate_input @ learned["W_a"].T + learned["dt_bias"]
    decay_gates = decay_gates.reshape(len(x), len(learned["A_log"]), -1)  # [T, Hkv, 1 or D]
    heads = range(len(q))
    q = [unit(convolved("q", q[h], h)) for h in heads]
    k = [unit(convolved("k", k[h], h // group)) for h in heads]
    rows, hook_positions = _rows(inputs._replace(q=q, k=k))
    outputs = []
    for h in heads:
        values = scheme.after_hook("v", convolved("v", v[h], h // group), hook_positions[h], h)
        D, key_head = values.shape[1], h // group
        state = np.zeros((D, rows.keys[h].shape[1]))
        o = []
        for t, key in enumerate(rows.keys[h]):
            factor = exp(learned["A_log"][key_head])
            a = np.exp(-factor * np.log1p(np.exp(decay_gates[t, key_head])))
            if learned.get("decay_bound") is not None:
                a = np.exp(-learned["decay_bound"] * sigmoid(factor * decay_gates[t, key_head]))
            b = sigmoid(learned["W_b"][key_head] @ x[t])
            state = state * a @ (np.eye(len(key)) - b * np.outer(key, key)) + b * np.outer(values[t], key)
            o.append(state @ rows.queries[h][t] / sqrt(D))
        # Norm and gate of the output.
        output = scheme.after_hook("o", np.stack(o), hook_positions[h], h)
        output = output / np.sqrt((output**2).mean(1, keepdims=True) + 1e-6) * learned["norm_weight"]
        if "W_z" in learned:
            z = x @ learned["W_z"][h * D : (h + 1) * D].T
            output = output * sigmoid(z)
            if learned.get("output_gate") != "sigmoid":  # else silu
                output = output * z
        outputs.append(output)
    return outputs


def mla(
    inputs: Inputs,
    **learned: Any,
) -> list[Array]:
    """Return the outputs [H][T, D] of latent attention (arXiv 2405.04434, section 2.1): softmax attention of `q`.

    The keys of a head are `[W_r x ; W_k c]` before the scheme changes them, and its values `W_v c`, with `c = norm(W_c
    x)`. Arguments: learned, the kind's tensors by name, and its options.
    """
    heads, x = len(inputs.q), inputs.x
    c = x @ learned["W_c"].T
    c = c / np.sqrt((c**2).mean(1, keepdims=True) + 1e-6) * learned["norm_weight"]
    keys = [np.hstack([x @ learned["W_r"].T, c @ W.T]) for W in np.split(learned["W_k"], heads)]
    values = [c @ W.T for W in np.split(learned["W_v"], heads)]
    return softmax(inputs._replace(k=keys, v=values), window=learned.get("window"))


def gqa(
    inputs: Inputs,
    kv_heads: int = 1,
    window: int | None = None,
    **learned: Array,
) -> list[Array]:
    """Return the outputs [H][T, D] of softmax attention of `q` with `kv_heads` keys `W_k x` and values `W_v x`."""
    heads, x = len(inputs.q), inputs.x
    group = heads // kv_heads
    W_k, W_v = np.split(learned["W_k"], kv_heads), np.split(learned["W_v"], kv_heads)
    keys = [x @ W_k[h // group].T for h in range(heads)]
    values = [x @ W_v[h // group].T for h in range(heads)]
    return softmax(inputs._replace(k=keys, v=values), window=window)


def sigmoid(x: Any) -> Any:
    """Return 1 / (1 + e^-x) of a number or an array."""
    return 1 / (1 + np.exp(-x))


def unit(x: Array) -> Array:
    """Return the rows of x [T, D] divided by their lengths, to which Qwen3-Next adds 1e-6 under the root."""
    return np.stack([row / sqrt(float(row @ row) + 1e-6) for row in x])


def _outputs(
    inputs: Inputs, hook_positions: list[list[Any]], attend: Callable[[int, int, Array], Array]
) -> list[Array]:
    """Return the outputs [H][T, D], with the hooks of values and outputs applied.

    Arguments: attend, a function (h, t, values) that gives the output of head h at query t.
    """
    scheme, heads = inputs.scheme, []
    for h, head_positions in enumerate(hook_positions):
        values = scheme.after_hook("v", inputs.v[h], head_positions, h)
        outputs = np.stack([attend(h, t, values) for t in range(len(values))])
        heads.append(scheme.after_hook("o", outputs, head_positions, h))
    return heads


def _rows(inputs: Inputs, use_hooks: bool = True) -> tuple[Rows, list[list[Any]]]:
    """Return the queries, keys and gates that a bias reads, and the positions [H][T] that the hooks of heads receive.

    Positions differ from head to head if gates do. Arguments: use_hooks, whether the hooks change q and k.
    """
    scheme, q, k, v, x, positions = inputs
    heads = range(len(v))
    gates = [scheme.gates(x, h) for h in heads]
    hook_positions = []
    for h in heads:
        # `locate` sees the gates up to its own token only.
        hook_positions.append([scheme.locate(p, gates[h][: t + 1], h) for t, p in enumerate(positions)])
    if use_hooks:
        q = [scheme.after_hook("q", q[h], hook_positions[h], h) for h in heads]
        k = [scheme.after_hook("k", k[h], hook_positions[h], h) for h in heads]
    return Rows(positions, q, k, gates), hook_positions


KINDS: dict[str, Kind] = {"softmax": softmax, "linear": linear, "decay": decay, "gdn": gdn, "mla": mla, "gqa": gqa}
