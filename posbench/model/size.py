"""How large a decoder is: its parameters, the operations that its definition needs, and what it caches.

A model FLOP is one that the definition needs: 2 per matrix parameter and token forward, three times that with the
backward pass; what mixing takes, the kind of attention says. Recomputation does not count.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from posbench.attention import Kind
from posbench.model.architecture import Architecture, call_hooks
from posbench.schemes import Scheme


@dataclass(frozen=True)
class CacheSize:
    """What a decoder keeps of one sequence, all layers together, as it reads token by token."""

    bytes_per_token: float  # keys, values, gates
    state_bytes: float  # of a recurrence, whatever the length, or of full windows


def num_parameters(architecture: Architecture, vocab_size: int) -> dict[str, int]:
    """Count parameters without the scheme's own: `embedding` (both tables when untied) and `body` (the rest)."""
    model = architecture.model
    tables = 1 if model.tied_embeddings else 2
    vectors = model.d_model * (2 * model.num_layers + 1)  # norms
    vectors += model.head_width * (2 * model.num_layers * model.qk_norm + _parts_heads(architecture) * model.qkv_bias)
    vectors += sum(p.numel() for kind in architecture.kinds for p in kind.parameters())
    return {"embedding": tables * vocab_size * model.d_model, "body": _matrices(architecture) + vectors}


def forward_flops_per_token(architecture: Architecture, vocab_size: int, length: int) -> float:
    """Count model FLOPs of the forward pass over windows of `length` tokens, per token. Hooks count if stated."""
    scheme = architecture.scheme
    layers = zip(scheme, architecture.kinds, strict=True)
    mixing = sum(kind.flops_per_token(length, layer) for layer, kind in layers)
    mixing += scheme.flops_per_token(length) or 0.0
    return 2.0 * (_matrices(architecture) + vocab_size * architecture.model.d_model) + mixing


def training_flops_per_token(architecture: Architecture, vocab_size: int) -> float:
    """Count model FLOPs of forward and backward over windows of the training length, per token."""
    return 3 * forward_flops_per_token(architecture, vocab_size, architecture.scheme.shape.context_length)


def cache_size(architecture: Architecture, dtype: torch.dtype = torch.bfloat16) -> CacheSize:
    """Measure what is kept with activations of `dtype`: each layer's kind is given a token, and asked."""
    layers = list(zip(architecture.scheme, architecture.kinds, strict=True))
    begun = max(scheme.window or 1 for scheme, _ in layers)  # tokens after which each token adds as much as the last
    one, two = (
        sum(_kept_bytes(kind, scheme, length, dtype) for scheme, kind in layers) for length in (begun, begun + 1)
    )
    return CacheSize(bytes_per_token=two - one, state_bytes=one - begun * (two - one))


def _kept_bytes(kind: Kind, scheme: Scheme, length: int, dtype: torch.dtype) -> int:
    """Bytes of the KV cache of one layer after `length` tokens."""
    cache = kind.new_cache(length)
    call_hooks(scheme, kind, torch.arange(length), dtype, cache)
    return cache.num_bytes


def _parts_heads(architecture: Architecture) -> int:
    """Count the heads of q, k and v in the packed projections of all layers."""
    return sum(sum(kind.heads.values()) for kind in architecture.kinds)


def _matrices(architecture: Architecture) -> int:
    """Count the parameters of the matrices in all layers."""
    model = architecture.model
    heads = _parts_heads(architecture) + model.num_layers * model.num_heads  # and the output's
    return model.d_model * (heads * model.head_width + 3 * model.num_layers * model.ffn_width)
