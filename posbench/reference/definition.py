"""The base class of reference schemes: methods for one token and one head, on float64 NumPy vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from posbench.config import Config

Array = NDArray[np.float64]


class NoDefinitionError(LookupError):
    """The error for a scheme without a NumPy definition, such as your own: nothing independent checks it."""


@dataclass(frozen=True)
class Rows:
    """The queries, keys and gates from which a scheme computes its bias, for all tokens and heads."""

    positions: Sequence[int]  # [T], tokens
    queries: Sequence[Array]  # [H] of [T, .], after their hook
    keys: Sequence[Array]  # [H] of [T, .], after their hook, repeated for the heads that share a key head
    gates: Sequence[Sequence[Any]]  # [H][T], results of `Definition.gate`

    def distance(self, t: int, s: int) -> int:
        """Return the distance in tokens from the key with index s to the query with index t."""
        return self.positions[t] - self.positions[s]

    @cached_property
    def by_member(self) -> list[Rows]:
        """Return a copy for each scheme of a combination, which has only this scheme's gate values."""
        copies = []
        for n in range(len(self.gates[0][0])):
            heads = []
            for head in self.gates:
                heads.append([gate[n] for gate in head])
            copies.append(replace(self, gates=heads))
        return copies


class Definition:
    """The definition of a position scheme in one layer, with methods for one token and one head; this class is NoPE.

    The options of its YAML file are annotated attributes; those without a value must be given. Options in `sizes` are
    not read: the shapes of the weights show them.
    Arguments: weights, the scheme's learned tensors in this layer. Raises: TypeError for an unknown or missing option.
    """

    sizes: ClassVar[Sequence[str]] = ()

    def __init__(self, config: Config, weights: Mapping[str, Array], **options: Any) -> None:
        self.config, self.weights = config, weights
        self.D, self.group = config.model.head_width, config.model.num_heads // config.model.kv_heads
        known: set[str] = set()
        # A subclass has the options of the classes it extends, too.
        for cls in type(self).__mro__:
            known.update(vars(cls).get("__annotations__", ()))
        for name, value in options.items():
            if name in known:
                setattr(self, name, value)
            elif name not in self.sizes:
                raise TypeError(f"{type(self).__name__} has no option {name}")
        for name in known:
            if not hasattr(self, name):
                raise TypeError(f"{type(self).__name__} needs the option {name}")

    def window(self, length: int) -> None:
        """Set the length of the whole input in tokens; called before any other method."""

    def embed(self, x: Array, p: int) -> Array:
        """Return the token embedding x [C] with position p added."""
        return x

    def hidden(self, x: Array, p: int) -> Array:
        """Return the hidden state x [C] after the layer's norm, at position p, changed before it is projected."""
        return x

    def gate(self, x: Array, h: int) -> Any:
        """Return one token's value for head h, computed from its normed hidden state x [C]; None if unused."""
        return None

    def gates(self, x: Array, h: int) -> list[Any]:
        """Return the values of all tokens for head h, by default `gate` of each hidden state in x [T, C]."""
        # A scheme that reads earlier tokens overrides this in place of `gate`.
        return [self.gate(row, h) for row in x]

    def locate(self, p: int, gates: Sequence[Any], h: int) -> Any:
        """Return the position that q, k, v and o of head h receive instead of p; `gates` ends with this token."""
        return p

    def q(self, x: Array, p: Any, h: int) -> Array:
        """Return the query x [D] of head h, changed by its position p."""
        return x

    def k(self, x: Array, p: Any, h: int) -> Array:
        """Return the key x [D] of head h, changed by its position p."""
        return x

    def v(self, x: Array, p: Any, h: int) -> Array:
        """Return the value x [D] of head h, changed by its position p."""
        return x

    def o(self, x: Array, p: Any, h: int) -> Array:
        """Return the attention output x [D] of head h, changed by the query's position p."""
        return x

    def after_hook(self, site: str, x: Array, positions: Sequence[Any], *h: int) -> Array:
        """Return all tokens' rows x [T, .] after the hook `site`: embed, hidden, or q, k, v or o of head h."""
        # A scheme that reads earlier tokens overrides this in place of the hook.
        return np.stack([getattr(self, site)(row, p, *h) for row, p in zip(x, positions, strict=True)])

    def bias(self, h: int, t: int, s: int, rows: Rows) -> float:
        """Return the term added to the scaled score of query index t and key index s in head h."""
        return 0.0
