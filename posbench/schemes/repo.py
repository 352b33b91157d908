"""RePo: each token computes its own position, which rotates q and k (Li et al. 2025, arXiv 2512.14391)."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from posbench.schemes.base import Scheme, Shape, require_integer, require_number
from posbench.schemes.rotary import Turn, inverse_frequencies, turn


class Repo(Scheme):
    """RePo: rotate q and k by `z_i w_t`, with computed positions `z_i = u . (silu(G x_i) * A x_i)` instead of indices.

    `w_t = base ** (-2t / D)`; x is the hidden states after the layer's norm. G and A [width, C] belong to each layer
    and u [width] to each key head and its queries. All are initialised like the model's matrices, so the scheme starts
    near NoPE. The paper changes the upper two thirds of a model trained with RoPE; `layers: [qk_rope, repo, repo]` has
    RePo in two thirds of the layers.

    Options: `base` (500000 as in the authors' code), `width` (null means C / 8, as in the paper).
    Raises: ConfigError unless the base is above 1 and the width a whole number above 0.
    """

    per_layer = True
    reads_earlier_gates = False
    decayed = frozenset({"G", "A", "u"})

    def __init__(self, shape: Shape, base: float = 500000.0, width: int | None = None) -> None:
        super().__init__(shape)
        self.base = require_number("base", base, 1.001, 1e15, "500000 is the authors'")
        width = require_integer("width", shape.d_model // 8 if width is None else width, 1, "C / 8 in the paper")
        self.G, self.A = self.normal(width, shape.d_model), self.normal(width, shape.d_model)
        self.u = self.normal(shape.num_kv_heads, width)

    def gate(self, x: Tensor, pos: Any) -> Tensor:
        """Return the computed position z of each token, [B, Hkv, T, 1] float64."""
        x = x.to(self.G.dtype)
        z = F.linear(F.silu(F.linear(x, self.G)) * F.linear(x, self.A), self.u)
        # It becomes an angle, which needs float64.
        return z.double().mT[..., None]

    def locate(self, pos: Any, gates: Any) -> Turn:
        z = gates.at_query
        angles = z * inverse_frequencies(self.shape.head_dim, self.base, z.device)
        return Turn(angles.cos(), angles.sin())

    def q(self, x: Tensor, pos: Turn) -> Tensor:
        return turn(x, pos)

    def k(self, x: Tensor, pos: Turn) -> Tensor:
        return turn(x, pos)

    def flops_per_token(self, length: int) -> float:
        return 2.0 * (self.G.numel() + self.A.numel() + self.u.numel())
