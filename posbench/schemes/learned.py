"""A learned vector for each position, added once to the token embeddings (Gehring et al. 2017, arXiv 1705.03122)."""

from __future__ import annotations

from torch import Tensor

from posbench.schemes.base import Scheme, Shape


class Learned(Scheme):
    """Learned positions: add row `p` of a table [longest, C] to the embedding of the token at position `p`.

    The table has the standard deviation of the token embeddings. It covers the training length, or for tasks the
    longest problem that may be tested; later positions are not defined.
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
