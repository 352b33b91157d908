"""What each scheme is, by the kind that its YAML names; and schemes that are made of others.

It shares no line with `posbench.schemes` and no kernel with torch. What a scheme is, it learns from its YAML alone, and
its learned numbers from the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from posbench.config import Config, SchemeConfig
from posbench.reference.biases import T5, Alibi, Fire, Fox, Kerple, Shaw, Ssmax, TransformerXL
from posbench.reference.definition import Array, Definition, Gates, NoDefinitionError
from posbench.reference.embeddings import Learned, Sinusoidal
from posbench.reference.rotations import (
    Hope,
    LearnedBase,
    LearnedFrequencies,
    PartialRotary,
    Pope,
    ProportionalRotary,
    Rotated,
    XPos,
)


class Interleaved(Definition):
    """The members by turns: layer n has the one at place n modulo their number."""

    def __init__(self, config: Config, weights: Mapping[str, Array], layers: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(config, weights)
        self.members = members_of(layers, config, weights)

    def window(self, length: int) -> None:
        for member in self.members:
            member.window(length)

    def layer(self, n: int) -> Definition:
        return self.members[n % len(self.members)].layer(n)


class Combined(Definition):
    """All members: hooks one after another (o the other way round), biases added."""

    def __init__(self, config: Config, weights: Mapping[str, Array], of: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(config, weights)
        self.members = members_of(of, config, weights)
        self.widths = [0] * len(self.members)  # of each member's gate

    def window(self, length: int) -> None:
        for member in self.members:
            member.window(length)

    def layer(self, n: int) -> Definition:
        layer = Combined(self.config, self.weights, [])
        layer.members, layer.widths = [member.layer(n) for member in self.members], self.widths
        return layer

    def embed(self, x: Array, p: int) -> Array:
        for member in self.members:
            x = member.embed(x, p)
        return x

    def q(self, x: Array, p: int, h: int) -> Array:
        for member in self.members:
            x = member.q(x, p, h)
        return x

    def k(self, x: Array, p: int, h: int) -> Array:
        for member in self.members:
            x = member.k(x, p, h)
        return x

    def v(self, x: Array, p: int, h: int) -> Array:
        for member in self.members:
            x = member.v(x, p, h)
        return x

    def o(self, x: Array, p: int, h: int) -> Array:
        for member in reversed(self.members):
            x = member.o(x, p, h)
        return x

    def gate(self, x: Array, h: int) -> Array | None:
        gates = [member.gate(x, h) for member in self.members]
        self.widths = [0 if gate is None else len(gate) for gate in gates]
        numbers = [gate for gate in gates if gate is not None]
        return np.concatenate(numbers) if numbers else None

    def bias(self, h: int, i: int, j: int, q: Array, gates: Gates) -> float:
        total, begin = 0.0, 0
        for member, width in zip(self.members, self.widths, strict=True):
            part = partial(_numbers, gates, begin, begin + width)
            total, begin = total + member.bias(h, i, j, q, part), begin + width
        return total


def _numbers(gates: Gates, begin: int, end: int, p: int) -> Array:
    """One member's numbers among those of all."""
    return gates(p)[begin:end]


def members_of(rows: Sequence[Mapping[str, Any]], config: Config, weights: Mapping[str, Array]) -> list[Definition]:
    """The definitions of a scheme's members. Equal rows share their weights, which are numbered by first appearance."""
    distinct = list({str(row): None for row in rows})
    members = []
    for row in rows:
        prefix = f"members.{distinct.index(str(row))}."
        inside = {name.removeprefix(prefix): array for name, array in weights.items() if name.startswith(prefix)}
        members.append(define(SchemeConfig.from_mapping(dict(row)), config, inside))
    return members


DEFINITIONS: dict[str, Callable[..., Definition]] = {
    "nope": Definition,
    "rotary": Rotated,
    "learned_frequencies": LearnedFrequencies,
    "learned_base": LearnedBase,
    "partial_rotary": PartialRotary,
    "p_rope": ProportionalRotary,
    "hope": Hope,
    "xpos": XPos,
    "pope": Pope,
    "alibi": Alibi,
    "t5": T5,
    "kerple": Kerple,
    "fire": Fire,
    "shaw": Shaw,
    "transformer_xl": TransformerXL,
    "fox": Fox,
    "ssmax": Ssmax,
    "sinusoidal": Sinusoidal,
    "learned": Learned,
    "interleaved": Interleaved,
    "combined": Combined,
}


def define(scheme: SchemeConfig, config: Config, weights: Mapping[str, Array]) -> Definition:
    """What a scheme's YAML asks for.

    Arguments: weights, the scheme's learned tensors by name.
    Raises: NoDefinitionError for a kind, or an option of it, that this page does not know.
    """
    try:
        return DEFINITIONS[scheme.kind](config, weights, **scheme.options)
    except (KeyError, TypeError) as error:
        raise NoDefinitionError(
            f"posbench/reference/schemes.py does not define a scheme of kind {scheme.kind!r} with the options "
            f"{list(scheme.options)}"
        ) from error
