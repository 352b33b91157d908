"""Multiply queries with learned vectors of distances, or of counted tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from posbench.config import ConfigError
from posbench.schemes.base import Bias, Placement, Scheme, Shape, require_integer
from posbench.schemes.rotary import Turn, inverse_frequencies, turn


class Shaw(Scheme):
    """Relative keys: add `q_i . a_min(i - j, clip) / sqrt(D)` to the scores, with a learned table a [clip + 1, D].

    Queries are multiplied with a learned vector per distance (Shaw et al. 2018, arXiv 1803.02155).

    Each layer has its own table, learned from 0 and shared by heads (section 3.3). The paper's vectors for values are
    omitted.
    Options: `clip`, the distance in tokens from which all distances share a vector (16 in the paper).
    Raises: ConfigError unless `clip` is a whole number above 0.
    """

    per_layer = True

    def __init__(self, shape: Shape, clip: int = 16) -> None:
        super().__init__(shape)
        self.table = nn.Parameter(torch.zeros(require_integer("clip", clip, 1, "16 in the paper") + 1, shape.head_dim))

    def bias(self, q: Tensor, k: Tensor, gates: Any, at: Placement) -> Bias:
        wide = torch.promote_types(q.dtype, torch.float32)
        # Another scheme may have made q wider; only its first D channels are content.
        D, clip = self.shape.head_dim, len(self.table) - 1
        products = q[..., :D].to(wide) @ self.table.to(wide).t() * D**-0.5  # [B, H, T, clip + 1]
        # Later keys are masked, so their clamped distances do not matter.
        return lambda b, h, i, j: products[b, h, i, at.distance(b, i, j).clamp(min=0, max=clip)]

    def flops_per_token(self, length: int) -> float:
        return 2.0 * self.shape.num_heads * self.table.numel()


class Cope(Scheme):
    """CoPE: add `q_i . e[p_ij] / sqrt(D)`, with `p_ij = sum_{t=j..i} sigmoid(q_i . k_t / sqrt(D))`, to the scores.

    A learned gate decides which tokens a query counts as distance (Golovneva et al. 2024, arXiv 2405.18719).

    p is limited to `positions - 1`. The vectors e [positions, D] are learned from 0 in each layer, shared by heads and
    interpolated at fractional p.

    Options: `positions`, the number of vectors (64 in the paper's language models).
    Raises: ConfigError unless it is a whole number above 1.
    """

    per_layer = True
    reads_keys = True
    has_kinks = True

    def __init__(self, shape: Shape, positions: int = 64) -> None:
        super().__init__(shape)
        self.e = nn.Parameter(
            torch.zeros(require_integer("positions", positions, 2, "64 in the paper"), shape.head_dim)
        )

    def bias(self, q: Tensor, k: Tensor, gates: Any, at: Placement) -> Bias:
        scores = scaled_scores(q, k, self.shape.head_dim)
        i = torch.arange(q.shape[2], device=q.device)[:, None]
        j = torch.arange(k.shape[2], device=q.device)
        # The sum over t reads later keys too, and the mask of attention comes too late to exclude them.
        counted = scores.sigmoid().masked_fill(at.is_later(i, j), 0.0)
        # Flipped, a running sum goes from the query back to each key.
        position = counted.flip(-1).cumsum(-1).flip(-1).clamp(max=len(self.e) - 1)  # [B, H, T, keys]
        lower = position.floor().long()
        D = self.shape.head_dim  # another scheme may have appended channels to q
        # All whole positions at once, then the two around p: the vectors are few, pairs of query and key are many. That
        # q . e is divided by sqrt(D) too follows the authors' code; the paper shows it only for q . k.
        at_whole = q[..., :D].to(scores.dtype) @ self.e.to(scores.dtype).t() * D**-0.5  # [B, H, T, positions]
        low, high = at_whole.gather(-1, lower), at_whole.gather(-1, (lower + 1).clamp(max=len(self.e) - 1))
        added = torch.lerp(low, high, position - lower)
        return lambda b, h, i, j: added[b, h, i, j]

    def flops_per_token(self, length: int) -> float:
        """Return the FLOPs per token of q . e in one layer; attention computes q . k anyway."""
        return 2.0 * self.shape.num_heads * self.e.numel()


def scaled_scores(q: Tensor, k: Tensor, head_dim: int) -> Tensor:
    """Return scores `q . k / sqrt(D)` [B, H, T, keys], at least float32, for q [B, H, T, .], k [B, Hkv, keys, .]."""
    wide = torch.promote_types(q.dtype, torch.float32)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return q.to(wide) @ k.to(wide).mT * head_dim**-0.5


class TransformerXL(Scheme):
    """Transformer-XL: compute scores as `((q_i + u) . k_j + (q_i + v) . W r_(i-j)) / sqrt(D)`.

    u and v, [H, D] each, are learned from 0 and shared by all layers, as in the paper; each layer has its own W [H D,
    channels]. r_d holds sines and cosines of the distance d, (sin(d w_t) ..., cos(d w_t) ...) (Dai et al. 2019, arXiv
    1901.02860, section 3.3).

    With (a, c) = W^T (q_i + v), the second term is the sum over t of

        a_t sin((i-j) w_t) + c_t cos((i-j) w_t) = cos(j w_t) (c_t cos(i w_t) + a_t sin(i w_t))
                                                + sin(j w_t) (c_t sin(i w_t) - a_t cos(i w_t))

    This is the dot product of two vectors: (c, -a) rotated by the query's position, and the cosines and sines of the
    key's position. They are appended to q and k as extra channels, so no T x T tensor is needed.

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
        return Turn.of(angles)

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
