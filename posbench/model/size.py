"""Count a decoder's parameters, the floating-point operations that its definition needs, and the numbers it caches.

Model FLOPs are 2 per matrix parameter and token in the forward pass, three times as much with the backward pass, plus
mixing, which the kind of attention counts. Recomputation does not count.
"""

from __future__ import annotations

import torch

from posbench.config import Config
from posbench.model.architecture import Architecture, call_hooks
from posbench.model.loss import CHUNK


def num_parameters(architecture: Architecture, vocab_size: int) -> dict[str, int]:
    """Return the parameters of a decoder without its position scheme's, by `embedding` (both tables) and `body`."""
    model = architecture.model
    tables = 1 if model.tied_embeddings else 2
    layers_with_qk_norm = sum(kind.takes_qk_norm for kind in architecture.kinds)
    rest = model.d_model * (2 * model.num_layers + 1)  # norms: two in each layer, and the last one
    if model.qk_norm:
        rest += model.head_width * 2 * layers_with_qk_norm
    if model.qkv_bias:
        rest += model.head_width * _parts_heads(architecture)
    # The kinds' own parameters, such as sinks and gates.
    for kind in architecture.kinds:
        rest += sum(parameter.numel() for parameter in kind.parameters())
    return {"embedding": tables * vocab_size * model.d_model, "body": _matrices(architecture) + rest}


def forward_flops_per_token(architecture: Architecture, vocab_size: int, length: int) -> float:
    """Return the model FLOPs per token of the forward pass over windows of `length` tokens.

    `vocab_size` is the rows of the embedding table.
    """
    scheme = architecture.scheme
    layers = zip(scheme, architecture.kinds, strict=True)
    mixing = sum(kind.flops_per_token(length, layer) for layer, kind in layers)
    # Unknown FLOPs of a scheme count as 0.
    mixing += scheme.flops_per_token(length) or 0.0
    return 2.0 * (_matrices(architecture) + vocab_size * architecture.model.d_model) + mixing


def training_flops_per_token(architecture: Architecture, vocab_size: int) -> float:
    """Return the model FLOPs per token of the forward and backward passes over windows of the training length."""
    return 3 * forward_flops_per_token(architecture, vocab_size, architecture.scheme.shape.context_length)


def training_memory(config: Config, architecture: Architecture, vocab_size: int) -> dict[str, int]:
    """Return {purpose: estimated bytes} that training with float32 weights needs on its device."""
    model, train = config.model, config.train
    parameters = num_parameters(architecture, vocab_size)
    tokens = train.batch_size // train.accumulation * train.context_length
    heads = 0  # of q, k, v, rotated q and rotated k in all layers
    for kind in architecture.kinds:
        by_part = kind.heads_by_part
        heads += sum(by_part.values()) + by_part.get("q", 0) + by_part.get("k", 0)
    # Per token and layer: two hidden states, the same normalised, q, k, v, rotated q and k, attention output, gate, up,
    # gate * up.
    layers = model.num_layers * (4 * model.d_model + model.num_heads * model.head_width + 3 * model.ffn_width)
    # The backward pass reads activations in the compute dtype.
    width = 4 if train.dtype == "float32" else 2
    rows = min(tokens, max(1, CHUNK["cuda"] // vocab_size))
    return {
        # Weights, gradients and two moments, and the rounded weights that the backward pass reads.
        "state": 16 * sum(parameters.values()) + 2 * parameters["body"],
        "activations": width * (layers + heads * model.head_width) * tokens,
        # One chunk's logits with their softmax (`posbench.model.loss`), and the unembedding's float32 gradient.
        "logits": (2 * width + 4) * rows * vocab_size + 4 * vocab_size * model.d_model,
    }


def cached_numbers(architecture: Architecture, length: int) -> int:
    """Return how many numbers decoding keeps of `length` tokens: keys, values, gates and states of all layers.

    They are counted in caches through which zeros were passed.
    """
    total = 0
    for n, (scheme, kind) in enumerate(zip(architecture.scheme, architecture.kinds, strict=True)):
        cache = kind.new_cache(length)
        call_hooks(scheme, kind, torch.arange(length), cache=cache)
        # Only the first layer's cache holds the embeddings that a scheme looks back at.
        cache.rows = {key: x for key, x in cache.rows.items() if n == 0 or not key.endswith("embed")}
        total += cache.size
    return total


def cache_per_token(architecture: Architecture) -> float:
    """Return how many numbers decoding keeps of a context of the training length, for each of its tokens."""
    context = architecture.scheme.shape.context_length
    # Beyond this length every token adds the same number, so long contexts need not be computed.
    length = min(context, max(scheme.reach or 1 for scheme in architecture.scheme))
    short = cached_numbers(architecture, length)
    added = cached_numbers(architecture, length + 1) - short if length < context else 0
    return (short + (context - length) * added) / context


def _parts_heads(architecture: Architecture) -> int:
    return sum(sum(kind.heads_by_part.values()) for kind in architecture.kinds)


def _matrices(architecture: Architecture) -> int:
    model = architecture.model
    heads = _parts_heads(architecture) + model.num_layers * model.num_heads  # and the output's
    return model.d_model * (heads * model.head_width + 3 * model.num_layers * model.ffn_width)
