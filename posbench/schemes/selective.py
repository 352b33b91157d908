"""Rotate by angles that the hidden states choose."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.schemes.base import Scheme, Shape, require_integer, require_number
from posbench.schemes.earlier import Earlier, convolution_weight, convolved
from posbench.schemes.rotary import Turn, inverse_frequencies, turn


class Repo(Scheme):
    """RePo: rotate q and k by `z_i w_t`, with computed positions `z_i = u . (silu(G x_i) * A x_i)` instead of indices.

    Each token computes its own position, which rotates q and k (Li et al. 2025, arXiv 2512.14391).

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
        return Turn.of(angles)

    def q(self, x: Tensor, pos: Turn) -> Tensor:
        return turn(x, pos)

    def k(self, x: Tensor, pos: Turn) -> Tensor:
        return turn(x, pos)

    def flops_per_token(self, length: int) -> float:
        return 2.0 * (self.G.numel() + self.A.numel() + self.u.numel())


class SelectiveRope(Scheme):
    """Selective RoPE: rotate pair t of q and k by `w_t (i e^(b_t) + sum_{l=0..i} u_t . V x_l / |x_l|)`.

    Each token adds a learned amount to the rotation angles (Movahedi et al. 2025, arXiv 2511.17388).

    `w_t = base ** (-2t / D)`; x is the hidden states after the layer's norm. Each layer has its own V [rank, C], and
    each of its key heads, with its queries, its own u [D/2, rank] and b [D/2]. V and u are initialised like the model's
    matrices and b to 0, so the scheme starts near RoPE. The paper's gate is omitted.

    Options: `base` and `rank` (500000 and 16, as in the authors' code); `convolution`, the width of a short convolution
    over tokens (4 in the authors' code), or None: `a_l = u_t . V x_l / |x_l|` becomes `sum_n c_n a_{l-n}`, with a
    number c_n for each pair.
    Raises: ConfigError unless the base is above 1, and the rank and the width are whole numbers above 0.
    """

    per_layer = True
    decayed = frozenset({"V", "u", "convolution"})
    frequency_bits: Tensor

    def __init__(self, shape: Shape, base: float = 500000.0, rank: int = 16, convolution: int | None = None) -> None:
        super().__init__(shape)
        base = require_number("base", base, 1.001, 1e15, "500000 is the authors'")
        frequencies = inverse_frequencies(shape.head_dim, base)
        # Stored as int64 bits, so that casting the model to float32 keeps them in float64. They are not recomputed in
        # `locate`, because torch 2.11 cannot compile that after a running sum on a GPU.
        self.register_buffer("frequency_bits", frequencies.view(torch.int64), persistent=False)
        # V and u are drawn later, by `initialise`.
        self.V = self.normal(require_integer("rank", rank, 1, "16 is the authors'"), shape.d_model)
        self.u = self.normal(shape.num_kv_heads * shape.head_dim // 2, rank)
        self.b = nn.Parameter(torch.zeros(shape.num_kv_heads * shape.head_dim // 2))
        self.convolution = None
        if convolution is not None:
            self.looks_back = require_integer("convolution", convolution, 1, "4 is the authors'") - 1
            self.convolution = convolution_weight(len(self.u), convolution)

    def gate(self, x: Tensor, pos: Any, earlier: Earlier) -> Tensor:  # type: ignore[override]
        """Return the angle, [B, Hkv, T, D/2], that each token adds."""

        def angles(n: int) -> Tensor:
            # The authors' code divides each head's part of x by its own norm.
            return F.linear(F.linear(F.normalize(earlier(n).to(self.V.dtype), dim=-1), self.V), self.u)

        selected = angles(0) if self.convolution is None else convolved(angles, self.convolution)
        # Float64, because the sums become angles.
        return selected.double().unflatten(-1, (self.shape.num_kv_heads, -1)).transpose(1, 2)

    def locate(self, pos: Any, gates: Any) -> Turn:
        selected, Hkv = gates.sum_at_query, self.shape.num_kv_heads
        # e^b of each key head, for the heads of this call: H for q and o, Hkv for k and v.
        per_token = self.b.double().exp().unflatten(-1, (Hkv, 1, -1))
        per_token = per_token.repeat_interleave(selected.shape[1] // Hkv, dim=0)  # [heads, 1, D/2]
        turns = pos.double()[..., None] * per_token + selected  # [B, heads, T, D/2]
        angles = turns * self.frequency_bits.view(torch.float64)
        return Turn.of(angles)

    def q(self, x: Tensor, pos: Turn) -> Tensor:
        return turn(x, pos)

    def k(self, x: Tensor, pos: Turn) -> Tensor:
        return turn(x, pos)

    def flops_per_token(self, length: int) -> float:
        return 2.0 * (sum(parameter.numel() for parameter in self.parameters()) - len(self.b))


class SelectiveQkvoRope(SelectiveRope):
    """Selective RoPE that also rotates values, and the attention output back (arXiv 2606.24975).

    So `o_i = sum_j a_ij R(A_j - A_i) v_j`, with A_i the angles summed up to token i.

    Options: those of `SelectiveRope`.
    """

    moves_k_and_v_alike = True

    def v(self, x: Tensor, pos: Turn) -> Tensor:
        return turn(x, pos)

    def o(self, x: Tensor, pos: Turn) -> Tensor:
        return turn(x, pos, inverse=True)
