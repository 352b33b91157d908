"""Schemes made of other schemes: one after another in every layer, or by turns from layer to layer."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from posbench.config import ConfigError
from posbench.schemes.base import Bias, Placement, Scheme, Shape, added_by, apply_hook


class Together:
    """What several schemes promise together, in one layer or in all layers of a decoder."""

    @property
    def parts(self) -> list[Scheme]:
        """The schemes."""
        raise NotImplementedError

    @property
    def is_relative(self) -> bool:
        """Whether all are."""
        return all(scheme.is_relative for scheme in self.parts)

    @property
    def keeps_norms(self) -> bool:
        """Whether all do."""
        return all(scheme.keeps_norms for scheme in self.parts)

    @property
    def is_streaming(self) -> bool:
        """Whether all are."""
        return all(scheme.is_streaming for scheme in self.parts)

    @property
    def acts_on(self) -> frozenset[str]:
        """Where position enters in any of them."""
        return frozenset[str]().union(*(scheme.acts_on for scheme in self.parts))

    @property
    def longest(self) -> int | None:
        """Tokens up to which all are defined; None: any length."""
        return min((scheme.longest for scheme in self.parts if scheme.longest is not None), default=None)

    def flops_per_token(self, length: int) -> float | None:
        """Model FLOPs of all hooks, per token; None where a scheme does not state its own."""
        stated = [scheme.flops_per_token(length) for scheme in self.parts]
        return None if None in stated else float(sum(flops for flops in stated if flops is not None))


class Interleaved(Scheme):
    """The schemes of `layers` by turns: layer n has the one at place n modulo their number.

    A scheme that is named more than once is one scheme, with one set of parameters and one preparation of positions.
    Options: `layers`, names of schemes, such as [qk_rope, qk_rope, qk_rope, nope]. No layer has an `Interleaved`:
    `posbench.schemes.build_scheme` takes the member of each layer.
    """

    def __init__(self, shape: Shape, layers: Sequence[Any]) -> None:
        super().__init__(shape)


class Combined(Together, Scheme):  # type: ignore[override]
    """All schemes of `of` at once: hooks one after another, biases added; relative if all of them are.

    Keys in a bias (`reads_keys`) are those behind the hooks of all members.

    Options: `of`, names of schemes, such as [alibi, qk_rope].
    """

    def __init__(self, shape: Shape, of: Sequence[Scheme]) -> None:
        super().__init__(shape)
        if not (isinstance(of, Sequence) and of and all(isinstance(member, Scheme) for member in of)):
            raise ConfigError("scheme.of must be a list of schemes, such as scheme.of=[qk_rope,nope]")
        if any(member.window for member in of):
            raise ConfigError("scheme.of holds a scheme with a window: give the window beside scheme.of")
        self.members = nn.ModuleList(dict.fromkeys(of))

    @property
    def parts(self) -> list[Scheme]:
        """The members, each once."""
        return [member for member in self.members if isinstance(member, Scheme)]

    @property
    def reads_keys(self) -> bool:  # type: ignore[override]
        return any(member.reads_keys for member in self.parts)

    @property
    def moves_k_and_v_alike(self) -> bool:
        return all(member.moves_k_and_v_alike for member in self.parts)

    def prepare(self, pos: Tensor, length: int) -> tuple[Any, ...]:
        return tuple(member.prepare(pos, length) for member in self.parts)

    def embed(self, x: Tensor, pos: Any) -> Tensor:
        return self._chained("embed", x, pos)

    def gate(self, x: Tensor, pos: Any) -> tuple[Any, ...]:
        return tuple(member.gate(x, prepared) for member, prepared in zip(self.parts, pos, strict=True))

    def locate(self, pos: Any, gates: Any) -> tuple[Any, ...]:
        return tuple(member.locate(*each) for member, *each in zip(self.parts, pos, gates, strict=True))

    def q(self, x: Tensor, pos: Any) -> Tensor:
        return self._chained("q", x, pos)

    def k(self, x: Tensor, pos: Any) -> Tensor:
        return self._chained("k", x, pos)

    def v(self, x: Tensor, pos: Any) -> Tensor:
        return self._chained("v", x, pos)

    def o(self, x: Tensor, pos: Any) -> Tensor:
        for member, prepared in reversed(list(zip(self.parts, pos, strict=True))):  # what went in last comes out first
            x = apply_hook(member, "o", x, prepared)
        return x

    def bias(self, q: Tensor, k: Tensor, gates: Any, at: Placement) -> Bias | None:
        each = zip(self.parts, gates, at.pos, strict=True)
        biases = [member.bias(q, k, own, at._replace(pos=prepared)) for member, own, prepared in each]
        terms = [bias for bias in biases if bias is not None]
        if not terms:
            return None

        def total(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return functools.reduce(torch.add, (added_by(term, b, h, i, j) for term in terms))

        return total

    def log_decay(self) -> Tensor | float | None:
        total: Tensor | float = 0.0
        for decay in [member.log_decay() for member in self.parts]:
            if decay is None:
                return None
            total = total + decay
        return total

    def _chained(self, hook: str, x: Tensor, pos: Any) -> Tensor:
        for member, prepared in zip(self.parts, pos, strict=True):
            x = apply_hook(member, hook, x, prepared)
        return x
