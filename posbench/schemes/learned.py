"""A learned vector for each position, added once to the token embeddings (Gehring et al. 2017, arXiv 1705.03122)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from posbench.schemes.base import Scheme, Shape


class Learned(Scheme):
    """Row `p` of a table [context_length, C] is added to the embedding of the token at position `p`.

    The table begins with the standard deviation of the token embeddings. Beyond the training length there is no row,
    and none is made up: the scheme is defined up to `longest` tokens.
    """

    is_relative = False

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.table = nn.Parameter(torch.empty(shape.context_length, shape.d_model).normal_(0, shape.embedding_std))

    @property
    def longest(self) -> int:
        return len(self.table)

    def embed(self, x: Tensor, pos: Tensor) -> Tensor:
        return x + self.table[pos].to(x.dtype)
