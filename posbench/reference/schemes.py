"""Find the NumPy definition of a scheme by its kind, the class name in snake case, and define combined schemes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from posbench.catalogue.classes import classes_in
from posbench.config import Config, SchemeConfig
from posbench.reference.definition import Array, Definition, NoDefinitionError, Rows


class Combined(Definition):
    """Several schemes in one layer: each changes q, k and v in order, and o in reverse order; biases are added."""

    of: Sequence[Mapping[str, Any]]

    def __init__(self, config: Config, weights: Mapping[str, Array], **options: Any) -> None:
        super().__init__(config, weights, **options)
        distinct = list({str(entry): None for entry in self.of})  # equal entries share weights, numbered in order
        self.members = []
        for entry in self.of:
            prefix = f"members.{distinct.index(str(entry))}."
            learned = {name.removeprefix(prefix): array for name, array in weights.items() if name.startswith(prefix)}
            self.members.append(define(SchemeConfig.from_mapping(dict(entry)), config, learned))

    def window(self, length: int) -> None:
        for member in self.members:
            member.window(length)

    def gates(self, x: Array, h: int) -> list[Any]:
        by_member = [member.gates(x, h) for member in self.members]
        # A token's gate holds one value for each member.
        return list(map(list, zip(*by_member, strict=True)))

    def locate(self, p: int, gates: Sequence[Any], h: int) -> list[Any]:
        positions = []
        for n, member in enumerate(self.members):
            layer_gates = [gate[n] for gate in gates]
            positions.append(member.locate(p, layer_gates, h))
        return positions

    def after_hook(self, site: str, x: Array, positions: Sequence[Any], *h: int) -> Array:
        members = list(enumerate(self.members))
        # o undoes what the other hooks did, the last one first.
        if site == "o":
            members.reverse()
        for n, member in members:
            layer_positions = positions
            if h:  # q, k, v and o get what `locate` returned, a position for each member
                layer_positions = [p[n] for p in positions]
            x = member.after_hook(site, x, layer_positions, *h)
        return x

    def bias(self, h: int, t: int, s: int, rows: Rows) -> float:
        pairs = zip(self.members, rows.by_member, strict=True)
        return sum((member.bias(h, t, s, member_rows) for member, member_rows in pairs), 0.0)


def entry_of_layer(scheme: SchemeConfig, n: int) -> SchemeConfig:
    """Return the configuration of layer n's scheme: `scheme`, or number n % m of m that alternate."""
    if scheme.kind != "interleaved":
        return scheme
    members = scheme.options["layers"]
    member = dict(members[n % len(members)])
    # The kind of attention nearest to it in the nested lists.
    member["attention"] = member.get("attention") or scheme.attention
    return entry_of_layer(SchemeConfig.from_mapping(member), n)


@cache
def definitions() -> dict[str, type[Definition]]:
    """Return all definition classes by the scheme's kind, such as `rotary`."""
    return {"nope": Definition, **classes_in("posbench.reference", Definition)}


def define(scheme: SchemeConfig, config: Config, weights: Mapping[str, Array]) -> Definition:
    """Return a new NumPy definition of `scheme` for one layer.

    Arguments: weights, its learned tensors in that layer. Raises: NoDefinitionError for an undefined kind or option.
    """
    try:
        return definitions()[scheme.kind](config, weights, **scheme.options)
    except (KeyError, TypeError) as error:
        raise NoDefinitionError(
            f"posbench/reference does not define a scheme of kind {scheme.kind!r} with the options "
            f"{list(scheme.options)}"
        ) from error
