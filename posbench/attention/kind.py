"""Define a kind of attention: how scores become weights, which hooks apply, and what is cached."""

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
    """The cache of one layer for reading a window piece by piece: rows per token, or a state of fixed size.

    Gates have their own caches: rows if a bias reads them, otherwise only their running sums, and nothing if later
    queries read neither (`Scheme.reads_earlier_gates`).
    """

    def __init__(self, length: int) -> None:
        self.length, self.filled = length, 0  # tokens
        self.tensors: tuple[Tensor | None, ...] = ()  # [B, heads, length, .], filled from the left
        self.state: tuple[Tensor, ...] = ()  # of fixed size
        self.gates: dict[tuple[int, ...], KVCache] = {}  # path of a member in combined schemes -> its cache
        self.rows: dict[str, Tensor] = {}  # last rows of the tensors of hooks that look back, by hook
        self.positions: Tensor | None = None  # [B, filled], in the first layer if documents are masked

    def advance(self, tokens: int) -> None:
        """Count `tokens` more tokens as cached. Raises: ConfigError if they exceed the length of the cache."""
        self.filled += tokens
        if self.filled > self.length:
            raise ConfigError(f"{self.filled} tokens do not fit a cache made for {self.length}: make it longer")

    def append(self, *new: Tensor | None, window: int | None = None) -> tuple[Tensor | None, ...]:
        """Append `new` [B, heads, t, .] to each cached tensor and return everything cached so far. None stays None.

        With a window, return the rows that were kept before and the new ones, and keep the last `window` of them.
        """
        start = self.filled
        self.advance(next(x.shape[2] for x in new if x is not None))
        if window is not None:
            cached = self.tensors or len(new) * (None,)
            rows = tuple(
                x if old is None or x is None else torch.cat((old, x), 2) for old, x in zip(cached, new, strict=True)
            )
            # Cloned, because a view would keep the dropped rows in memory.
            self.tensors = tuple(None if x is None else x[:, :, -window:].clone() for x in rows)
            return rows
        if not self.tensors:
            # Allocate the whole length once: growing by concatenation would copy all rows at every token.
            self.tensors = tuple(None if x is None else x.new_empty(*x.shape[:2], self.length, x.shape[3]) for x in new)
        for tensor, x in zip(self.tensors, new, strict=True):
            if tensor is not None and x is not None:
                tensor[:, :, start : self.filled] = x
        return tuple(None if tensor is None else tensor[:, :, : self.filled] for tensor in self.tensors)

    @property
    def size(self) -> int:
        """Return how many numbers the cache holds, for all sequences of the batch."""
        tensors = [x for x in (*self.tensors, *self.state, *self.rows.values()) if x is not None]
        return sum(x.numel() for x in tensors) + sum(cache.size for cache in self.gates.values())


def _with_heads(gates: Any, heads: int, also_one: bool = False) -> Any:
    """Return gates of G heads repeated for `heads` heads; also those in the tuples of combined schemes. None stays.

    Gates of one head broadcast, so they are repeated only if `also_one`.
    """
    if gates is None or not isinstance(gates, Gates):
        return gates if gates is None else tuple(_with_heads(member, heads, also_one) for member in gates)
    G = gates.at_query.shape[1]
    if heads <= G or (G == 1 and not also_one):
        return gates
    return Gates(*(x.expand(-1, heads, -1, -1) if G == 1 else x.repeat_interleave(heads // G, dim=1) for x in gates))


class Kind(nn.Module, ABC):
    """A kind of attention, such as softmax attention: it mixes values for each query and applies a scheme.

    `parts` are the tensors it projects; `mix` calls the hooks of a position scheme. The constructor's arguments
    after `shape` are the options of `scheme.attention`. `shared_kv` makes the value equal to the key BEFORE the hooks,
    after the key's norm (`model.qk_norm`) if there is one; there is then no projection for values.
    """

    takes_bias: bool = True  # whether a scheme may add a bias
    has_keys: bool = True  # whether a bias may read keys
    takes_qk_norm: bool = False  # whether `model.qk_norm` normalises its queries and keys
    takes_windows: bool = False  # whether it supports sliding windows and document masks
    parts: tuple[str, ...] = ("q", "k", "v")  # parts of the packed projection, in this order; a kind may lack some
    kernel: Callable[..., Tensor] | None = None  # one of `kernels`; None means the best for the scheme and the device
    value_norm: bool = False  # whether values are divided by their RMS; a shared K = V is then the key before its norm
    sensitivity: float = 1.0  # how much more roundings of its inputs change its output than in softmax attention
    may_compile: bool = False  # whether it may compile its own code while the code around it is not compiled

    def __init__(self, shape: Shape, shared_kv: bool = False) -> None:
        super().__init__()
        if not isinstance(shared_kv, bool):
            raise ConfigError(f"scheme.attention.shared_kv={shared_kv!r} must be true or false")
        if shared_kv and not {"k", "v"} <= set(self.parts):
            raise ConfigError("scheme.attention.shared_kv=true needs a kind of attention that has keys and values")
        self.shape, self.shared_kv = shape, shared_kv

    def gates_and_positions(
        self, x: Tensor, scheme: Scheme, at: Placement, cache: KVCache | None
    ) -> tuple[Any, Any, Any]:
        """Return the gates and the positions that the methods of a scheme receive in this layer.

        Returns: the gates for `scheme.bias`, or None, the `pos` of q and o, and the `pos` of k and v.
        Arguments: x, the normalised stream, [B, T, C]; cache, with the gates of earlier tokens, which is updated, or
        None for a whole window. Raises: ConfigError if the gates have another shape.
        """
        if not scheme.overrides("gate", "locate"):
            return None, at.pos, at.pos
        gate = scheme.call_hook("gate", x, at.pos, at.past(None if cache is None else cache.rows))
        gates, H, Hkv = self._gates(gate, scheme, cache), self.shape.num_heads, self.shape.num_kv_heads
        pos = scheme.locate(at.pos, _with_heads(gates, H))
        key_pos = pos if Hkv == H else scheme.locate(at.pos, _with_heads(gates, Hkv))
        return _with_heads(gates, H, also_one=True), pos, key_pos

    def _gates(self, gate: Any, scheme: Scheme, cache: KVCache | None, path: tuple[int, ...] = ()) -> Any:
        """Return a scheme's per-token values and their running sums as `Gates`, and update the cache.

        Arguments: gate, the result of `scheme.gate`; path, its place in the nested tuple of combined schemes.
        """
        if isinstance(gate, tuple):
            members = scheme.parts if isinstance(scheme, Combined) else [scheme] * len(gate)
            pairs = enumerate(zip(gate, members, strict=True))
            return tuple(self._gates(part, member, cache, (*path, n)) for n, (part, member) in pairs)
        if gate is None:
            return None
        self._check_gate(gate, scheme)
        # Sums are float64, because schemes take differences of long sums. Later queries may read neither the gates nor
        # their sums: then nothing is cached.
        if cache is not None and not scheme.reads_earlier_gates:
            sums = gate.cumsum(2, dtype=torch.float64)
            return Gates(gate, gate, sums, sums)
        gate_cache = None if cache is None else cache.gates.setdefault(path, type(cache)(cache.length))
        # A bias reads the gates of every earlier token; `locate` needs only the sum so far.
        if gate_cache is None or scheme.overrides("bias"):
            rows = gate if gate_cache is None else cast(Tensor, gate_cache.append(gate)[0])
            sums = rows.cumsum(2, dtype=torch.float64)
            # Cloned: FlexAttention computes a gradient only for a tensor that is indexed once.
            return Gates(gate, rows.clone(), sums[:, :, -gate.shape[2] :], sums.clone())
        sums = gate.cumsum(2, dtype=torch.float64)
        sums = sums + gate_cache.state[0] if gate_cache.state else sums
        gate_cache.state = (sums[:, :, -1:],)
        return Gates(gate, gate, sums, sums)

    def _check_gate(self, gate: Tensor, scheme: Scheme) -> None:
        H, Hkv = self.shape.num_heads, self.shape.num_kv_heads
        if gate.ndim != 4 or gate.shape[1] not in (1, Hkv, H):
            raise ConfigError(
                f"{type(scheme).__name__}.gate gives {list(gate.shape)}: it must give [B, G, T, N] with G of 1, "
                f"{Hkv} (shape.num_kv_heads) or {H} (shape.num_heads)"
            )
        # `locate` is then called a second time for the key heads, which cannot have H gates.
        if gate.shape[1] not in (1, Hkv) and scheme.overrides("locate") and {"k", "v"} & scheme.acts_on:
            raise ConfigError(
                f"{type(scheme).__name__}.gate gives numbers for {gate.shape[1]} heads, but its locate also moves keys "
                f"or values, which have {Hkv} heads: return G of 1 or {Hkv} (here shape.num_heads={H} and "
                f"shape.num_kv_heads={Hkv}; posbench verify has a model of its own, with fewer key heads than heads)"
            )

    def check_scheme(self, scheme: Scheme) -> None:
        """Raise ConfigError if this kind cannot compute what the scheme's methods do; by default it can."""

    @property
    def heads_by_part(self) -> dict[str, int]:
        """Return {part: its number of heads} for the projected parts: num_heads for q, num_kv_heads for k and v."""
        counts = {"q": self.shape.num_heads, "k": self.shape.num_kv_heads, "v": self.shape.num_kv_heads}
        return {part: counts[part] for part in self.parts if not (part == "v" and self.shared_kv)}

    @property
    def scale(self) -> float:
        """Return the factor of q . k: 1 / sqrt(head_dim), however wide a scheme makes q and k."""
        return self.shape.head_dim**-0.5

    def new_cache(self, length: int) -> KVCache:
        """Return an empty cache for one layer and a window of `length` tokens."""
        return KVCache(length)

    def kernels(
        self, schemes: Sequence[Scheme], has_bias: bool, device: torch.device
    ) -> Mapping[str, Callable[..., Tensor] | None]:
        """Return {name: function} of the functions that can compute this kind; None is the default choice."""
        return {"mix": None}

    @abstractmethod
    def mix(
        self, parts: Mapping[str, Tensor], x: Tensor, scheme: Scheme, at: Placement, cache: KVCache | None
    ) -> Tensor:
        """Return the attention output [B, H, T, D]: each query's causal mix of values, changed by the scheme.

        Arguments: parts, q [B, H, T, D] and k, v [B, Hkv, T, D] before the hooks, as far as the kind has them; x and
        cache, as of `gates_and_positions`.
        """

    @abstractmethod
    def flops_per_token(self, length: int, scheme: Scheme) -> float:
        """Return the model FLOPs per token of mixing in one layer's forward pass over windows of `length` tokens.

        Only FLOPs that the definition needs count: a causal query meets half the keys on average.
        """
