"""The whole decoder in loops: what `posbench verify` and the tests hold every fast path to."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from math import sqrt
from typing import Any

import numpy as np

from posbench.config import Config
from posbench.reference.definition import Array, NoDefinitionError
from posbench.reference.kinds import KINDS, options_of
from posbench.reference.schemes import define


def logits(weights: Mapping[str, Any], config: Config, tokens: Collection[int], offset: int = 0) -> Array:
    """Tokens [T] at positions offset, offset + 1, ... -> logits [T, V], float64.

    Arguments: weights, the model's state dict (anything NumPy can read).
    Raises: NoDefinitionError where the scheme or the kind of attention is not defined here.
    """
    W = {name: np.asarray(array, dtype=np.float64) for name, array in weights.items()}
    model, attention = config.model, config.scheme.attention
    name = attention.get("kind", "softmax")
    if name not in KINDS:
        raise NoDefinitionError(f"posbench/reference/kinds.py does not define the kind of attention {name!r}")
    mix = partial(KINDS[name], **options_of(attention))
    learned = {key.removeprefix("scheme."): array for key, array in W.items() if key.startswith("scheme.")}
    scheme = define(config.scheme, config, learned)
    scheme.window(len(tokens))
    positions = range(offset, offset + len(tokens))
    x = np.stack([scheme.embed(W["embedding.weight"][token], p) for token, p in zip(tokens, positions, strict=True)])

    def norm(x: Array, name: str) -> Array:
        return np.stack([row / sqrt(float(row @ row) / len(row) + model.norm_eps) * W[name] for row in x])

    for n in range(model.num_layers):
        layer = f"blocks.{n}."
        normed = norm(x, layer + "attention_norm.weight")
        parts = _parts(normed @ W[layer + "attention.qkv.weight"].T, config)
        assert model.num_kv_heads is not None
        heads = []
        for h in range(model.num_heads):
            kv = h // (model.num_heads // model.num_kv_heads)
            q, k, v = (None if part is None else part[at] for part, at in zip(parts, (h, kv, kv), strict=True))
            heads.append(mix(scheme.layer(n), q, k, v, normed, positions, h))
        x = x + np.concatenate(heads, axis=1) @ W[layer + "attention.out.weight"].T
        gate, up = np.split(norm(x, layer + "ffn_norm.weight") @ W[layer + "ffn.gate_up.weight"].T, 2, axis=1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ W[layer + "ffn.down.weight"].T
    return norm(x, "norm.weight") @ W["unembedding.weight" if "unembedding.weight" in W else "embedding.weight"].T


def _parts(packed: Array, config: Config) -> tuple[list[Array] | None, list[Array] | None, list[Array]]:
    """Queries, keys and values by head, [T, D] each, of the packed projection [T, .]; the last columns are the values.

    A row whose values are its keys has no columns for values; a kind without content has none for q and k.
    """
    model = config.model
    D, H, Hkv = model.head_dim, model.num_heads, model.num_kv_heads
    assert D is not None and Hkv is not None
    heads = [packed[:, n * D : (n + 1) * D] for n in range(packed.shape[1] // D)]
    if config.scheme.attention.get("shared_kv"):
        return heads[:H], heads[H:], heads[H:]
    return (None, None, heads) if len(heads) == Hkv else (heads[:H], heads[H : H + Hkv], heads[H + Hkv :])
