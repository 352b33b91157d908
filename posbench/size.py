"""How large a decoder is: its parameters, and the operations that its definition needs, before it is built.

A model FLOP is one that the definition needs: 2 per matrix parameter and token forward, three times that with the
backward pass; what mixing takes, the kind of attention says. Recomputation does not count.
"""

from __future__ import annotations

from posbench.attention import build_kind
from posbench.config import Config
from posbench.model import shape_of
from posbench.schemes import build_scheme


def num_parameters(config: Config, vocab_size: int) -> dict[str, int]:
    """Parameters without the scheme's own: `embedding` (both tables when untied) and `body` (the rest)."""
    model = config.model
    tables = 1 if model.tied_embeddings else 2
    norms = model.d_model * (2 * model.num_layers + 1)
    return {"embedding": tables * vocab_size * model.d_model, "body": _matrices(config) + norms}


def forward_flops_per_token(config: Config, vocab_size: int, length: int) -> float:
    """Model FLOPs of the forward pass over windows of `length` tokens, per token."""
    shape = shape_of(config)
    kind, scheme = build_kind(config.scheme, shape), build_scheme(config.scheme, shape)
    mixing = sum(kind.flops_per_token(length, scheme.layer(n)) for n in range(config.model.num_layers))
    return 2.0 * (_matrices(config) + vocab_size * config.model.d_model) + mixing


def training_flops_per_token(config: Config, vocab_size: int) -> float:
    """Model FLOPs of forward and backward over windows of the training length, per token."""
    return 3 * forward_flops_per_token(config, vocab_size, config.train.context_length)


def _matrices(config: Config) -> int:
    """Parameters of the matrices in all layers."""
    model = config.model
    assert model.head_dim is not None and model.ffn_dim is not None
    heads = sum(build_kind(config.scheme, shape_of(config)).heads.values()) + model.num_heads  # and the output's
    return model.num_layers * model.d_model * (heads * model.head_dim + 3 * model.ffn_dim)
