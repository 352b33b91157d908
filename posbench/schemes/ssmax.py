"""Scores that grow with the logarithm of how many tokens compete: learned (SSMax), or fixed (Llama 4, HyPE)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from posbench.schemes.base import Scheme, Shape, require_integer, require_number


class Ssmax(Scheme):
    """Scalable softmax: replace q_i by `s_h ln(i + 1) q_i`, with s learned for each layer and head (arXiv 2501.19399).

    i is the position, so scores are not relative, and the factor is the same with `window`, in which fewer tokens
    compete. The optional bias of the paper is omitted.
    """

    group = "biases on the scores"  # implemented by scaling q
    is_relative = False
    keeps_norms = False
    per_layer = True

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        # The last query of a training window is then initially unscaled.
        self.s = nn.Parameter(torch.full((shape.num_heads,), 1 / math.log(max(2, shape.context_length))))

    def prepare(self, pos: Tensor, length: int) -> Tensor:
        """Return `ln(i + 1)` for each position i in `pos`, [T, 1] float64."""
        return (pos.to(torch.float64)[..., None] + 1).log()

    def q(self, x: Tensor, pos: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        return (x.to(wide) * (self.s[:, None, None] * pos)).to(x.dtype)


class LogGrowth(Scheme):
    """Replace q_i by `(1 + slope ln(1 + floor((i + 1) / tokens))) q_i`, in which nothing is learned.

    Llama 4's layers without RoPE do this with 8,192 tokens and a slope of 0.1 ("temperature tuning", transformers:
    models/llama4/modeling_llama4.py).
    Options: `tokens` and `slope`.
    """

    group = "biases on the scores"  # implemented by scaling q
    is_relative = False
    keeps_norms = False

    def __init__(self, shape: Shape, tokens: int, slope: float = 0.1) -> None:
        super().__init__(shape)
        self.tokens = require_integer("tokens", tokens, 1, "the position at which scores begin to grow")
        self.slope = require_number("slope", slope, 0, 100, "0.1 is usual")

    def prepare(self, pos: Tensor, length: int) -> Tensor:
        """Return the factor of the query at each position, [T, 1] float64."""
        return 1 + self.slope * torch.log1p(((pos[..., None] + 1) // self.tokens).double())

    def q(self, x: Tensor, pos: Tensor) -> Tensor:
        return (x.to(torch.promote_types(x.dtype, torch.float32)) * pos).to(x.dtype)


class LogLength(LogGrowth):
    """HyPE's scale in softmax layers: replace q_i by `log_a(i + a) q_i`, in which nothing is learned.

    The first query is not scaled. From Chen et al. 2026 (arXiv 2601.22156) and their code:
    thunlp/hybrid-linear-attention, modeling_qwen3.py, `attn_logits_scaling`.
    Options: `a`, tokens. Raises: ConfigError for an `a` below 2.
    """

    def __init__(self, shape: Shape, a: int = 362) -> None:
        tokens = require_integer("a", a, 2, "362 tokens in the authors' code")
        super().__init__(shape, tokens, slope=1 / math.log(tokens))

    def prepare(self, pos: Tensor, length: int) -> Tensor:
        """Return the factor of the query at each position, [T, 1] float64."""
        return (pos[..., None] + self.tokens).double().log() / math.log(self.tokens)
