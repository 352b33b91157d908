"""PoPE: content in the magnitudes and position in the angles of polar coordinates (arXiv 2509.10534)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.schemes.base import Scheme, Shape, require_number
from posbench.schemes.rotary import Turn


class Pope(Scheme):
    """PoPE: compute scores as `sum_c softplus(q_c) softplus(k_c) cos(d w_c + delta_c)`, d being the distance.

    `w_c = base ** (-c / D)`. delta [H, D] is learned from 0 in each layer; the paper's has the opposite sign and is
    bounded to [-2 pi, 0]. Each channel becomes a cosine and a sine, so q and k get 2 D wide.
    Options: `base` (10000 as in the paper). Raises: ConfigError unless it is above 1.
    """

    keeps_norms = False
    per_layer = True

    def __init__(self, shape: Shape, base: float = 10000.0) -> None:
        super().__init__(shape)
        self.base = require_number("base", base, 1.001, 1e15, "10000 is usual")
        self.delta = nn.Parameter(torch.zeros(shape.num_heads, shape.head_dim))

    def prepare(self, pos: Tensor, length: int) -> Turn:
        """Return the cosines and sines of `p w_c` at positions p, [T, D] float64 each."""
        D = self.shape.head_dim
        inv_freq = self.base ** (-torch.arange(D, dtype=torch.float64, device=pos.device) / D)
        angles = pos.to(torch.float64)[..., None] * inv_freq
        return Turn(angles.cos(), angles.sin())

    def q(self, x: Tensor, pos: Turn) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        delta = self.delta.to(wide)[:, None]  # [H, 1, D]
        cos, sin = pos.cos.to(wide), pos.sin.to(wide)
        # Cosine and sine of (p w + delta) by the sum formulas: p w is shared by the layers, delta is the layer's.
        return _polar(x, cos * delta.cos() - sin * delta.sin(), sin * delta.cos() + cos * delta.sin())

    def k(self, x: Tensor, pos: Turn) -> Tensor:
        return _polar(x, pos.cos, pos.sin)

    def flops_per_token(self, length: int) -> float:
        """Return the extra FLOPs per token, in one layer, of scores with 2 D instead of D channels."""
        # On average a query sees half of the `length` keys.
        return 1.0 * self.shape.num_heads * self.shape.head_dim * length


def _polar(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    magnitude = F.softplus(x.to(wide))
    return torch.cat((magnitude * cos.to(wide), magnitude * sin.to(wide)), dim=-1).to(x.dtype)
