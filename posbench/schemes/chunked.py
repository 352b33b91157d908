"""Attention in chunks: the input is cut into pieces, and a query sees only the keys of its piece (Llama 4)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posbench.schemes.base import Bias, Placement, Scheme, Shape, require_integer


class Chunked(Scheme):
    """Hide the keys before the query's chunk: positions m * chunk to (m + 1) * chunk - 1 for a whole number m.

    It is the mask of Llama 4's layers with RoPE (transformers: `chunked_causal_mask_function`).
    Options: `chunk`, tokens.
    """

    group = "biases on the scores"
    is_relative = False

    def __init__(self, shape: Shape, chunk: int) -> None:
        super().__init__(shape)
        self.chunk = require_integer("chunk", chunk, 1, "tokens of a chunk")

    def bias(self, q: Tensor, k: Tensor, gates: Any, at: Placement) -> Bias:
        place_in_chunk = at.pos % self.chunk

        def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            # A key farther back than the query's place in its chunk belongs to an earlier chunk.
            is_hidden = at.distance(b, i, j) > at.value_at_query(place_in_chunk, b, i)
            return torch.where(is_hidden, -float("inf"), 0.0)

        return mask
