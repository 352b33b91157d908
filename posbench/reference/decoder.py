"""Define the whole decoder in NumPy loops, as a reference for `posbench verify` and the tests."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import sqrt
from typing import Any, NamedTuple

import numpy as np

from posbench.config import Config, SchemeConfig
from posbench.reference.definition import Array, NoDefinitionError
from posbench.reference.kinds import KINDS, Inputs
from posbench.reference.schemes import define, entry_of_layer


def logits(
    weights: Mapping[str, Any],
    config: Config,
    tokens: Collection[int],
    offset: int = 0,
    positions: Sequence[int] | None = None,
) -> Array:
    """Return the decoder's logits [T, V] float64 for `tokens` [T] at `positions`, by default offset, offset + 1, ...

    Arguments: weights, the model's state dict. Raises: NoDefinitionError for an undefined scheme or kind of attention.
    """
    W = {name: np.asarray(array, dtype=np.float64) for name, array in weights.items()}
    model = config.model
    layers, attentions = [], []
    for n in range(model.num_layers):
        entry = entry_of_layer(config.scheme, n)
        attentions.append(_attention(entry))
        # `window` belongs to attention here.
        scheme_options = {name: value for name, value in entry.options.items() if name != "window"}
        scheme_weights = _with_prefix(W, f"scheme.layers.{n}.")
        layers.append(define(replace(entry, options=scheme_options), replace(config, scheme=entry), scheme_weights))
        layers[n].window(len(tokens))  # which rescaled frequencies depend on
    # Embedding, then each layer: norm, attention, norm, SwiGLU.
    positions = positions or range(offset, offset + len(tokens))
    embedded = np.stack([W["embedding.weight"][token] for token in tokens])
    # Only a scheme of all layers adds to the embeddings, so the first layer's serves.
    x = layers[0].after_hook("embed", embedded, positions)

    def norm(x: Array, weight: Array) -> Array:
        return np.stack([row / sqrt(float(row @ row) / len(row) + model.norm_eps) * weight for row in x])

    for n, scheme in enumerate(layers):
        w = _with_prefix(W, f"blocks.{n}.")
        normed = scheme.after_hook("hidden", norm(x, w["attention_norm.weight"]), positions)
        attention = attentions[n]
        packed = normed @ w["attention.qkv.weight"].T + w.get("attention.qkv.bias", 0.0)
        q, k, v = _parts(packed, config, attention.name)
        raw_k = k
        if model.qk_norm and attention.name == "softmax":
            q = [norm(head, w["attention.q_norm.weight"]) for head in q]
            k = [norm(head, w["attention.k_norm.weight"]) for head in k]
        if attention.shared_kv:
            v = raw_k if attention.norms_value else k
        if attention.norms_value:
            v = [norm(head, np.ones(model.head_width)) for head in v]
        learned = _with_prefix(w, "attention.kind.")
        inputs = Inputs(scheme, q, k, v, normed, positions)
        heads = KINDS[attention.name](inputs, **attention.options, **learned)
        x = x + np.concatenate(heads, axis=1) @ w["attention.out.weight"].T
        gate, up = np.split(norm(x, w["ffn_norm.weight"]) @ w["ffn.gate_up.weight"].T, 2, axis=1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w["ffn.down.weight"].T
    table = W["unembedding.weight" if "unembedding.weight" in W else "embedding.weight"]
    return norm(x, W["norm.weight"]) @ table.T


class _Attention(NamedTuple):
    name: str  # in KINDS
    shared_kv: bool
    norms_value: bool
    options: dict[str, Any]  # keyword arguments of the function in KINDS


def _attention(entry: SchemeConfig) -> _Attention:
    options = dict(entry.attention)
    name = options.pop("kind", "softmax")
    if name not in KINDS:
        raise NoDefinitionError(f"posbench/reference/kinds.py does not define the kind of attention {name!r}")
    if name == "softmax":
        for option in ("sink", "output_gate"):  # tensors of these names are among the weights
            options.pop(option, None)
    shared_kv, norms_value = options.pop("shared_kv", False), options.pop("value_norm", False)
    if "window" in entry.options:
        options["window"] = entry.options["window"]
    return _Attention(name, shared_kv, norms_value, options)


def _with_prefix(weights: Mapping[str, Array], prefix: str) -> dict[str, Array]:
    return {name.removeprefix(prefix): array for name, array in weights.items() if name.startswith(prefix)}


def _parts(packed: Array, config: Config, attention: str) -> tuple[list[Array], list[Array], list[Array]]:
    """Return q, k and v, H arrays [T, D] each, from the packed projection [T, .]; a part that is not there is empty."""
    model = config.model
    D, H, Hkv = model.head_width, model.num_heads, model.kv_heads
    heads = [packed[:, n * D : (n + 1) * D] for n in range(packed.shape[1] // D)]

    def repeated(heads: list[Array]) -> list[Array]:
        # Heads of a group share a key head.
        return [head for head in heads for _ in range(H // Hkv)]

    if attention == "decay":
        return [], [], repeated(heads)
    # With a shared K = V there are no values, and kinds that lack a part have an empty list.
    return heads[:H], repeated(heads[H : H + Hkv]), repeated(heads[H + Hkv :])
