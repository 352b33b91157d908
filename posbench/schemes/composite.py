"""Schemes made of other schemes: several in one layer (`Combined`), or alternating by layer (`Interleaved`)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from posbench.config import ConfigError
from posbench.schemes.base import Bias, Placement, Scheme, Shape, apply_hook, evaluate_bias
from posbench.schemes.earlier import EarlierRows


class JointProperties:
    """The properties that several schemes have together, in one layer or in all."""

    @property
    def parts(self) -> list[Scheme]:
        """Return the schemes that are used together."""
        raise NotImplementedError

    @property
    def looks_back(self) -> int:
        """Return how many tokens before the current one the schemes read, at most."""
        return max(scheme.looks_back for scheme in self.parts)

    @property
    def is_relative(self) -> bool:
        """Return True if logits depend only on differences of positions."""
        return all(scheme.is_relative for scheme in self.parts)

    @property
    def keeps_norms(self) -> bool:
        """Return True if no scheme changes the length of a query, key, value or output vector."""
        return all(scheme.keeps_norms for scheme in self.parts)

    @property
    def is_streaming(self) -> bool:
        """Return True if no logits depend on how many tokens follow."""
        return all(scheme.is_streaming for scheme in self.parts)

    @property
    def acts_on(self) -> frozenset[str]:
        """Return the sites at which any of the schemes adds position."""
        return frozenset[str]().union(*(scheme.acts_on for scheme in self.parts))

    @property
    def longest(self) -> int | None:
        """Return the longest input in tokens for which all schemes are defined, or None without a limit."""
        return min((scheme.longest for scheme in self.parts if scheme.longest is not None), default=None)

    def flops_per_token(self, length: int) -> float | None:
        """Return the FLOPs per token of all schemes, or None if any is unknown."""
        flops = [scheme.flops_per_token(length) for scheme in self.parts]
        return None if None in flops else float(sum(count for count in flops if count is not None))


class Interleaved(Scheme):
    """Schemes that alternate: layer n uses `layers[n % len(layers)]`; equal ones share their parameters.

    Options: `layers`, names of schemes, such as [qk_rope, qk_rope, qk_rope, nope].
    """

    def __init__(self, shape: Shape, layers: Sequence[Any]) -> None:
        # This class only declares the option: `build_scheme` gives each layer its scheme.
        super().__init__(shape)


class Combined(JointProperties, Scheme):  # type: ignore[override]
    """Several schemes in one layer: each changes q, k, v and o in turn, and their biases are added.

    A bias that reads keys sees them after the changes of all schemes.

    Options: `of`, names of schemes, such as [alibi, qk_rope].
    """

    def __init__(self, shape: Shape, of: Sequence[Scheme]) -> None:
        super().__init__(shape)
        if not (isinstance(of, Sequence) and of and all(isinstance(member, Scheme) for member in of)):
            raise ConfigError("scheme.of must be a list of schemes, such as scheme.of=[qk_rope,nope]")
        if any(member.window for member in of):
            raise ConfigError("scheme.of holds a scheme with a window: set scheme.window next to scheme.of instead")
        # A scheme named twice is one object, whose hooks run once.
        self.members = nn.ModuleList(dict.fromkeys(of))

    @property
    def parts(self) -> list[Scheme]:
        """Return the combined schemes without repetitions."""
        return [member for member in self.members if isinstance(member, Scheme)]

    @property
    def reads_keys(self) -> bool:  # type: ignore[override]
        return any(member.reads_keys for member in self.parts)

    @property
    def chunk(self) -> int | None:  # type: ignore[override]
        return min((member.chunk for member in self.parts if member.chunk is not None), default=None)

    @property
    def moves_k_and_v_alike(self) -> bool:
        return all(member.moves_k_and_v_alike for member in self.parts)

    def prepare(self, pos: Tensor, length: int) -> tuple[Any, ...]:
        return tuple(member.prepare(pos, length) for member in self.parts)

    def call_hook(self, hook: str, x: Tensor, pos: Any, past: EarlierRows) -> Any:
        numbered = list(enumerate(zip(self.parts, pos, strict=True)))
        # Each member has gates of its own; the other hooks change one tensor in turn.
        if hook == "gate":
            return tuple(member.call_hook(hook, x, prepared, past.of_member(n)) for n, (member, prepared) in numbered)
        for n, (member, prepared) in reversed(numbered) if hook == "o" else numbered:  # o undoes the last hook first
            x = apply_hook(member, hook, x, prepared, past.of_member(n))
        return x

    def locate(self, pos: Any, gates: Any) -> tuple[Any, ...]:
        inputs = zip(self.parts, pos, gates, strict=True)
        return tuple(member.locate(prepared, gate) for member, prepared, gate in inputs)

    def bias(self, q: Tensor, k: Tensor, gates: Any, at: Placement) -> Bias | None:
        inputs = zip(self.parts, gates, at.pos, strict=True)
        biases = [member.bias(q, k, gate, at._replace(pos=prepared)) for member, gate, prepared in inputs]
        terms = [bias for bias in biases if bias is not None]
        if not terms:
            return None

        def total(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return functools.reduce(torch.add, (evaluate_bias(term, b, h, i, j) for term in terms))

        return total

    def log_decay(self) -> Tensor | float | None:
        # Slopes add like the biases; one bias that is not linear makes the sum nonlinear.
        total: Tensor | float = 0.0
        for decay in [member.log_decay() for member in self.parts]:
            if decay is None:
                return None
            total = total + decay
        return total
