"""Transformer-XL's scores (Dai et al. 2019, arXiv 1901.02860, section 3.3) as plain dot products, for any kernel.

    s_ij = ((q_i + u) . k_j + (q_i + v) . W r_(i-j)) / sqrt(D),     r_d = (sin(d w_t) ..., cos(d w_t) ...)

With (a, c) = W^T (q_i + v), the second term is the sum over t of

    a_t sin((i-j) w_t) + c_t cos((i-j) w_t) = cos(j w_t) (c_t cos(i w_t) + a_t sin(i w_t))
                                            + sin(j w_t) (c_t sin(i w_t) - a_t cos(i w_t))

This is the dot product of two vectors: (c, -a) rotated by the query's position, and the cosines and sines of the key's
position. They are appended to q and k as extra channels, so no T x T tensor is needed.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from posbench.config import ConfigError
from posbench.schemes.base import Scheme, Shape
from posbench.schemes.rotary import Turn, inverse_frequencies, turn


class TransformerXL(Scheme):
    """Transformer-XL: compute scores as `((q_i + u) . k_j + (q_i + v) . W r_(i-j)) / sqrt(D)`.

    u and v, [H, D] each, are learned from 0 and shared by all layers, as in the paper; each layer has its own W [H D,
    channels]. r_d holds sines and cosines of the distance d.

    Options: `channels`, the length of r; by default head_dim (scores then use 2 D channels), d_model in the paper.
    Raises: ConfigError unless it is an even number above 0.
    """

    group = "biases on the scores"  # implemented by extra channels of q and k
    keeps_norms = False
    per_layer = ("matrix",)
    decayed = frozenset({"matrix"})

    def __init__(self, shape: Shape, channels: int | None = None) -> None:
        super().__init__(shape)
        channels = shape.head_dim if channels is None else channels
        if not isinstance(channels, int) or isinstance(channels, bool) or channels < 2 or channels % 2:
            raise ConfigError(
                f"scheme.channels={channels} must be an even number above 0, half of them sines and half cosines: "
                f"{shape.head_dim} is the width of a head, {shape.d_model} the paper's choice"
            )
        self.content = nn.Parameter(torch.zeros(shape.num_heads, shape.head_dim))  # u
        self.position = nn.Parameter(torch.zeros(shape.num_heads, shape.head_dim))  # v
        self.matrix = self.normal(shape.num_heads * shape.head_dim, channels)  # W of one layer (`per_layer`)

    def prepare(self, pos: Tensor, length: int) -> Turn:
        """Return cosines and sines of `p * 10000 ** (-2t / channels)` at positions p, [T, channels / 2] float64."""
        angles = pos.to(torch.float64)[..., None] * inverse_frequencies(self.matrix.shape[1], 10000.0, pos.device)
        return Turn(angles.cos(), angles.sin())

    def q(self, x: Tensor, pos: Turn) -> Tensor:
        u, v = (vectors.to(x.dtype)[:, None] for vectors in (self.content, self.position))  # [H, 1, D]
        by_head = self.matrix.to(x.dtype).unflatten(0, (self.shape.num_heads, -1))  # [H, D, channels]
        a, c = ((x + v) @ by_head).chunk(2, dim=-1)
        return torch.cat((x + u, turn(torch.cat((c, -a), dim=-1), pos)), dim=-1)

    def k(self, x: Tensor, pos: Turn) -> Tensor:
        waves = torch.cat((pos.cos, pos.sin), dim=-1).to(x.dtype)  # equal for all sequences and heads
        return torch.cat((x, waves.expand(*x.shape[:2], -1, -1)), dim=-1)

    def flops_per_token(self, length: int) -> float:
        """Return the FLOPs per token, in one layer, of the matrix W and of the channels appended to q and k."""
        # On average a query sees half of the `length` keys.
        return 2.0 * self.matrix.numel() + 1.0 * self.shape.num_heads * self.matrix.shape[1] * length
