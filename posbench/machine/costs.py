"""Operations that the definition needs, and the rates that makers state: what speed and plans are measured by.

A model FLOP is one that the definition needs: 2 per matrix parameter and token forward, three times that with the
backward pass, and for causal attention each query meets half the keys. Recomputation does not count.
"""

from __future__ import annotations

from posbench.config import ModelConfig

# Dense bf16 rates of the makers' datasheets, FLOP/s, of the SXM parts (an H100 for PCIe: 756e12): what MFU is usually
# quoted against.
DATASHEET = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "RTX 4090": 165e12}


def forward_flops_per_token(config: ModelConfig, vocab_size: int, length: int) -> float:
    """Model FLOPs of the forward pass over windows of `length` tokens, per token."""
    assert config.head_dim is not None
    norms = config.d_model * (2 * config.num_layers + 1)
    matrices = config.num_parameters(0)["body"] - norms + vocab_size * config.d_model
    attention = config.num_layers * config.num_heads * config.head_dim * length
    return 2.0 * (matrices + attention)


def training_flops_per_token(config: ModelConfig, vocab_size: int, context_length: int) -> float:
    """Model FLOPs of forward and backward, per token."""
    return 3 * forward_flops_per_token(config, vocab_size, context_length)
