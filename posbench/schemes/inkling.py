"""Inkling's positions: learned profiles over distances, mixed by each query (transformers, models/inkling)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.schemes.base import Bias, Placement, Scheme, Shape, require_integer
from posbench.schemes.earlier import Earlier, convolution_weight, convolved
from posbench.system.torch_internals import as_dtype

EPS = 1e-6  # of the norms of queries and keys


class Inkling(Scheme):
    """Inkling's relative profiles: scores are `q_i . k_j / D + r_i . P[:, i - j]`, with q and k divided by their RMS.

    `r_i = W x_i` has `profiles` numbers for each head, x being the hidden states after the layer's norm. Each layer has
    its own W and its own table P [profiles, extent], which its heads share; distances from `extent` on add nothing. The
    norms of q and k have a learned weight per channel, so `model.qk_norm` is not needed. W and P are initialised like
    the model's matrices. Inkling's optional logarithmic scale of scores is omitted.

    Options: `profiles` (16) and `extent` (1024) of the public model; an extent beyond the training context is reduced
    to it. Raises: ConfigError unless they are whole numbers above 0.
    """

    per_layer = True
    keeps_norms = False
    reads_earlier_gates = False
    decayed = frozenset({"W", "P"})

    def __init__(self, shape: Shape, profiles: int = 16, extent: int = 1024) -> None:
        super().__init__(shape)
        self.W = self.normal(shape.num_heads * require_integer("profiles", profiles, 1, "16 in Inkling"), shape.d_model)
        extent = require_integer("extent", extent, 1, "1024 in Inkling")
        # Distances beyond the training context would never be learned.
        self.P = self.normal(profiles, min(extent, shape.context_length))
        self.q_weight, self.k_weight = (nn.Parameter(torch.ones(shape.head_dim)) for _ in range(2))

    def gate(self, x: Tensor, pos: Any) -> Tensor:
        """Return `r = W x` of each head, [B, H, T, profiles]."""
        return F.linear(x.to(self.W.dtype), self.W).unflatten(-1, (self.shape.num_heads, -1)).transpose(1, 2)

    def q(self, x: Tensor, pos: Any) -> Tensor:
        return _normed(x, self.q_weight * self.shape.head_dim**-0.5)  # attention divides by sqrt(D) once more

    def k(self, x: Tensor, pos: Any) -> Tensor:
        return _normed(x, self.k_weight)

    def bias(self, q: Tensor, k: Tensor, gates: Any, at: Placement) -> Bias:
        extent = self.P.shape[1]
        products = gates.at_query @ F.pad(self.P, (0, 1))  # [B, H, T, extent + 1], the last of which are 0
        # Later keys are masked, so their clamped distances do not matter.
        return lambda b, h, i, j: products[b, h, i, at.distance(b, i, j).clamp(min=0, max=extent)]

    def flops_per_token(self, length: int) -> float:
        return 2.0 * (self.W.numel() + self.shape.num_heads * self.P.numel())


class InklingConv(Inkling):
    """Inkling's relative profiles with its short convolutions of keys, before their norm, and of values.

    They add `sum_{n=0..width-1} w_n k_{t-n}` to k_t, with a number w_n for each channel, and the same to values. Its
    convolutions after the output projection and the feed-forward network are omitted.

    Options: `width` (4 in Inkling), and the options of `Inkling`.
    """

    decayed = Inkling.decayed | {"k_convolution", "v_convolution"}

    def __init__(self, shape: Shape, profiles: int = 16, extent: int = 1024, width: int = 4) -> None:
        super().__init__(shape, profiles, extent)
        self.looks_back = require_integer("width", width, 1, "4 in Inkling") - 1
        self.k_convolution, self.v_convolution = (
            convolution_weight(shape.num_kv_heads, 1, shape.head_dim, width) for _ in range(2)
        )

    def k(self, x: Tensor, pos: Any, earlier: Earlier) -> Tensor:  # type: ignore[override]
        return super().k(as_dtype(convolved(earlier, self.k_convolution, residual=1.0), x.dtype), pos)

    def v(self, x: Tensor, pos: Any, earlier: Earlier) -> Tensor:  # type: ignore[override]
        return as_dtype(convolved(earlier, self.v_convolution, residual=1.0), x.dtype)

    def flops_per_token(self, length: int) -> float:
        return super().flops_per_token(length) + 2.0 * (self.k_convolution.numel() + self.v_convolution.numel())


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    # The weight is float32 even if the activations are narrower.
    return as_dtype(F.rms_norm(x.to(weight.dtype), weight.shape, weight, EPS), x.dtype)
