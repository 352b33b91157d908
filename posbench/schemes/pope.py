"""PoPE: content in the magnitudes and position in the angles of polar coordinates (arXiv 2509.10534)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.config import ConfigError
from posbench.schemes.base import Scheme, Shape


class Angles(NamedTuple):
    """Cosines and sines of `p w_c`, [T, D] each."""

    cos: Tensor
    sin: Tensor


class PopeLayer(Scheme):
    """One layer's: `sum_c softplus(q_c) softplus(k_c) cos(d w_c + delta_c)`, d the distance, `w_c = base ** (-c / D)`.

    delta [H, D] is learned from 0. Each channel becomes two, a cosine's and a sine's, so q and k come back 2 D wide.
    """

    keeps_norms = False

    def __init__(self, shape: Shape, base: float) -> None:
        super().__init__(shape)
        self.base = base
        self.delta = nn.Parameter(torch.zeros(shape.num_heads, shape.head_dim))

    def prepare(self, pos: Tensor, length: int) -> Angles:
        D = self.shape.head_dim
        inv_freq = self.base ** (-torch.arange(D, dtype=torch.float64, device=pos.device) / D)
        angles = pos.to(torch.float64)[:, None] * inv_freq
        return Angles(angles.cos(), angles.sin())

    def q(self, x: Tensor, pos: Any) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        delta = self.delta.to(wide)[:, None]  # [H, 1, D]
        cos, sin = pos.cos.to(wide), pos.sin.to(wide)
        return _polar(x, cos * delta.cos() - sin * delta.sin(), sin * delta.cos() + cos * delta.sin())

    def k(self, x: Tensor, pos: Any) -> Tensor:
        return _polar(x, pos.cos, pos.sin)


def _polar(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The magnitudes softplus(x) [..., T, D] at their angles, [..., T, 2 D], in x's dtype."""
    wide = torch.promote_types(x.dtype, torch.float32)
    magnitude = F.softplus(x.to(wide))
    return torch.cat((magnitude * cos.to(wide), magnitude * sin.to(wide)), dim=-1).to(x.dtype)


class Pope(Scheme):
    """PoPE in every layer, each with its own delta. Options: `base` (10000 as in the paper).

    Raises: ConfigError for a base that is not above 1.
    """

    keeps_norms = False

    def __init__(self, shape: Shape, base: float = 10000.0) -> None:
        super().__init__(shape)
        if isinstance(base, bool) or not isinstance(base, (int, float)) or not 1 < base < 1e15:
            raise ConfigError(f"scheme.base={base} must lie above 1 and below 1e15 (10000 is usual)")
        self.layers = nn.ModuleList(PopeLayer(shape, float(base)) for _ in range(shape.num_layers))

    @property
    def acts_on(self) -> frozenset[str]:
        return frozenset({"q", "k"})

    def layer(self, n: int) -> Scheme:
        layer = self.layers[n]
        assert isinstance(layer, Scheme)
        return layer
