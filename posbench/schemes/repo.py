"""RePo: each token says where it stands, and q and k turn by that (Li et al. 2025, arXiv 2512.14391)."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from posbench.schemes.base import Scheme, Shape, number, whole
from posbench.schemes.rotary import Turn, inverse_frequencies, turn


class Repo(Scheme):
    """q and k turned by `z_i w_t`, `z_i = u . (silu(G x_i) * A x_i)` and `w_t = base ** (-2t / D)`: no index at all.

    x is the stream behind the layer's norm. G and A [width, C] are of each layer, u [width] of each key head, whose
    queries turn alike. All begin as the model's matrices, so all tokens begin near 0, and the row near NoPE. The paper
    continues a model trained with RoPE and re-positions its upper two thirds; `layers: [qk_rope, repo, repo]` does.

    Options: `base` (500000 as in the authors' code), `width` (C / 8 in the paper, where null).
    Raises: ConfigError for a base that is not above 1 or a width that is not a whole number above 0.
    """

    per_layer = True
    decayed = frozenset({"G", "A", "u"})

    def __init__(self, shape: Shape, base: float = 500000.0, width: int | None = None) -> None:
        super().__init__(shape)
        self.base = number("base", base, 1.001, 1e15, "500000 is the authors'")
        wide = whole("width", shape.d_model // 8 if width is None else width, 1, "C / 8 in the paper")
        self.G, self.A = self.normal(wide, shape.d_model), self.normal(wide, shape.d_model)
        self.u = self.normal(shape.num_kv_heads, wide)

    def gate(self, x: Tensor, pos: Any) -> Tensor:
        """z of each token, [B, Hkv, T, 1] float64: it becomes an angle."""
        x = x.to(self.G.dtype)
        z = F.linear(F.silu(F.linear(x, self.G)) * F.linear(x, self.A), self.u)
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
