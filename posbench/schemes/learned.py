"""A learned vector for each position, added once to the token embeddings (Gehring et al. 2017, arXiv 1705.03122)."""

from __future__ import annotations

from torch import Tensor

from posbench.schemes.base import Scheme, Shape


class Learned(Scheme):
    """Row `p` of a table [longest, C] is added to the embedding of the token at position `p`.

    The table begins with the standard deviation of the token embeddings. It ends at the training length, of tasks at
    the longest problem that may be tested. Beyond it no row is made up: the scheme is defined up to `longest` tokens.
    """

    is_relative = False

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.table = self.normal(shape.longest or shape.context_length, shape.d_model)

    @property
    def longest(self) -> int:
        return len(self.table)

    def embed(self, x: Tensor, pos: Tensor) -> Tensor:
        return x + self.table[pos].to(x.dtype).reshape(-1, *x.shape[1:])
