"""What a position scheme is: hooks around attention that default to the identity. Unchanged, the base class IS NoPE."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from posbench.config import ConfigError

# (b, h, i, j) -> what is added to the scaled score of query row i and key row j, in head h of sequence b.
Bias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    """The sizes of the decoder that a scheme is built for."""

    d_model: int  # C
    num_heads: int  # H
    num_kv_heads: int
    head_dim: int  # D
    num_layers: int = 1
    context_length: int = 1024  # of training, tokens
    embedding_std: float = 0.02  # of the token embeddings at initialisation
    attention: str = "softmax"  # the kind of attention
    longest: int | None = None  # that may be read, tokens, where a table must be longer than the training context


class Placement(NamedTuple):
    """Where a piece of a window stands: rows of queries and of keys as tokens of distance.

    `distance` is the same whether a window passes whole, in pieces or token by token.
    """

    pos: Any  # what `Scheme.prepare` made of the positions of the queries
    query: int  # the position of the first query, tokens
    key: int  # the position of the first key that is kept, tokens
    length: int  # of the whole window, tokens
    positions: Tensor | None = None  # of all keys that are kept, [B, keys] int64, where a batch has its own
    reach: int = 0  # above all positions of a batch that has its own
    documents: Tensor | None = None  # the row where each key's document begins, [B, keys] int64, where each is alone

    def distance(self, b: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """Tokens from key row `j` to query row `i` in sequence `b`; below 0 for later keys, which are masked."""
        if self.positions is None:
            return (i + self.query) - (j + self.key)
        return self.positions[b, i + self.query - self.key] - self.positions[b, j]

    def is_later(self, i: Tensor, j: Tensor) -> Tensor:
        """Whether key row `j` comes after query row `i`: a bias that sums over keys must leave these out."""
        return j + self.key > i + self.query

    def distances(self, q: Tensor) -> Tensor:
        """0, 1, ... up to the longest distance that queries [B, H, T, .] of this piece meet, int64."""
        count = self.reach or self.query + q.shape[2] - self.key
        return torch.arange(count, device=q.device)

    def of_query(self, values: Tensor, b: Tensor, i: Tensor) -> Tensor:
        """Row `i` of `values` at the queries' positions, [T] like these, [B, 1, T] where a batch has its own."""
        return values[i] if self.positions is None else values[b, 0, i]

    def look_up(self, by_distance: Tensor) -> Bias:
        """The bias that is `by_distance[h, d]`, [H, distances]. Each entry is read at one distance, as GPUs want it."""

        def bias(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            d = self.distance(b, i, j).clamp(min=0)
            if h.ndim == 0 or d.ndim != 2:
                return by_distance[h, d]
            # Of all heads the same entries: a quarter of a CPU's time for the line above.
            return by_distance.index_select(1, d.flatten()).unflatten(1, d.shape)

        return bias


class Gates(NamedTuple):
    """What `Scheme.gate` gave, [B, G, rows, N] each, and running sums of it up to and with each row of the window.

    In `bias` there are G = H heads. Tensors of queries and of keys are separate ones, because FlexAttention gives a
    gradient only to what is read once.
    """

    at_query: Tensor
    at_key: Tensor
    sum_at_query: Tensor
    sum_at_key: Tensor


class Scheme(nn.Module):
    """A position scheme of one layer. A subclass overrides one or two hooks; `is_relative` is its promise.

    Hooks take `pos`: what `prepare` made of the positions, once a forward pass and shared by the layers that have this
    scheme. By default that is the positions themselves, [T] int64, in tokens, counted from 0 at the window's start.

    Arguments of the constructor after `shape` are the options of the scheme's YAML file, by name. A parameter made by
    `normal` begins as the decoder's matrices do, from (seed, its name); others begin as the constructor made them.
    """

    is_relative: bool = True  # do the logits depend on differences of positions alone? measured by `posbench verify`
    keeps_norms: bool = True  # do q, k, v and o leave their hooks as long as they came in? measured too
    has_kinks: bool = False  # is the bias piecewise linear in the scores or gates, so that its gradient has steps?
    is_streaming: bool = True  # do the tokens before a position decide its logits, however many come after it? measured
    per_layer: bool | tuple[str, ...] = False  # own parameters that each layer has for itself: none, all, or the names
    reads_keys: bool = False  # does `bias` look at the keys? A kind of attention without keys refuses it
    window: int | None = None  # keys that a query sees, its own among them; None: all before it. Any row's option
    decayed: frozenset[str] = frozenset()  # own parameters that weight decay shrinks; a decayed table is pulled to 0

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape

    def normal(self, *sizes: int) -> nn.Parameter:
        """A parameter that begins normal, with the standard deviation of the decoder's matrices."""
        parameter = nn.Parameter(torch.empty(sizes))
        parameter.is_drawn = True  # type: ignore[attr-defined]  # by `posbench.model.decoder.initialise`
        return parameter

    @property
    def group(self) -> str:
        """Its heading in `posbench schemes`: where position enters, unless a class overrides it."""
        if "bias" in self.acts_on:
            return "biases on the scores"
        return "added once" if "embed" in self.acts_on else "rotations" if self.acts_on else "no position"

    @property
    def acts_on(self) -> frozenset[str]:
        """Where position enters: any of embed, q, k, v, o and bias; by default the hooks that the class overrides."""
        return frozenset(site for site in ("embed", "q", "k", "v", "o", "bias") if self.overrides(site))

    @property
    def moves_k_and_v_alike(self) -> bool:
        """Do the hooks k and v change a tensor in the same way? With a shared K = V only one of them is then cached."""
        return not (self.overrides("k") or self.overrides("v"))

    @property
    def longest(self) -> int | None:
        """Tokens up to which the scheme is defined: every position is below it. None: any length.

        A run is not trained beyond it, is not evaluated beyond it (tables show a dash) and is certified within it.
        """
        return None

    @classmethod
    def overrides(cls, *hooks: str) -> bool:
        """Whether the class has any of these hooks of its own."""
        return any(getattr(cls, hook) is not getattr(Scheme, hook) for hook in hooks)

    def flops_per_token(self, length: int) -> float | None:
        """Model FLOPs of this layer's hooks in a forward pass over windows of `length` tokens, per token.

        What is done number by number, such as a rotation, is not counted in posbench, as in most publications. None:
        not stated, which is so for a class of your own until it overrides this; reports then claim no equal compute.
        """
        return 0.0 if type(self).__module__.startswith("posbench.schemes") else None

    def prepare(self, pos: Tensor, length: int) -> Any:
        """What the hooks need to know of the positions, such as the cosines and sines of a rotation.

        Arguments: pos, [T] int64, any whole numbers from 0 to millions ([B, 1, T] where a batch has its own); length,
        tokens of the whole window. Parameters that each layer has for itself are not for it.
        Returns: a tensor or a tuple of tensors, in float64 where it is not whole numbers: the decoder rounds them once
        to its own dtype.
        """
        return pos

    def embed(self, x: Tensor, pos: Any) -> Tensor:
        """Token embeddings [B, T, C] in, the same shape out; before the first layer."""
        return x

    def gate(self, x: Tensor, pos: Any) -> Any:
        """Numbers of each token that follow from the stream, [B, G, T, N], G being 1, Hkv or H. None: none.

        `locate` and `bias` get them and their running sums. In the dtype of the parameters at least, float64 where the
        sums become angles: they grow with the length.
        Arguments: x, the stream behind the layer's norm, [B, T, C].
        """
        return None

    def locate(self, pos: Any, gates: Any) -> Any:
        """What q, k, v and o of this layer get as `pos`: by default what came in.

        Arguments: gates, `Gates` of the rows at hand, with 1 head or as many as the tensors that are to be moved: where
        G = Hkv < H it is called for q and o (H heads) and for k and v (Hkv). G = H > Hkv can move q and o alone.
        """
        return pos

    def q(self, x: Tensor, pos: Any) -> Tensor:
        """Queries [B, H, T, D]. They may come back wider, with the keys; the scale stays 1 / sqrt(head_dim)."""
        return x

    def k(self, x: Tensor, pos: Any) -> Tensor:
        """Keys [B, Hkv, T, D]. They may come back wider, with the queries."""
        return x

    def v(self, x: Tensor, pos: Any) -> Tensor:
        """Values [B, Hkv, T, D]."""
        return x

    def o(self, x: Tensor, pos: Any) -> Tensor:
        """Attention output [B, H, T, D] at the query's position, before the output projection."""
        return x

    def bias(self, q: Tensor, k: Tensor, gates: Any, at: Placement) -> Bias | None:
        """What is added to the scaled scores, as a function (b, h, i, j) of sequence, head, query row and key row.

        Pointwise on integer tensors of shapes that broadcast (0-d ones included), so that blocks, masks,
        FlexAttention's score function and linear attention's decay all use this one definition. None, for nothing,
        keeps the fused kernel. A learned table is expanded to [H, distances] here, before the function is made. It may
        build a [B, H, rows, keys] tensor here and index it: slow, and allowed. Later keys are masked behind it; if it
        sums over keys, it leaves them out itself (`at.is_later`).

        Arguments: q, the queries behind their hook, [B, H, T, .]; k, the keys that are kept behind theirs, [B, Hkv,
        keys, .], to be read where `reads_keys` says so; both unscaled. gates, `Gates` with H heads, or what `gate`
        gave in that form; at, where the rows stand: `at.distance(b, i, j)` is in tokens.
        """
        return None

    def log_decay(self) -> Tensor | float | None:
        """What `bias` adds a token of distance, at most 0, where it is `log_decay[h] * (i - j)`: [H], or one for all.

        0 where nothing is added, None where the bias is another function. Attention without a softmax runs in linear
        time where this is known, and gives what it gives by `bias`.
        """
        return None if self.overrides("bias") else 0.0


HOOKS = ("prepare", "embed", "gate", "locate", "q", "k", "v", "o", "bias", "log_decay", "flops_per_token")


def check_hooks(scheme: type[Scheme]) -> None:
    """Hold the hooks of a class that is not ours to the parameters of today's form.

    Raises: ConfigError that names the hook, its place, the form it has and the form it must have.
    """
    for name, method in vars(scheme).items():
        similar = difflib.get_close_matches(name, HOOKS, n=1, cutoff=0.8)
        if callable(method) and similar and name not in HOOKS:
            raise ConfigError(
                f"{_place(method)}{scheme.__name__}.{name} is not a hook; did you mean {similar[0]!r}? Give your "
                "own method another name"
            )
    for hook in HOOKS:
        own = getattr(scheme, hook)
        has, wants = (list(inspect.signature(function).parameters) for function in (own, getattr(Scheme, hook)))
        if len(has) != len(wants):
            raise ConfigError(
                f"{_place(own)}{scheme.__name__}.{hook}({', '.join(has)}) must be {hook}({', '.join(wants)}): "
                "see docs/adding-a-scheme.md"
            )


def apply_hook(scheme: Scheme, hook: str, x: Tensor, pos: Any) -> Tensor:
    """Return what the hook embed, q, k, v or o makes of `x`; q and k may have other channels, the last dimension.

    Raises: ConfigError that names the hook and its place if the result has another shape.
    """
    result = getattr(scheme, hook)(x, pos)
    compared = x.ndim - 1 if hook in ("q", "k") else x.ndim
    shape = getattr(result, "shape", ())
    if len(shape) != x.ndim or shape[:compared] != x.shape[:compared]:
        gives = list(shape) if isinstance(result, Tensor) else type(result).__name__
        raise ConfigError(
            f"{_place(getattr(scheme, hook))}{type(scheme).__name__}.{hook} gives {gives} for {list(x.shape)}: it must "
            f"give the same shape{'' if compared == x.ndim else ', or other channels'}"
        )
    return result


def added_by(bias: Bias, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Return what a bias adds. Raises: ConfigError for booleans, which would be added as 0 and 1, and other ranks."""
    added = bias(b, h, i, j)
    wants = torch.broadcast_shapes(b.shape, h.shape, i.shape, j.shape)
    if added.dtype == torch.bool or added.ndim > len(wants):
        raise ConfigError(
            f"{_place(bias)}the function that bias returns gives "
            + (
                f"{list(added.shape)}: give what broadcasts to {list(wants)}, such as tensor[b, h, i, j]"
                if added.ndim > len(wants)
                else "booleans, which would be added as 0 and 1: give torch.where(seen, 0.0, -float('inf'))"
            )
        )
    return added


def _place(function: Any) -> str:
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}, line {code.co_firstlineno}: " if code else ""


def whole(key: str, value: object, least: int, usual: str) -> int:
    """`value` as an option that counts something. Raises: ConfigError for all but whole numbers from `least` on."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"scheme.{key}={value} must be a whole number, {least} or more ({usual})")
    return value


def number(key: str, value: object, low: float, high: float, usual: str) -> float:
    """`value` as an option between `low` and `high`. Raises: ConfigError for what is not such a number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ConfigError(f"scheme.{key}={value} must lie between {low:g} and {high:g} ({usual})")
    return float(value)
