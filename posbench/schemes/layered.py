"""Schemes that learn numbers of each layer's own."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from posbench.schemes.base import Scheme, Shape


class Layered(Scheme):
    """One scheme a layer, all of one class with the same options, which say what this one promises.

    A subclass makes them in its constructor. The hooks are theirs: `layers[n]` acts in layer n.
    """

    def __init__(self, shape: Shape, layers: Sequence[Scheme]) -> None:
        super().__init__(shape)
        self.layers = nn.ModuleList(layers)
        one = layers[0]
        self.is_relative, self.keeps_norms, self.gate_width = one.is_relative, one.keeps_norms, one.gate_width

    @property
    def acts_on(self) -> frozenset[str]:
        return self.layer(0).acts_on

    @property
    def moves_k_and_v_alike(self) -> bool:
        return self.layer(0).moves_k_and_v_alike

    @property
    def longest(self) -> int | None:
        return self.layer(0).longest

    def log_decay(self) -> Tensor | float | None:
        return self.layer(0).log_decay()

    def layer(self, n: int) -> Scheme:
        layer = self.layers[n]
        assert isinstance(layer, Scheme)
        return layer
