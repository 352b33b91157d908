"""GRAPE-AP: a query is drawn away from a key by each token in between (Zhang et al. 2025, arXiv 2512.07805)."""

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
    """`bias_h(i, j) = m_h sum_{l=j+1..i} ln sigmoid(p_i . R_l n(p_l) / P)`, m_h ALiBi's slopes; never above 0.

    p = W_h x with W_h [P, C] in each layer, x the stream behind its norm, n(p) = p / rms(p), and R_l turns every pair
    of channels by l radians: by the position itself, so logits change with it. With W = 0 it is ALiBi at ln 2 times the
    slopes. W begins as the model's matrices. As in the authors' code, p_i is not normalised. The rest of their block
    (norms of q, k and heads) is left out.

    Options: `width`, P (8 in the paper's experiments). Raises: ConfigError where that is not an even number above 0.
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
        """p of each token, and n(p) turned by the token's position, [B, H, T, 2 P]."""
        p = F.linear(x.to(self.W.dtype), self.W).unflatten(-1, (-1, self.width)).transpose(1, 2)
        by = Turn(*(part.expand(*part.shape[:-1], self.width // 2) for part in pos))
        return torch.cat((p, turn(F.rms_norm(p, (self.width,)), by)), dim=-1)

    def bias(self, q: Tensor, k: Tensor, gates: Any, at: Placement) -> Bias:
        p, turned = gates.at_query[..., : self.width], gates.at_key[..., self.width :]
        steps = F.logsigmoid(p @ turned.mT / self.width) * torch.exp2(self.exponents)[:, None, None]
        rows, keys = (torch.arange(n, device=q.device) for n in steps.shape[2:])
        steps = steps.masked_fill(at.is_later(rows[:, None], keys), 0.0)
        added = F.pad(steps[..., 1:], (0, 1)).flip(-1).cumsum(-1).flip(-1)  # over the tokens behind the key
        return lambda b, h, i, j: added[b, h, i, j]

    def flops_per_token(self, length: int) -> float:
        """Of the map, and of the products with half the tokens on average."""
        return 2.0 * self.W.numel() + float(self.shape.num_heads * self.width * length)
