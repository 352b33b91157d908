"""What each scheme is, a few lines of NumPy each, in float64: vectors of one token of one head, and explicit matrices.

It shares no line with `posbench.schemes` and no kernel with torch. What a scheme is, it learns from its YAML alone, and
its learned numbers from the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from math import cos, sin
from typing import Any

import numpy as np
from numpy.typing import NDArray

from posbench.config import Config, SchemeConfig

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


class Rotated(Definition):
    """R_p on the sites q, k, v; its transpose, the way back, on o."""

    def __init__(
        self, config: Config, weights: Mapping[str, Array], sites: Sequence[str], base: float = 10000.0
    ) -> None:
        super().__init__(config, weights)
        self.sites, self.base = tuple(sites), float(base)

    def q(self, x: Array, p: int, h: int) -> Array:
        return rotation(p, len(x), self.base) @ x if "q" in self.sites else x

    def k(self, x: Array, p: int, h: int) -> Array:
        return rotation(p, len(x), self.base) @ x if "k" in self.sites else x

    def v(self, x: Array, p: int, h: int) -> Array:
        return rotation(p, len(x), self.base) @ x if "v" in self.sites else x

    def o(self, x: Array, p: int, h: int) -> Array:
        return rotation(p, len(x), self.base).T @ x if "o" in self.sites else x


@cache
def rotation(position: int, head_dim: int, base: float) -> Array:
    """R_p, [D, D]: block t turns the coordinates (t, t + D/2) by p * base ** (-2t / D) radians."""
    R = np.zeros((head_dim, head_dim))
    for t in range(head_dim // 2):
        angle, u = position * base ** (-2 * t / head_dim), t + head_dim // 2
        R[t, t], R[t, u] = cos(angle), -sin(angle)
        R[u, t], R[u, u] = sin(angle), cos(angle)
    return R


class Alibi(Definition):
    """`-m_h (i - j)`."""

    def bias(self, h: int, i: int, j: int, q: Array, gates: Gates) -> float:
        return -alibi_slopes(self.config.model.num_heads)[h] * (i - j)


@cache
def alibi_slopes(num_heads: int) -> list[float]:
    """Section 3 of arXiv 2108.12409: the geometric series from 2 ** (-8 / H) with that ratio, for H a power of two.

    Otherwise the series of the power of two below, then every second entry of the series of the power of two above.
    """
    power = 1
    while 2 * power <= num_heads:
        power *= 2
    series = [(2 ** (-8 / power)) ** h for h in range(1, power + 1)]
    return series if power == num_heads else series + alibi_slopes(2 * power)[::2][: num_heads - power]


class Sinusoidal(Definition):
    """Section 3.5 of arXiv 1706.03762: channel 2i is sin(p / base ** (2i / C)), channel 2i + 1 the cosine.

    `amplitude` in standard deviations of the token embeddings at initialisation.
    """

    def __init__(
        self, config: Config, weights: Mapping[str, Array], amplitude: float = 1.0, base: float = 10000.0
    ) -> None:
        super().__init__(config, weights)
        self.size, self.base = float(amplitude) * config.model.init_std, float(base)

    def embed(self, x: Array, p: int) -> Array:
        return x + self.size * sinusoids(p, len(x), self.base)


def sinusoids(position: int, width: int, base: float = 10000.0) -> Array:
    """The sines and cosines of one position, [C]."""
    angles = [position / base ** ((channel - channel % 2) / width) for channel in range(width)]
    return np.array([cos(angle) if channel % 2 else sin(angle) for channel, angle in enumerate(angles)])


class Interleaved(Definition):
    """The members by turns: layer n has the one at place n modulo their number."""

    def __init__(self, config: Config, weights: Mapping[str, Array], layers: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(config, weights)
        self.members = members_of(layers, config, weights)

    def layer(self, n: int) -> Definition:
        return self.members[n % len(self.members)].layer(n)


class Combined(Definition):
    """All members: hooks one after another (o the other way round), biases added."""

    def __init__(self, config: Config, weights: Mapping[str, Array], of: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(config, weights)
        self.members = members_of(of, config, weights)
        self.widths = [0] * len(self.members)  # of each member's gate

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
    "alibi": Alibi,
    "sinusoidal": Sinusoidal,
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
