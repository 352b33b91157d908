"""The whole decoder in loops: what `posbench verify` and the tests hold every fast path to."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import sqrt
from typing import Any

import numpy as np

from posbench.config import Config
from posbench.reference.definition import Array, NoDefinitionError
from posbench.reference.kinds import KINDS
from posbench.reference.schemes import define, entry_of_layer


def logits(
    weights: Mapping[str, Any],
    config: Config,
    tokens: Collection[int],
    offset: int = 0,
    positions: Sequence[int] | None = None,
) -> Array:
    """Tokens [T] at positions offset, offset + 1, ... (or at those given) -> logits [T, V], float64.

    Arguments: weights, the model's state dict (anything NumPy can read).
    Raises: NoDefinitionError where the scheme or the kind of attention is not defined here.
    """
    W = {name: np.asarray(array, dtype=np.float64) for name, array in weights.items()}
    model, attention = config.model, config.scheme.attention
    name = attention.get("kind", "softmax")
    if name not in KINDS:
        raise NoDefinitionError(f"posbench/reference/kinds.py does not define the kind of attention {name!r}")
    options = {key: value for key, value in attention.items() if key not in ("kind", "shared_kv", "sink")}
    layers, windows = [], []
    for n in range(model.num_layers):
        own, row = _below(W, f"scheme.layers.{n}."), entry_of_layer(config.scheme, n)
        window = row.options.get("window")
        windows.append({} if window is None else {"window": window})
        unwindowed = {name: value for name, value in row.options.items() if name != "window"}
        layers.append(define(replace(row, options=unwindowed), config, own))
        layers[n].window(len(tokens))
    positions = positions or range(offset, offset + len(tokens))
    x = np.stack([layers[0].embed(W["embedding.weight"][token], p) for token, p in zip(tokens, positions, strict=True)])

    def norm(x: Array, weight: Array) -> Array:
        return np.stack([row / sqrt(float(row @ row) / len(row) + model.norm_eps) * weight for row in x])

    for n, scheme in enumerate(layers):
        w = _below(W, f"blocks.{n}.")
        normed = norm(x, w["attention_norm.weight"])
        q, k, v = _parts(normed @ w["attention.qkv.weight"].T + w.get("attention.qkv.bias", 0.0), config)
        if model.qk_norm:
            q, k = (
                [norm(head, w[f"attention.{part}_norm.weight"]) for head in of] for part, of in (("q", q), ("k", k))
            )
        learned = _below(w, "attention.kind.")
        heads = KINDS[name](scheme, q, k, v, normed, positions, **options, **learned, **windows[n])
        x = x + np.concatenate(heads, axis=1) @ w["attention.out.weight"].T
        gate, up = np.split(norm(x, w["ffn_norm.weight"]) @ w["ffn.gate_up.weight"].T, 2, axis=1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w["ffn.down.weight"].T
    table = W["unembedding.weight" if "unembedding.weight" in W else "embedding.weight"]
    return norm(x, W["norm.weight"]) @ table.T


def _below(weights: Mapping[str, Array], prefix: str) -> dict[str, Array]:
    return {name.removeprefix(prefix): array for name, array in weights.items() if name.startswith(prefix)}


def _parts(packed: Array, config: Config) -> tuple[list[Array], list[Array], list[Array]]:
    """Queries, keys and values of each of the H heads, [T, D], of the packed projection [T, .]; the last are values.

    A row whose values are its keys has no columns for values; a kind without content has none for q and k.
    """
    model = config.model
    D, H, Hkv = model.head_width, model.num_heads, model.kv_heads
    heads = [packed[:, n * D : (n + 1) * D] for n in range(packed.shape[1] // D)]

    def repeated(heads: list[Array]) -> list[Array]:
        return [head for head in heads for _ in range(H // Hkv)]

    if config.scheme.attention.get("shared_kv"):
        return heads[:H], repeated(heads[H:]), repeated(heads[H:])
    if len(heads) == Hkv:
        return [], [], repeated(heads)
    return heads[:H], repeated(heads[H : H + Hkv]), repeated(heads[H + Hkv :])
