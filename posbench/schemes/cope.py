"""CoPE: positions that count what a query finds worth counting (Golovneva et al. 2024, arXiv 2405.18719)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from posbench.schemes.base import Bias, Placement, Scheme, Shape, whole


class Cope(Scheme):
    """`q_i . e[p_ij] / sqrt(D)`, `p_ij = sum_{t=j..i} sigmoid(q_i . k_t / sqrt(D))`, at most `positions - 1`.

    The vectors e [positions, D] are learned from 0 in each layer and shared by heads; between whole positions they are
    interpolated. Both products are divided by sqrt(D), as in the authors' code; the paper lists it for q . k alone.

    Options: `positions` (64 in the paper's language models). Raises: ConfigError where that is not a whole number.
    """

    per_layer = True
    reads_keys = True
    has_kinks = True

    def __init__(self, shape: Shape, positions: int = 64) -> None:
        super().__init__(shape)
        self.e = nn.Parameter(torch.zeros(whole("positions", positions, 2, "64 in the paper"), shape.head_dim))

    def bias(self, q: Tensor, k: Tensor, gates: Any, at: Placement) -> Bias:
        scores = scaled_scores(q, k, self.shape.head_dim)
        i, j = torch.arange(q.shape[2], device=q.device)[:, None], torch.arange(k.shape[2], device=q.device)
        counted = scores.sigmoid().masked_fill(at.is_later(i, j), 0.0)
        position = counted.flip(-1).cumsum(-1).flip(-1).clamp(max=len(self.e) - 1)  # [B, H, T, keys]
        before = position.floor().long()
        D = self.shape.head_dim
        at_whole = q[..., :D].to(scores.dtype) @ self.e.to(scores.dtype).t() * D**-0.5  # [B, H, T, positions]
        low, high = at_whole.gather(-1, before), at_whole.gather(-1, (before + 1).clamp(max=len(self.e) - 1))
        added = torch.lerp(low, high, position - before)
        return lambda b, h, i, j: added[b, h, i, j]

    def flops_per_token(self, length: int) -> float:
        """Of the products with e. Those with the keys are made anyway."""
        return 2.0 * self.shape.num_heads * self.e.numel()


def scaled_scores(q: Tensor, k: Tensor, head_dim: int) -> Tensor:
    """`q_i . k_j / sqrt(D)`, [B, H, T, keys] in at least float32, of q [B, H, T, .] and k [B, Hkv, keys, .]."""
    wide = torch.promote_types(q.dtype, torch.float32)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return q.to(wide) @ k.to(wide).mT * head_dim**-0.5
