"""What each scheme is, by the kind that its YAML names; and schemes that are made of others.

It shares no line with `posbench.schemes` and no kernel with torch. What a scheme is, it learns from its YAML alone, and
its learned numbers from the weights. A definition is registered by being here: its class's name in snake case is the
kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from posbench.catalogue.classes import classes_in
from posbench.config import Config, SchemeConfig
from posbench.reference.definition import Array, Definition, NoDefinitionError, Rows


class Combined(Definition):
    """All members: hooks one after another (o the other way round), biases added."""

    def __init__(self, config: Config, weights: Mapping[str, Array], of: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(config, weights)
        distinct = list({str(row): None for row in of})  # equal rows share their weights, numbered by first appearance
        self.members = []
        for row in of:
            prefix = f"members.{distinct.index(str(row))}."
            own = {name.removeprefix(prefix): array for name, array in weights.items() if name.startswith(prefix)}
            self.members.append(define(SchemeConfig.from_mapping(dict(row)), config, own))

    def window(self, length: int) -> None:
        for member in self.members:
            member.window(length)

    def embed(self, x: Array, p: int) -> Array:
        for member in self.members:
            x = member.embed(x, p)
        return x

    def gate(self, x: Array, h: int) -> list[Any]:
        return [member.gate(x, h) for member in self.members]

    def locate(self, p: int, gates: Sequence[Any], h: int) -> list[Any]:
        return [member.locate(p, [gate[n] for gate in gates], h) for n, member in enumerate(self.members)]

    def q(self, x: Array, p: Any, h: int) -> Array:
        return self._chained("q", x, p, h)

    def k(self, x: Array, p: Any, h: int) -> Array:
        return self._chained("k", x, p, h)

    def v(self, x: Array, p: Any, h: int) -> Array:
        return self._chained("v", x, p, h)

    def o(self, x: Array, p: Any, h: int) -> Array:
        for member, place in reversed(list(zip(self.members, p, strict=True))):
            x = member.o(x, place, h)
        return x

    def _chained(self, hook: str, x: Array, p: Any, h: int) -> Array:
        for member, place in zip(self.members, p, strict=True):
            x = getattr(member, hook)(x, place, h)
        return x

    def bias(self, h: int, t: int, s: int, rows: Rows) -> float:
        return sum((member.bias(h, t, s, own) for member, own in zip(self.members, rows.of_members, strict=True)), 0.0)


def entry_of_layer(scheme: SchemeConfig, n: int) -> SchemeConfig:
    """The row of layer n: of interleaved ones the member at place n modulo their number."""
    if scheme.kind != "interleaved":
        return scheme
    members = scheme.options["layers"]
    return entry_of_layer(SchemeConfig.from_mapping(dict(members[n % len(members)])), n)


@cache
def definitions() -> dict[str, type[Definition]]:
    """Kind -> its definition."""
    return {"nope": Definition, **classes_in("posbench.reference", Definition)}


def define(scheme: SchemeConfig, config: Config, weights: Mapping[str, Array]) -> Definition:
    """What a scheme's YAML asks for in one layer.

    Arguments: weights, the scheme's learned tensors there by name.
    Raises: NoDefinitionError for a kind, or an option of it, that is not defined here.
    """
    try:
        return definitions()[scheme.kind](config, weights, **scheme.options)
    except (KeyError, TypeError) as error:
        raise NoDefinitionError(
            f"posbench/reference does not define a scheme of kind {scheme.kind!r} with the options "
            f"{list(scheme.options)}"
        ) from error
