"""The forgetting transformer: each token fades what came before it (Lin et al. 2025, arXiv 2503.02130)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.schemes.base import At, Bias, Scheme, Shape
from posbench.schemes.layered import Layered


class Fox(Layered):
    """`bias_h(i, j) = sum_{l=j+1..i} ln sigmoid(w_h . x_l + b_h)`, w and b in each layer, x the stream behind its norm.

    w begins as the model's matrices, b at 0. The rest of the paper's "Pro" block (output gates, norms of q and k,
    shifted keys) is left out: it is no position scheme.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape, [FoxLayer(shape) for _ in range(shape.num_layers)])


class FoxLayer(Scheme):
    """The gates of one layer, in float32 at least: kept of every token, and summed over those that are kept."""

    gate_width = 1
    decayed = frozenset({"w"})

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.w = nn.Parameter(torch.empty(shape.num_heads, shape.d_model))
        nn.init.normal_(self.w, std=shape.embedding_std)  # as the model's matrices
        self.b = nn.Parameter(torch.zeros(shape.num_heads))

    def gate(self, x: Tensor, pos: Tensor) -> Tensor:
        """`ln sigmoid(w_h . x + b_h)`, [B, H, T, 1] in the weights' dtype, not rounded to that of x."""
        return F.logsigmoid(F.linear(x.to(self.w.dtype), self.w, self.b)).mT[..., None]

    def bias(self, q: Tensor, gate: Tensor | None, at: At) -> Bias:
        assert gate is not None
        until_query = gate[..., 0].cumsum(-1)  # [B, H, tokens that are kept]
        until_key = until_query.clone()  # FlexAttention gives a gradient to what is read once only
        before = at.query - at.key

        def forgotten(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return until_query[b, h, i + before] - until_key[b, h, j]

        return forgotten
