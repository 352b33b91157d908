"""How large a decoder is: its parameters, the operations that its definition needs, and what it caches.

A model FLOP is one that the definition needs: 2 per matrix parameter and token forward, three times that with the
backward pass; what mixing takes, the kind of attention says. Recomputation does not count.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from posbench.attention import Kind, build_kind
from posbench.config import Config
from posbench.model.decoder import call_hooks, shape_of
from posbench.schemes import Scheme, build_scheme


@dataclass(frozen=True)
class CacheSize:
    """What a decoder keeps of one sequence, all layers together, as it reads token by token."""

    bytes_per_token: float  # keys, values, gates
    state_bytes: float  # of a recurrence, whatever the length, or of full windows


def vocab_size(config: Config) -> int:
    """V, the rows of the model's table, before any text is read: a tokenizer of a file or of the hub is opened.

    Raises: ConfigError where that cannot be read.
    """
    if config.model.vocab_size is not None:
        return config.model.vocab_size
    if config.is_task:
        from posbench.data.tasks import build_task

        return len(build_task(config.data).tokens)
    if config.tokenizer.kind in ("file", "hub"):
        from posbench.data.text import tokenizer

        return tokenizer.vocab_size(tokenizer.TOKENIZERS[config.tokenizer.kind](config.tokenizer, ()))
    return 257 if config.tokenizer.kind == "bytes" else config.tokenizer.vocab_size


def num_parameters(config: Config, vocab_size: int) -> dict[str, int]:
    """Parameters without the scheme's own: `embedding` (both tables when untied) and `body` (the rest)."""
    model = config.model
    tables = 1 if model.tied_embeddings else 2
    vectors = model.d_model * (2 * model.num_layers + 1)  # norms and biases
    vectors += model.num_layers * model.head_width * (2 * model.qk_norm + _parts_heads(config) * model.qkv_bias)
    vectors += model.num_layers * sum(p.numel() for p in build_kind(config.scheme, shape_of(config)).parameters())
    return {"embedding": tables * vocab_size * model.d_model, "body": _matrices(config) + vectors}


def forward_flops_per_token(config: Config, vocab_size: int, length: int) -> float:
    """Model FLOPs of the forward pass over windows of `length` tokens, per token. Hooks count as far as stated."""
    shape = shape_of(config)
    kind, layers = build_kind(config.scheme, shape), build_scheme(config.scheme, shape)
    mixing = sum(kind.flops_per_token(length, scheme) for scheme in layers) + (layers.flops_per_token(length) or 0.0)
    return 2.0 * (_matrices(config) + vocab_size * config.model.d_model) + mixing


def training_flops_per_token(config: Config, vocab_size: int) -> float:
    """Model FLOPs of forward and backward over windows of the training length, per token."""
    return 3 * forward_flops_per_token(config, vocab_size, config.train.context_length)


def cache_size(config: Config, dtype: torch.dtype = torch.bfloat16) -> CacheSize:
    """What is kept where activations are of `dtype`. Not a formula: one layer's kind is given a token, and asked."""
    shape = shape_of(config)
    kind, layers = build_kind(config.scheme, shape), build_scheme(config.scheme, shape)
    begun = max(scheme.window or 1 for scheme in layers)  # tokens from which on all layers keep as many more
    one, two = (sum(_kept_bytes(kind, scheme, length, dtype) for scheme in layers) for length in (begun, begun + 1))
    return CacheSize(bytes_per_token=two - one, state_bytes=one - begun * (two - one))


def _kept_bytes(kind: Kind, scheme: Scheme, length: int, dtype: torch.dtype) -> int:
    """Bytes of the KV cache of one layer after `length` tokens."""
    cache = kind.new_cache(length)
    call_hooks(scheme, kind, torch.arange(length), dtype, cache)
    return cache.num_bytes


def _parts_heads(config: Config) -> int:
    """Heads of all parts of the packed projection: of q, k and v."""
    return sum(build_kind(config.scheme, shape_of(config)).heads.values())


def _matrices(config: Config) -> int:
    """Parameters of the matrices in all layers."""
    model = config.model
    heads = _parts_heads(config) + model.num_heads  # and the output's
    return model.num_layers * model.d_model * (heads * model.head_width + 3 * model.ffn_width)
