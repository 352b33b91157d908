"""What a definition is: the hooks of a scheme on NumPy vectors of one token of one head, in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from posbench.config import Config

Array = NDArray[np.float64]
Gates = Callable[[int], Array]  # position -> what the scheme's gate gives for the token there, in one head


class NoDefinitionError(LookupError):
    """This page does not define the scheme's kind (a plug-in, say): there is nothing independent to hold it to."""


class Definition:
    """The hooks of a scheme. Unchanged it is NoPE.

    Arguments: config, of the run; weights, the scheme's learned tensors by name; then the options of its YAML.
    """

    def __init__(self, config: Config, weights: Mapping[str, Array]) -> None:
        self.config, self.weights = config, weights

    def window(self, length: int) -> None:
        """The tokens of the whole window, told before any hook is asked."""

    def layer(self, n: int) -> Definition:
        """The definition of layer n."""
        return self

    def embed(self, x: Array, p: int) -> Array:
        """A token's embedding [C] at position p."""
        return x

    def q(self, x: Array, p: int, h: int) -> Array:
        """A query [D] at position p in head h."""
        return x

    def k(self, x: Array, p: int, h: int) -> Array:
        """A key [D] at position p, for head h."""
        return x

    def v(self, x: Array, p: int, h: int) -> Array:
        """A value [D] at position p, for head h."""
        return x

    def o(self, x: Array, p: int, h: int) -> Array:
        """The output [D] of head h at the query's position p."""
        return x

    def gate(self, x: Array, h: int) -> Array | None:
        """Numbers of a token for head h, of the stream behind the norm, [C] -> [N]."""
        return None

    def bias(self, h: int, i: int, j: int, q: Array, gates: Gates) -> float:
        """What is added to the scaled score of the query at position i, behind its hook, and the key at j."""
        return 0.0
