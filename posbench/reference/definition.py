"""The definition of every scheme, in float64 and NumPy: slow, a page long, obviously right.

It shares no line with `posbench.schemes`, `posbench.attention` or `posbench.model` and no kernel with torch: rotations
are explicit matrices, biases and tables are filled entry by entry, attention goes one row of one head at a time.
`posbench verify` and the tests hold everything that is fast to it. What a scheme is, it learns from its YAML alone.

Shapes: T tokens, H heads, D = head_dim, C = d_model, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import cos, sin, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from posbench.config import ModelConfig, SchemeConfig

Array = NDArray[np.float64]


class NoDefinitionError(LookupError):
    """This page does not define the scheme's kind (a plug-in, say): there is nothing independent to hold it to."""


@dataclass(frozen=True)
class Definition:
    """What this page needs to know of a scheme. Unchanged it is NoPE."""

    sites: Collection[str] = ()  # rotated ones, of q k v o
    base: float = 10000.0  # of the rotation, or of the sines
    slopes: Callable[[int], list[float]] | None = None  # of ALiBi, for a number of heads
    amplitude: float = 0.0  # of the sines, in standard deviations of the token embeddings at initialisation


def define(scheme: SchemeConfig) -> Definition:
    """What a scheme's YAML asks for. Raises: NoDefinitionError for a kind that this page does not know."""
    kinds: Mapping[str, Callable[..., Definition]] = {
        "nope": lambda: Definition(),
        "rotary": lambda sites, base=10000.0: Definition(sites=tuple(sites), base=float(base)),
        "alibi": lambda: Definition(slopes=alibi_slopes),
        "sinusoidal": lambda amplitude=1.0, base=10000.0: Definition(amplitude=float(amplitude), base=float(base)),
    }
    try:
        return kinds[scheme.kind](**scheme.options)
    except (KeyError, TypeError) as error:
        raise NoDefinitionError(
            f"posbench/reference.py defines no scheme of kind {scheme.kind!r} with options {list(scheme.options)}"
        ) from error


def rotation(position: int, head_dim: int, base: float) -> Array:
    """R_p, [D, D]: block t turns the coordinates (t, t + D/2) by p * base ** (-2t / D) radians."""
    R = np.zeros((head_dim, head_dim))
    for t in range(head_dim // 2):
        angle, u = position * base ** (-2 * t / head_dim), t + head_dim // 2
        R[t, t], R[t, u] = cos(angle), -sin(angle)
        R[u, t], R[u, u] = sin(angle), cos(angle)
    return R


def alibi_slopes(num_heads: int) -> list[float]:
    """Section 3 of arXiv 2108.12409: the geometric series from 2 ** (-8 / H) with that ratio, for H a power of two.

    Otherwise the series of the power of two below, then every second entry of the series of the power of two above.
    """
    power = 1
    while 2 * power <= num_heads:
        power *= 2
    series = [(2 ** (-8 / power)) ** h for h in range(1, power + 1)]
    return series if power == num_heads else series + alibi_slopes(2 * power)[::2][: num_heads - power]


def alibi_bias(slope: float, length: int) -> Array:
    """`-m (i - j)` for query i and key j, [T, T]."""
    return np.array([[-slope * (i - j) for j in range(length)] for i in range(length)], dtype=np.float64)


def sinusoidal_table(positions: Collection[int], width: int, base: float = 10000.0) -> Array:
    """Section 3.5 of arXiv 1706.03762: channel 2i is sin(p / base ** (2i / C)), channel 2i + 1 the cosine, [T, C]."""
    table = np.zeros((len(positions), width))
    for row, p in enumerate(positions):
        for channel in range(width):
            angle = p / base ** ((channel - channel % 2) / width)
            table[row, channel] = cos(angle) if channel % 2 else sin(angle)
    return table


def attention_weights(q: Array, k: Array, bias: Array | None = None) -> Array:
    """a_ij = softmax over j <= i of q_i . k_j / sqrt(D) + bias_ij, of one head, [T, T]."""
    T, D = q.shape
    a = np.zeros((T, T))
    for i in range(T):
        s = k[: i + 1] @ q[i] / sqrt(D)
        if bias is not None:
            s = s + bias[i, : i + 1]
        e = np.exp(s - s.max())
        a[i, : i + 1] = e / e.sum()
    return a


def head(
    q: Array,
    k: Array,
    v: Array,
    positions: Collection[int],
    sites: Collection[str] = (),
    base: float = 10000.0,
    bias: Array | None = None,
) -> Array:
    """One head of causal attention, q, k, v [T, D] -> o [T, D]; the sites are rotated, o by the transpose: back."""
    R = [rotation(p, q.shape[1], base) for p in positions]
    if "q" in sites:
        q = np.stack([R[i] @ q[i] for i in range(len(R))])
    if "k" in sites:
        k = np.stack([R[j] @ k[j] for j in range(len(R))])
    if "v" in sites:
        v = np.stack([R[j] @ v[j] for j in range(len(R))])
    o = attention_weights(q, k, bias) @ v
    if "o" in sites:
        o = np.stack([R[i].T @ o[i] for i in range(len(R))])
    return o


def offset_kernel(a: Array, v: Array, base: float = 10000.0) -> Array:
    """What V with O amounts to, o_i = sum_j a_ij R_(j-i) v_j: of distances alone. a [T, T], v [T, D] -> [T, D]."""
    T, D = v.shape
    R = {distance: rotation(distance, D, base) for distance in range(1 - T, 1)}
    return np.stack([sum((a[i, j] * R[j - i] @ v[j] for j in range(i + 1)), np.zeros(D)) for i in range(T)])


def logits(
    weights: Mapping[str, Any], model: ModelConfig, scheme: SchemeConfig, tokens: Collection[int], offset: int = 0
) -> Array:
    """The whole decoder: tokens [T] at positions offset, offset + 1, ... -> logits [T, V].

    Arguments: weights, the model's state dict (anything NumPy can read). Raises: NoDefinitionError.
    """
    definition = define(scheme)
    W = {name: np.asarray(array, dtype=np.float64) for name, array in weights.items()}
    H, D = model.num_heads, model.head_dim
    Hkv = model.num_kv_heads
    assert D is not None and Hkv is not None
    positions = range(offset, offset + len(tokens))

    def norm(x: Array, name: str) -> Array:
        return np.stack([row / sqrt(float(row @ row) / len(row) + model.norm_eps) * W[name] for row in x])

    x = np.stack([W["embedding.weight"][token] for token in tokens])
    if definition.amplitude:
        x = x + definition.amplitude * model.init_std * sinusoidal_table(positions, model.d_model, definition.base)
    for layer in (f"blocks.{n}." for n in range(model.num_layers)):
        packed = norm(x, layer + "attention_norm.weight") @ W[layer + "attention.qkv.weight"].T
        q, k, v = packed[:, : H * D], packed[:, H * D : (H + Hkv) * D], packed[:, (H + Hkv) * D :]
        heads = []
        for h in range(H):
            own, shared = slice(h * D, (h + 1) * D), slice(h // (H // Hkv) * D, (h // (H // Hkv) + 1) * D)
            bias = alibi_bias(definition.slopes(H)[h], len(tokens)) if definition.slopes else None
            heads.append(
                head(q[:, own], k[:, shared], v[:, shared], positions, definition.sites, definition.base, bias)
            )
        x = x + np.concatenate(heads, axis=1) @ W[layer + "attention.out.weight"].T
        gate, up = np.split(norm(x, layer + "ffn_norm.weight") @ W[layer + "ffn.gate_up.weight"].T, 2, axis=1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ W[layer + "ffn.down.weight"].T
    return norm(x, "norm.weight") @ W["unembedding.weight" if "unembedding.weight" in W else "embedding.weight"].T
