"""PaTH: what stands between a key and its query reflects it (Yang et al. 2025, arXiv 2505.16381)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.config import ConfigError
from posbench.schemes.base import Bias, Placement, Scheme, Shape, whole

BLOCK = 32  # rows of queries and of keys whose reflections are multiplied out together


class Path(Scheme):
    """`k_j^T H_(j+1) ... H_i q_i / sqrt(D)` for the scores, `H_t = 1 - b_t w_t w_t^T`, `b_t = 2 sigmoid(u . x_t + c)`.

    w_t is the direction of `B A x_t`, A [rank, C] and B [D, rank], x the stream behind the layer's norm; b and w are of
    each key head. A, B and u begin as the model's matrices and c at 0. The paper's short convolution of w, which needs
    earlier rows of the stream, is left out. With fewer key heads the authors' map to w has full rank.

    Options: `rank` (32 in the authors' code). Raises: ConfigError where that is not a whole number.
    """

    per_layer = True
    reads_keys = True
    decayed = frozenset({"A", "B", "u"})

    def __init__(self, shape: Shape, rank: int = 32) -> None:
        super().__init__(shape)
        self.A = self.normal(whole("rank", rank, 1, "32 is the authors'"), shape.d_model)
        self.B = self.normal(shape.num_kv_heads * shape.head_dim, rank)
        self.u = self.normal(shape.num_kv_heads, shape.d_model)
        self.c = nn.Parameter(torch.zeros(shape.num_kv_heads))

    def gate(self, x: Tensor, pos: Any) -> Tensor:
        """w and b of each token, [B, Hkv, T, D + 1]."""
        x = x.to(self.A.dtype)
        w = F.normalize(F.linear(F.linear(x, self.A), self.B).unflatten(-1, (self.shape.num_kv_heads, -1)), dim=-1)
        b = 2 * F.linear(x, self.u, self.c).sigmoid()
        return torch.cat((w, b[..., None]), dim=-1).transpose(1, 2)

    def bias(self, q: Tensor, k: Tensor, gates: Any, at: Placement) -> Bias:
        wide, D = torch.promote_types(q.dtype, torch.float32), self.shape.head_dim
        if q.shape[-1] != D:
            raise ConfigError(f"path reflects queries of {D} channels; a scheme beside it made them {q.shape[-1]} wide")
        q, k = q.to(wide), k.to(wide).repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        w, b = gates.at_key.to(wide).split((D, 1), dim=-1)
        added = (reflected(q, k, w, b) - q @ k.mT) * D**-0.5
        return lambda b, h, i, j: added[b, h, i, j]

    def flops_per_token(self, length: int) -> float:
        """Of the maps of the stream, of the reflections in a block, and of the scores, which are made a second time."""
        D, H = self.shape.head_dim, self.shape.num_heads
        maps = 2.0 * (self.A.numel() + self.B.numel() + self.u.numel())
        within = 2.0 * H * BLOCK * (5 * D + 2 * BLOCK)  # products with w, the inverse, and what it multiplies
        return maps + within + H * length * D * (1 + D / BLOCK)


def reflected(q: Tensor, k: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """`k_j^T H_(j+1) ... H_i q_i`, [B, H, Tq, T] for keys up to the query's row; later entries are undefined.

    In blocks (section 3.2 of the paper): a product of reflections is `1 - W^T M W` with an upper triangular M, by which
    keys are carried to the end of their block and queries back to the beginning of theirs. Then, from the last block of
    keys to the first, all queries behind a block meet its keys and are carried back across it.
    Arguments: q [B, H, Tq, D], the last rows; k, w [B, H, T, D]; b [B, H, T, 1].
    """
    T, rows = k.shape[2], q.shape[2]
    first = (T - rows) // BLOCK  # the block of the first query
    begin, behind = T - rows - first * BLOCK, -T % BLOCK
    q = F.pad(q, (0, 0, begin, behind)).unflatten(2, (-1, BLOCK))  # [B, H, queries' blocks, BLOCK, D]
    k, w, b = (F.pad(x, (0, 0, 0, behind)).unflatten(2, (-1, BLOCK)) for x in (k, w, b))
    between = b * (w @ w.mT).triu(1)
    one = torch.eye(BLOCK, dtype=w.dtype, device=w.device)
    inverse = torch.linalg.solve_triangular(one + between, one * b, upper=True, unitriangular=True)  # M
    keys_seen = (w @ k.mT).tril(-1)  # by later rows of their block
    queries_see = (q @ w[:, :, first:].mT).tril()  # earlier rows and their own
    back = queries_see @ inverse[:, :, first:].mT
    inside = (q @ k[:, :, first:].mT - back @ keys_seen[:, :, first:]).unbind(2)
    q_back = (q - back @ w[:, :, first:]).unbind(2)
    carried = k - keys_seen.mT @ inverse @ w  # keys to the end of their block
    met, taken = torch.cat((carried, w), dim=3).unbind(2), (inverse.mT @ w).unbind(2)
    queries = q[:, :, 0, :0]  # those behind the block, [B, H, rows, D]
    columns = []
    for n in reversed(range(len(met))):
        column, along = (queries @ met[n].mT).split(BLOCK, dim=-1)
        queries = queries - along @ taken[n]
        if n >= first:  # queries stand in this block too; those before it see nothing of it
            column = F.pad(torch.cat((inside[n - first], column), dim=2), (0, 0, (n - first) * BLOCK, 0))
            queries = torch.cat((q_back[n - first], queries), dim=2)
        columns.append(column)
    return torch.cat(columns[::-1], dim=3)[:, :, begin : begin + rows, :T]
