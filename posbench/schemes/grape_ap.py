"""GRAPE-AP: each token between key and query adds a learned penalty (Zhang et al. 2025, arXiv 2512.07805)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from posbench.config import ConfigError
from posbench.schemes.alibi import exponents
from posbench.schemes.base import Bias, Placement, Scheme, Shape
from posbench.schemes.rotary import Turn, turn


class GrapeAp(Scheme):
    """GRAPE-AP: add the bias `m_h sum_{l=j+1..i} ln sigmoid(p_i . R_l n(p_l) / P)` <= 0, m_h being ALiBi's slopes.

    p = W_h x with W_h [P, C] in each layer, x the hidden states after the norm, and n(p) = p / rms(p). R_l rotates
    every pair of channels by l radians, so logits depend on absolute position. With W = 0 it is ALiBi with ln 2 times
    the slopes. W is initialised like the model's matrices. As in the authors' code, p_i is not normalised. Their norms
    of q, k and heads are omitted.

    Options: `width`, P (8 in the paper's experiments). Raises: ConfigError unless it is an even number above 0.
    """

    per_layer = True
    is_relative = False
    decayed = frozenset({"W"})
    exponents: Tensor

    def __init__(self, shape: Shape, width: int = 8) -> None:
        super().__init__(shape)
        if not isinstance(width, int) or isinstance(width, bool) or width < 2 or width % 2:
            raise ConfigError(f"scheme.width={width} must be an even number above 0 (8 is the paper's)")
        self.width = width
        self.W = self.normal(shape.num_heads * width, shape.d_model)
        self.register_buffer("exponents", exponents(shape.num_heads), persistent=False)

    def prepare(self, pos: Tensor, length: int) -> Turn:
        angles = pos.double()[..., None]
        return Turn(angles.cos(), angles.sin())

    def gate(self, x: Tensor, pos: Turn) -> Tensor:
        """Return p = W_h x of each token, then p / rms(p) rotated by its position: [B, H, T, 2 P]."""
        p = F.linear(x.to(self.W.dtype), self.W).unflatten(-1, (-1, self.width)).transpose(1, 2)
        # All pairs of channels turn by the same angle, the position in radians.
        cos_sin = Turn(*(part.expand(*part.shape[:-1], self.width // 2) for part in pos))
        return torch.cat((p, turn(F.rms_norm(p, (self.width,)), cos_sin)), dim=-1)

    def bias(self, q: Tensor, k: Tensor, gates: Any, at: Placement) -> Bias:
        p, turned = gates.at_query[..., : self.width], gates.at_key[..., self.width :]
        steps = F.logsigmoid(p @ turned.mT / self.width) * torch.exp2(self.exponents)[:, None, None]
        rows, keys = (torch.arange(n, device=q.device) for n in steps.shape[2:])
        # Steps at later tokens count for no key, and the mask of attention comes after the sum.
        steps = steps.masked_fill(at.is_later(rows[:, None], keys), 0.0)
        added = F.pad(steps[..., 1:], (0, 1)).flip(-1).cumsum(-1).flip(-1)  # sums over the tokens after the key
        return lambda b, h, i, j: added[b, h, i, j]

    def flops_per_token(self, length: int) -> float:
        """Return the FLOPs per token of p = W x and of the products p_i . p_l in one layer."""
        # On average a query sees half of the `length` tokens.
        return 2.0 * self.W.numel() + float(self.shape.num_heads * self.width * length)
