"""Schemes made of other schemes: one after another in every layer, or by turns from layer to layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from posbench.config import ConfigError
from posbench.schemes.base import At, Bias, Scheme, Shape


def _members(option: str, members: Sequence[Scheme]) -> nn.ModuleList:
    if not (isinstance(members, Sequence) and members and all(isinstance(member, Scheme) for member in members)):
        raise ConfigError(f"scheme.{option} must be a list of schemes, such as scheme.{option}=[qk_rope,nope]")
    return nn.ModuleList(dict.fromkeys(members))


def _shortest(members: Iterable[Scheme]) -> int | None:
    """Tokens up to which all of them are defined; None: any length."""
    return min((member.longest for member in members if member.longest is not None), default=None)


class Interleaved(Scheme):
    """The schemes of `layers` by turns: layer n has the one at place n modulo their number.

    A scheme that is named more than once is one scheme, with one set of parameters and one preparation of positions.
    Options: `layers`, names of schemes, such as [qk_rope, qk_rope, qk_rope, nope].
    Raises: ConfigError where one of them adds to the token embeddings, which belong to no layer.
    """

    def __init__(self, shape: Shape, layers: Sequence[Scheme]) -> None:
        super().__init__(shape)
        self.members = _members("layers", layers)
        self.turns = [list(self.members).index(member) for member in layers]
        for member in self.members:
            if isinstance(member, Scheme) and "embed" in member.acts_on:
                raise ConfigError(
                    f"scheme.layers holds {type(member).__name__}, which adds positions to the token embeddings once, "
                    "before any layer: take schemes that act inside attention"
                )

    @property
    def group(self) -> str:
        return "layers"

    @property
    def is_relative(self) -> bool:  # type: ignore[override]
        return all(member.is_relative for member in self._used)

    @property
    def keeps_norms(self) -> bool:  # type: ignore[override]
        return all(member.keeps_norms for member in self._used)

    @property
    def is_streaming(self) -> bool:  # type: ignore[override]
        return all(member.is_streaming for member in self._used)

    @property
    def acts_on(self) -> frozenset[str]:
        return frozenset[str]().union(*(member.acts_on for member in self._used))

    @property
    def longest(self) -> int | None:
        return _shortest(self._used)

    @property
    def _used(self) -> list[Scheme]:
        return [self.layer(n) for n in range(self.shape.num_layers)]

    def layer(self, n: int) -> Scheme:
        member = self.members[self.turns[n % len(self.turns)]]
        assert isinstance(member, Scheme)
        return member.layer(n)


class Combined(Scheme):
    """All schemes of `of` at once: hooks one after another, biases added; relative if all of them are.

    Options: `of`, names of schemes, such as [alibi, qk_rope].
    """

    def __init__(self, shape: Shape, of: Sequence[Scheme]) -> None:
        super().__init__(shape)
        self.members = _members("of", of)
        self.gate_width = sum(member.gate_width for member in self._all)
        self._of_layers = self._by_layer()  # a plain list: their parameters are registered under `members`

    @property
    def _all(self) -> list[Scheme]:
        return [member for member in self.members if isinstance(member, Scheme)]

    @property
    def is_relative(self) -> bool:  # type: ignore[override]
        return all(member.is_relative for member in self._all)

    @property
    def keeps_norms(self) -> bool:  # type: ignore[override]
        return all(member.keeps_norms for member in self._all)

    @property
    def is_streaming(self) -> bool:  # type: ignore[override]
        return all(member.is_streaming for member in self._all)

    @property
    def acts_on(self) -> frozenset[str]:
        return frozenset[str]().union(*(member.acts_on for member in self._all))

    @property
    def moves_k_and_v_alike(self) -> bool:
        return all(member.moves_k_and_v_alike for member in self._all)

    @property
    def longest(self) -> int | None:
        return _shortest(self._all)

    def layer(self, n: int) -> Scheme:
        return self._of_layers[n % len(self._of_layers)]

    def _by_layer(self) -> list[Scheme]:
        """The scheme of each layer: this one, or one of the members' own of that layer, each combination once."""
        combined: dict[tuple[Scheme, ...], Scheme] = {tuple(self._all): self}
        layers = []
        for n in range(self.shape.num_layers):
            members = tuple(member.layer(n) for member in self._all)
            if members not in combined:
                combined[members] = Combined(self.shape, members)
            layers.append(combined[members])
        return layers

    def prepare(self, pos: Tensor, length: int) -> tuple[Any, ...]:
        return tuple(member.prepare(pos, length) for member in self._all)

    def embed(self, x: Tensor, pos: Any) -> Tensor:
        return self._chained("embed", x, pos)

    def q(self, x: Tensor, pos: Any) -> Tensor:
        return self._chained("q", x, pos)

    def k(self, x: Tensor, pos: Any) -> Tensor:
        return self._chained("k", x, pos)

    def v(self, x: Tensor, pos: Any) -> Tensor:
        return self._chained("v", x, pos)

    def o(self, x: Tensor, pos: Any) -> Tensor:
        for member, prepared in reversed(list(zip(self._all, pos, strict=True))):  # what went in last comes out first
            x = member.o(x, prepared)
        return x

    def gate(self, x: Tensor, pos: Any) -> Tensor | None:
        gates = [member.gate(x, prepared) for member, prepared in zip(self._all, pos, strict=True)]
        numbers = [gate for gate in gates if gate is not None]
        return torch.cat(numbers, dim=-1) if numbers else None

    def bias(self, q: Tensor, gate: Tensor | None, at: At) -> Bias | None:
        parts = [None] * len(self._all) if gate is None else gate.split([m.gate_width for m in self._all], dim=-1)
        biases = [
            member.bias(q, part, at._replace(pos=prepared))
            for member, part, prepared in zip(self._all, parts, at.pos, strict=True)
        ]
        terms = [bias for bias in biases if bias is not None]
        if not terms:
            return None

        def total(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            result = terms[0](b, h, i, j)
            for term in terms[1:]:
                result = result + term(b, h, i, j)
            return result

        return total

    def log_decay(self) -> Tensor | float | None:
        total: Tensor | float = 0.0
        for decay in [member.log_decay() for member in self._all]:
            if decay is None:
                return None
            total = total + decay
        return total

    def _chained(self, hook: str, x: Tensor, pos: Any) -> Tensor:
        for member, prepared in zip(self._all, pos, strict=True):
            x = getattr(member, hook)(x, prepared)
        return x
