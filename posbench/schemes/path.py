"""PaTH: each token between a key and a query reflects the query vector (Yang et al. 2025, arXiv 2505.16381)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.config import ConfigError
from posbench.schemes.base import Bias, Placement, Scheme, Shape, require_integer
from posbench.schemes.earlier import Earlier, convolution_weight, convolved

BLOCK = 32  # rows of queries and keys whose reflections are multiplied together


class Path(Scheme):
    """PaTH: position by accumulated Householder reflections; scores are `k_j^T H_(j+1) ... H_i q_i / sqrt(D)`.

    `H_t = 1 - b_t w_t w_t^T` is the reflection at token t, `b_t = 2 sigmoid(u . x_t + c)`, and w_t is the unit vector
    along `B A x_t`, A [rank, C] and B [D, rank], x being the hidden states after the layer's norm. Each key head has
    its own w and b. A, B and u are initialised like the model's matrices and c to 0.

    Options: `rank` (32 in the authors' code); `convolution`, the width of a short convolution over tokens (3 in the
    authors' code), or None: `B A x_t` becomes `silu(sum_n w_n B A x_{t-n})`, with a number w_n for each channel.
    Raises: ConfigError unless they are whole numbers above 0.
    """

    per_layer = True
    reads_keys = True
    decayed = frozenset({"A", "B", "u", "convolution"})

    def __init__(self, shape: Shape, rank: int = 32, convolution: int | None = None) -> None:
        super().__init__(shape)
        require_integer("rank", rank, 1, "32 is the authors'")
        self.A = self.normal(rank, shape.d_model)
        # As in the authors' code; but theirs has full rank if there are fewer key heads than query heads.
        self.B = self.normal(shape.num_kv_heads * shape.head_dim, rank)
        self.u = self.normal(shape.num_kv_heads, shape.d_model)
        self.c = nn.Parameter(torch.zeros(shape.num_kv_heads))
        self.convolution = None
        if convolution is not None:
            self.looks_back = require_integer("convolution", convolution, 1, "3 is the authors'") - 1
            self.convolution = convolution_weight(len(self.B), convolution)

    def gate(self, x: Tensor, pos: Any, earlier: Earlier) -> Tensor:  # type: ignore[override]
        """Return w and b of each token's reflection, concatenated: [B, Hkv, T, D + 1]."""

        def directions(n: int) -> Tensor:
            return F.linear(F.linear(earlier(n).to(self.A.dtype), self.A), self.B)

        w = directions(0) if self.convolution is None else F.silu(convolved(directions, self.convolution))
        w = F.normalize(w.unflatten(-1, (self.shape.num_kv_heads, -1)), dim=-1)
        b = 2 * F.linear(x.to(self.u.dtype), self.u, self.c).sigmoid()
        return torch.cat((w, b[..., None]), dim=-1).transpose(1, 2)

    def bias(self, q: Tensor, k: Tensor, gates: Any, at: Placement) -> Bias:
        D = self.shape.head_dim
        if q.shape[-1] != D:
            raise ConfigError(
                f"path needs queries of {D} channels; another scheme in scheme.of made them {q.shape[-1]} wide"
            )
        dtype = torch.promote_types(q.dtype, torch.float32)
        q, k = q.to(dtype), k.to(dtype).repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        w, strength = gates.at_key.to(dtype).split((D, 1), dim=-1)
        # Attention adds q . k itself, so the bias is the difference.
        added = (reflected(q, k, w, strength) - q @ k.mT) * D**-0.5
        return lambda b, h, i, j: added[b, h, i, j]

    def flops_per_token(self, length: int) -> float:
        """Return the FLOPs per token, in one layer, of computing the reflections, applying them, and scoring twice."""
        D, H = self.shape.head_dim, self.shape.num_heads
        maps = 2.0 * (sum(parameter.numel() for parameter in self.parameters()) - len(self.c))
        within = 2.0 * H * BLOCK * (5 * D + 2 * BLOCK)  # products with w, the inverse, and what it multiplies
        # Half of the `length` keys on average: 2 D to score each once more, and 2 D * D for each block of them.
        return maps + within + H * length * D * (1 + D / BLOCK)


def reflected(q: Tensor, k: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Return the unscaled scores `k_j^T H_(j+1) ... H_i q_i`, [B, H, Tq, T]; undefined for keys after the query.

    Arguments: q, the queries of the last Tq tokens, [B, H, Tq, D]; k and w [B, H, T, D]; b [B, H, T, 1].
    """
    T, rows = k.shape[2], q.shape[2]
    first = (T - rows) // BLOCK  # the block of the first query
    begin, padding = T - rows - first * BLOCK, -T % BLOCK  # rows of zeros that fill the first and the last block
    q = F.pad(q, (0, 0, begin, padding)).unflatten(2, (-1, BLOCK))  # [B, H, blocks of queries, BLOCK, D]
    k, w, b = (F.pad(x, (0, 0, 0, padding)).unflatten(2, (-1, BLOCK)) for x in (k, w, b))
    # In blocks (section 3.2 of the paper): a product of reflections is 1 - W^T M W, M = (1 + b triu(W W^T))^-1 b.
    between = b * (w @ w.mT).triu(1)
    identity = torch.eye(BLOCK, dtype=w.dtype, device=w.device)
    inverse = torch.linalg.solve_triangular(identity + between, identity * b, upper=True, unitriangular=True)  # M
    w_dot_k = (w @ k.mT).tril(-1)  # only reflections after the key, in its block
    q_dot_w = (q @ w[:, :, first:].mT).tril()  # only reflections up to the query, in its block
    # Scores of keys and queries of the same block, and queries moved back to the start of their block.
    back = q_dot_w @ inverse[:, :, first:].mT
    # Both become tuples with one tensor for each block of queries.
    inside = (q @ k[:, :, first:].mT - back @ w_dot_k[:, :, first:]).unbind(2)
    q_back = (q - back @ w[:, :, first:]).unbind(2)
    keys_at_end = k - w_dot_k.mT @ inverse @ w  # keys moved to the end of their block
    keys_and_w, updates = torch.cat((keys_at_end, w), dim=3).unbind(2), (inverse.mT @ w).unbind(2)
    # From the last block of keys to the first: score all later queries, then move them back across the block.
    queries = q[:, :, 0, :0]  # the queries after the current block, [B, H, rows, D]
    columns = []
    for n in reversed(range(len(keys_and_w))):
        # The scores of the block's keys, and the products with its w.
        column, along = (queries @ keys_and_w[n].mT).split(BLOCK, dim=-1)
        queries = queries - along @ updates[n]
        if n >= first:  # this block has queries too; queries of earlier blocks do not see its keys
            column = F.pad(torch.cat((inside[n - first], column), dim=2), (0, 0, (n - first) * BLOCK, 0))
            queries = torch.cat((q_back[n - first], queries), dim=2)
        columns.append(column)
    return torch.cat(columns[::-1], dim=3)[:, :, begin : begin + rows, :T]
