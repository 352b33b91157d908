"""What a definition is: the hooks of a scheme on NumPy vectors of one token of one head, in float64."""

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
    """The reference does not define the scheme's kind (one of your own, say): nothing independent can check it."""


@dataclass(frozen=True)
class Rows:
    """What a bias may look at: of every token t of the window, in every head h."""

    positions: Sequence[int]  # [T], tokens
    queries: Sequence[Array]  # [H] of [T, .], vectors behind their hook
    keys: Sequence[Array]  # [H] of [T, .], vectors behind their hook, those of the key head of each head
    gates: Sequence[Sequence[Any]]  # [H][T], what `Definition.gate` gave

    def distance(self, t: int, s: int) -> int:
        """Tokens between the query at row t and the key at row s."""
        return self.positions[t] - self.positions[s]

    @cached_property
    def of_members(self) -> list[Rows]:
        """The same for each member of several schemes, with its own gates."""
        count = len(self.gates[0][0])
        return [replace(self, gates=[[gate[n] for gate in head] for head in self.gates]) for n in range(count)]


class Definition:
    """The hooks of a scheme in one layer. Unchanged it is NoPE.

    Arguments: config, of the run; weights, the scheme's learned tensors in this layer; then the options of its YAML.
    """

    def __init__(self, config: Config, weights: Mapping[str, Array]) -> None:
        self.config, self.weights = config, weights

    def window(self, length: int) -> None:
        """The tokens of the whole window, told before any hook is asked."""

    def embed(self, x: Array, p: int) -> Array:
        """A token's embedding [C] at position p."""
        return x

    def gate(self, x: Array, h: int) -> Any:
        """Numbers of a token for head h, of the stream behind the norm [C]."""
        return None

    def locate(self, p: int, gates: Sequence[Any], h: int) -> Any:
        """What q, k, v and o of head h get as the position of a token, whose gate and all before are `gates`."""
        return p

    def q(self, x: Array, p: Any, h: int) -> Array:
        """A query [D] at position p in head h."""
        return x

    def k(self, x: Array, p: Any, h: int) -> Array:
        """A key [D] at position p, for head h."""
        return x

    def v(self, x: Array, p: Any, h: int) -> Array:
        """A value [D] at position p, for head h."""
        return x

    def o(self, x: Array, p: Any, h: int) -> Array:
        """The output [D] of head h at the query's position p."""
        return x

    def bias(self, h: int, t: int, s: int, rows: Rows) -> float:
        """What is added to the scaled score of the query at row t and the key at row s, in head h."""
        return 0.0
