"""Selective RoPE: rotations by angles that each token moves on or back (Movahedi et al. 2025, arXiv 2511.17388)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.schemes.base import Scheme, Shape, number, whole
from posbench.schemes.rotary import Turn, inverse_frequencies, turn


class SelectiveRope(Scheme):
    """q and k turned by `w_t (i e^b_t + sum_{l=0..i} u_t . V x_l / |x_l|)` in pair t, `w_t = base ** (-2t / D)`.

    x is the stream behind the layer's norm. V [rank, C], u [D/2, rank] and b [D/2] are of each layer, u and b of each
    key head, whose queries turn alike. V and u begin as the model's matrices and b at 0, near RoPE. Of the paper's
    module this is the low-rank map with its constant; its short convolution, which needs earlier rows of the stream,
    and its gate are left out. The authors' code divides each head's part of x by a norm of its own.

    Options: `base` (500000 as in the authors' code), `rank` (16 there).
    Raises: ConfigError for a base that is not above 1 or a rank that is not a whole number above 0.
    """

    per_layer = True
    decayed = frozenset({"V", "u"})
    frequency_bits: Tensor

    def __init__(self, shape: Shape, base: float = 500000.0, rank: int = 16) -> None:
        super().__init__(shape)
        frequencies = inverse_frequencies(shape.head_dim, number("base", base, 1.001, 1e15, "500000 is the authors'"))
        # Their bits, so that a model in float32 keeps them in float64. torch 2.11 does not compile them computed anew
        # behind a running sum on a GPU.
        self.register_buffer("frequency_bits", frequencies.view(torch.int64), persistent=False)
        self.V = self.normal(whole("rank", rank, 1, "16 is the authors'"), shape.d_model)
        self.u = self.normal(shape.num_kv_heads * shape.head_dim // 2, rank)
        self.b = nn.Parameter(torch.zeros(shape.num_kv_heads * shape.head_dim // 2))

    def gate(self, x: Tensor, pos: Any) -> Tensor:
        """What each token adds beside the constant, [B, Hkv, T, D/2] float64: sums of thousands become angles."""
        selected = F.linear(F.linear(F.normalize(x.to(self.V.dtype), dim=-1), self.V), self.u)
        return selected.double().unflatten(-1, (self.shape.num_kv_heads, -1)).transpose(1, 2)

    def locate(self, pos: Any, gates: Any) -> Turn:
        selected, Hkv = gates.sum_at_query, self.shape.num_kv_heads
        each = self.b.double().exp().unflatten(-1, (Hkv, 1, -1)).repeat_interleave(selected.shape[1] // Hkv, dim=0)
        turns = pos.double()[..., None] * each + selected  # [B, heads, T, D/2]
        angles = turns * self.frequency_bits.view(torch.float64)
        return Turn(angles.cos(), angles.sin())

    def q(self, x: Tensor, pos: Turn) -> Tensor:
        return turn(x, pos)

    def k(self, x: Tensor, pos: Turn) -> Tensor:
        return turn(x, pos)

    def flops_per_token(self, length: int) -> float:
        return 2.0 * (self.V.numel() + self.u.numel())
