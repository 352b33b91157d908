"""The interface of a definition: the hooks of a scheme for one token and one head, on NumPy vectors in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from posbench.config import Config

Array = NDArray[np.float64]


class NoDefinitionError(LookupError):
    """Raised if the reference has no definition of the scheme, such as your own, so nothing independent checks it."""


@dataclass(frozen=True)
class Rows:
    """The values of all T tokens in all H heads that a bias may use."""

    positions: Sequence[int]  # [T], tokens
    queries: Sequence[Array]  # [H] of [T, .], after their hook
    keys: Sequence[Array]  # [H] of [T, .], after their hook, repeated for the heads that share a key head
    gates: Sequence[Sequence[Any]]  # [H][T], results of `Definition.gate`

    def distance(self, t: int, s: int) -> int:
        """Return the tokens from the key at row s to the query at row t."""
        return self.positions[t] - self.positions[s]

    @cached_property
    def by_member(self) -> list[Rows]:
        """The same rows for each member of a combined scheme, with the gates of that member."""
        count = len(self.gates[0][0])
        return [replace(self, gates=[[gate[n] for gate in head] for head in self.gates]) for n in range(count)]


class Definition:
    """The hooks of a scheme in one layer. This base class is NoPE.

    Arguments: config, the run's configuration; weights, the scheme's learned tensors in this layer; then the options of
    its YAML file.
    """

    def __init__(self, config: Config, weights: Mapping[str, Array]) -> None:
        self.config, self.weights = config, weights

    def window(self, length: int) -> None:
        """Set the length of the whole window in tokens; called before any other hook."""

    def embed(self, x: Array, p: int) -> Array:
        """Return the token embedding x [C] at position p, with position added."""
        return x

    def gate(self, x: Array, h: int) -> Any:
        """Return per-token values for head h, computed from the hidden states x [C] after the layer's norm."""
        return None

    def locate(self, p: int, gates: Sequence[Any], h: int) -> Any:
        """Return the position that q, k, v and o of head h receive; `gates` holds all tokens up to this one."""
        return p

    def q(self, x: Array, p: Any, h: int) -> Array:
        """Return the query x [D] of head h at position p."""
        return x

    def k(self, x: Array, p: Any, h: int) -> Array:
        """Return the key x [D] for head h at position p."""
        return x

    def v(self, x: Array, p: Any, h: int) -> Array:
        """Return the value x [D] for head h at position p."""
        return x

    def o(self, x: Array, p: Any, h: int) -> Array:
        """Return the output x [D] of head h at the query's position p."""
        return x

    def bias(self, h: int, t: int, s: int, rows: Rows) -> float:
        """Return the term added to the scaled score of the query at row t and the key at row s in head h."""
        return 0.0
