"""A kind of attention: how scores become weights, which of a scheme's hooks apply, and what is cached."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from posbench.config import ConfigError
from posbench.schemes import Gates, Placement, Scheme, Shape
from posbench.schemes.composite import Combined


class KVCache:
    """What one layer keeps of the tokens before, as a window is read piece by piece.

    Rows of each token (`extended`: keys, values), or a state of fixed size that a recurrence carries on. Gates have a
    cache of their own, `gates`: their rows where a bias reads them, or their last sums.
    """

    def __init__(self, length: int) -> None:
        self.length, self.filled = length, 0  # tokens
        self.tensors: tuple[Tensor | None, ...] = ()  # [B, heads, length, .], filled from the left
        self.state: tuple[Tensor, ...] = ()  # of fixed size
        self.gates: dict[tuple[int, ...], KVCache] = {}  # by member where schemes are combined
        self.positions: Tensor | None = None  # [B, filled], in the first layer's where each document is read alone

    def advance(self, tokens: int) -> None:
        """So many more tokens are in. Raises: ConfigError where they are more than the cache was made for."""
        self.filled += tokens
        if self.filled > self.length:
            raise ConfigError(f"{self.filled} tokens do not fit a cache made for {self.length}: make it longer")

    def extended(self, *new: Tensor | None, window: int | None = None) -> tuple[Tensor | None, ...]:
        """All rows so far of each tensor, the `new` ones [B, heads, t, .] included. None stays None.

        With a window: those that one of the new rows sees, of which the last `window` are kept.
        """
        if window is not None:
            self.advance(next(x.shape[2] for x in new if x is not None))
            before = self.tensors or len(new) * (None,)
            rows = tuple(
                x if old is None or x is None else torch.cat((old, x), 2) for old, x in zip(before, new, strict=True)
            )
            self.tensors = tuple(None if x is None else x[:, :, -window:].clone() for x in rows)
            return rows
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
        return sum(x.numel() * x.element_size() for x in tensors) + sum(
            cache.num_bytes for cache in self.gates.values()
        )


def _with_heads(gates: Any, heads: int, also_one: bool = False) -> Any:
    """The gates for so many heads, where they are of fewer; those of one head as they are, unless `also_one`."""
    if gates is None or not isinstance(gates, Gates):
        return gates if gates is None else tuple(_with_heads(each, heads, also_one) for each in gates)
    G = gates.at_query.shape[1]
    if heads <= G or (G == 1 and not also_one):
        return gates
    return Gates(*(x.expand(-1, heads, -1, -1) if G == 1 else x.repeat_interleave(heads // G, dim=1) for x in gates))


class Kind(nn.Module, ABC):
    """How a head mixes values. A subclass says which parts it projects, and mixes them under a scheme's hooks.

    Arguments of the constructor after `shape` are the options under `scheme.attention`, by name. `shared_kv` makes the
    value the key BEFORE the hooks: there is then no projection of values.
    """

    has_keys: bool = True  # may a bias read them?
    takes_windows: bool = False  # may a query see a part of the tokens before it alone, a window or a document?
    parts: tuple[str, ...] = ("q", "k", "v")  # of the packed projection, in this order; a kind may lack some
    kernel: Callable[..., Tensor] | None = None  # one of `kernels`; None: the best for the scheme and the device
    may_compile: bool = False  # may it compile a part of its own where the code around it is not compiled?

    def __init__(self, shape: Shape, shared_kv: bool = False) -> None:
        super().__init__()
        if not isinstance(shared_kv, bool):
            raise ConfigError(f"scheme.attention.shared_kv={shared_kv!r} must be true or false")
        if shared_kv and not {"k", "v"} <= set(self.parts):
            raise ConfigError("scheme.attention.shared_kv=true needs a kind of attention that has keys and values")
        self.shape, self.shared_kv = shape, shared_kv

    def placed(self, x: Tensor, scheme: Scheme, at: Placement, cache: KVCache | None) -> tuple[Any, Any, Any]:
        """The scheme's gates as `bias` takes them, what q and o get as `pos`, and what k and v get.

        Arguments: x, the stream behind the norm, [B, T, C]. Raises: ConfigError for gates of another form.
        """
        if not scheme.overrides("gate", "locate"):
            return None, at.pos, at.pos
        gates, H, Hkv = (
            self._gates(scheme.gate(x, at.pos), scheme, cache),
            self.shape.num_heads,
            self.shape.num_kv_heads,
        )
        pos = scheme.locate(at.pos, _with_heads(gates, H))
        of_keys = pos if Hkv == H else scheme.locate(at.pos, _with_heads(gates, Hkv))
        return _with_heads(gates, H, also_one=True), pos, of_keys

    def _gates(self, gate: Any, scheme: Scheme, cache: KVCache | None, path: tuple[int, ...] = ()) -> Any:
        """`Gates` of what `gate` gave, in tuples where that is in tuples, with sums over all tokens so far."""
        if isinstance(gate, tuple):
            members = scheme.parts if isinstance(scheme, Combined) else [scheme] * len(gate)
            each = enumerate(zip(gate, members, strict=True))
            return tuple(self._gates(own, member, cache, (*path, n)) for n, (own, member) in each)
        if gate is None:
            return None
        self._check_gate(gate, scheme)
        own = None if cache is None else cache.gates.setdefault(path, type(cache)(cache.length))
        if own is None or scheme.overrides("bias"):
            rows = gate if own is None else cast(Tensor, own.extended(gate)[0])
            sums = rows.cumsum(2)
            return Gates(gate, rows.clone(), sums[:, :, -gate.shape[2] :], sums.clone())
        sums = gate.cumsum(2)
        sums = sums + own.state[0] if own.state else sums
        own.state = (sums[:, :, -1:],)
        return Gates(gate, gate, sums, sums)

    def _check_gate(self, gate: Tensor, scheme: Scheme) -> None:
        H, Hkv = self.shape.num_heads, self.shape.num_kv_heads
        if gate.ndim != 4 or gate.shape[1] not in (1, Hkv, H):
            raise ConfigError(
                f"{type(scheme).__name__}.gate gives {list(gate.shape)}: it must give [B, G, T, N] with G of 1, "
                f"{Hkv} (key heads) or {H} (heads)"
            )
        if gate.shape[1] not in (1, Hkv) and scheme.overrides("locate") and {"k", "v"} & scheme.acts_on:
            raise ConfigError(
                f"{type(scheme).__name__}.gate gives numbers of {gate.shape[1]} heads, but its locate also moves keys "
                f"or values, which have {Hkv}: give G of 1 or {Hkv}"
            )

    @property
    def heads(self) -> dict[str, int]:
        """Heads of each part that is projected: q has num_heads, k and v num_kv_heads each."""
        counts = {"q": self.shape.num_heads, "k": self.shape.num_kv_heads, "v": self.shape.num_kv_heads}
        return {part: counts[part] for part in self.parts if not (part == "v" and self.shared_kv)}

    @property
    def scale(self) -> float:
        """What multiplies q . k: 1 / sqrt(head_dim), however wide a scheme makes q and k."""
        return self.shape.head_dim**-0.5

    def new_cache(self, length: int) -> KVCache:
        """Room for what one layer keeps of a window of `length` tokens."""
        return KVCache(length)

    def kernels(
        self, schemes: Sequence[Scheme], has_bias: bool, device: torch.device
    ) -> Mapping[str, Callable[..., Tensor] | None]:
        """The kernels this kind may run on, by name: `posbench verify` sets `kernel` to each. None: the usual one.

        Arguments: schemes, the distinct ones of the layers; has_bias, whether any of them adds to its scores.
        """
        return {"mix": None}

    @abstractmethod
    def mix(
        self,
        q: Tensor | None,
        k: Tensor | None,
        v: Tensor,
        x: Tensor,
        scheme: Scheme,
        at: Placement,
        cache: KVCache | None,
    ) -> Tensor:
        """Values mixed for every query, with the hooks of the scheme applied.

        Arguments: q [B, H, T, D] and k, v [B, Hkv, T, D] before the hooks, None for a part that the kind lacks; x, the
        stream behind the norm, [B, T, C]; scheme, of this layer; at, where the queries stand; cache, what was kept of
        the tokens before, to be extended, or None where the window is whole.
        Returns: [B, H, T, D], causal.
        """

    @abstractmethod
    def flops_per_token(self, length: int, scheme: Scheme) -> float:
        """Model FLOPs of mixing in one layer's forward pass over windows of `length` tokens, per token.

        Those that the definition needs: in causal attention each query meets half the keys on average.
        """
