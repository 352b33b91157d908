"""Biases that depend on head and distance alone: worked out once for each distance, then looked up."""

from __future__ import annotations

import torch
from torch import Tensor

from posbench.schemes.base import At, Bias


def distances(q: Tensor, at: At) -> Tensor:
    """0, 1, ... up to the longest that a query of this piece sees, [N] int64, tokens."""
    return torch.arange(at.query + q.shape[2] - at.key, device=q.device)


def look_up(by_distance: Tensor, at: At) -> Bias:
    """The bias that is `by_distance[h, i - j]`, [H, N]. Each entry is read at one distance, as it must be on a GPU."""

    def bias(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return by_distance[h, (i + at.query - (j + at.key)).clamp(min=0)]  # keys after the query are masked

    return bias
