"""A kind of attention: how scores become weights, which of a scheme's hooks apply, and what is kept of the past."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from posbench.config import ConfigError
from posbench.schemes import At, Scheme, Shape


class Past:
    """What one layer keeps of the tokens before, as a window is read piece by piece.

    Rows of each token (`extended`: keys, values, gates), or a state of fixed size that a recurrence carries on.
    """

    def __init__(self, length: int) -> None:
        self.length, self.filled = length, 0  # tokens
        self.tensors: tuple[Tensor | None, ...] = ()  # [B, heads, length, .], filled from the left
        self.state: tuple[Tensor, ...] = ()  # of fixed size

    def advance(self, tokens: int) -> None:
        """So many more tokens are in. Raises: ConfigError where they are more than the past was made for."""
        self.filled += tokens
        if self.filled > self.length:
            raise ConfigError(f"{self.filled} tokens do not fit a past that was made for {self.length}: make it longer")

    def extended(self, *new: Tensor | None) -> tuple[Tensor | None, ...]:
        """All rows so far of each tensor, the `new` ones [B, heads, t, .] included. None stays None."""
        if not self.tensors:
            self.tensors = tuple(None if x is None else x.new_empty(*x.shape[:2], self.length, x.shape[3]) for x in new)
        start = self.filled
        self.advance(next(x.shape[2] for x in new if x is not None))
        for tensor, x in zip(self.tensors, new, strict=True):
            if tensor is not None and x is not None:
                tensor[:, :, start : self.filled] = x
        return tuple(None if tensor is None else tensor[:, :, : self.filled] for tensor in self.tensors)

    @property
    def num_bytes(self) -> int:
        """Of memory, for all sequences of the batch."""
        tensors = [x for x in (*self.tensors, *self.state) if x is not None]
        return sum(x.numel() * x.element_size() for x in tensors)


class Kind(nn.Module, ABC):
    """How a head mixes values. A subclass says which parts it projects, and mixes them under a scheme's hooks.

    Arguments of the constructor after `shape` are the options under `scheme.attention`, by name. `shared_kv` makes the
    value the key BEFORE the hooks: there is then no projection of values.
    """

    parts: tuple[str, ...] = ("q", "k", "v")  # of the packed projection, in this order; a kind may lack some
    way: Callable[..., Tensor] | None = None  # one of `ways`; None: the best for the scheme and the device
    may_compile: bool = False  # may it compile a part of its own where the code around it is not compiled?

    def __init__(self, shape: Shape, shared_kv: bool = False) -> None:
        super().__init__()
        if not isinstance(shared_kv, bool):
            raise ConfigError(f"scheme.attention.shared_kv={shared_kv!r} must be true or false")
        if shared_kv and not {"k", "v"} <= set(self.parts):
            raise ConfigError("scheme.attention.shared_kv=true needs a kind of attention that has keys and values")
        self.shape, self.shared_kv = shape, shared_kv

    @property
    def heads(self) -> dict[str, int]:
        """Heads of each part that is projected: q has num_heads, k and v num_kv_heads each."""
        counts = {"q": self.shape.num_heads, "k": self.shape.num_kv_heads, "v": self.shape.num_kv_heads}
        return {part: counts[part] for part in self.parts if not (part == "v" and self.shared_kv)}

    @property
    def scale(self) -> float:
        """What multiplies q . k: 1 / sqrt(head_dim), however wide a scheme makes q and k."""
        return self.shape.head_dim**-0.5

    def past(self, length: int) -> Past:
        """Room for what one layer keeps of a window of `length` tokens."""
        return Past(length)

    def ways(
        self, schemes: Sequence[Scheme], has_bias: bool, device: torch.device
    ) -> Mapping[str, Callable[..., Tensor] | None]:
        """The ways in which this kind may run, by name: `posbench verify` sets `way` to each. None: the usual one.

        Arguments: schemes, the distinct ones of the layers; has_bias, whether any of them adds to its scores.
        """
        return {"mix": None}

    @abstractmethod
    def mix(
        self, q: Tensor | None, k: Tensor | None, v: Tensor, x: Tensor, scheme: Scheme, at: At, past: Past | None
    ) -> Tensor:
        """Values mixed for every query, with the hooks of the scheme applied.

        Arguments: q [B, H, T, D] and k, v [B, Hkv, T, D] before the hooks, None for a part that the kind lacks; x, the
        stream behind the norm, [B, T, C]; scheme, of this layer; at, where the queries stand; past, what was kept of
        the tokens before, to be extended, or None where the window is whole.
        Returns: [B, H, T, D], causal.
        """

    @abstractmethod
    def flops_per_token(self, length: int, scheme: Scheme) -> float:
        """Model FLOPs of mixing in one layer's forward pass over windows of `length` tokens, per token.

        Those that the definition needs: in causal attention each query meets half the keys on average.
        """
