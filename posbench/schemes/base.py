"""The interface of a position scheme: hooks around attention that do nothing by default. The base class IS NoPE."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from posbench.config import ConfigError
from posbench.schemes.earlier import EarlierRows

# Indices (b, h, i, j) -> the term added to q . k / sqrt(D) of query row i and key row j, in head h of sequence b.
Bias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    """The sizes of the decoder that a position scheme is built for."""

    d_model: int  # C
    num_heads: int  # H
    num_kv_heads: int  # Hkv
    head_dim: int  # D
    num_layers: int = 1  # layers with attention
    context_length: int = 1024  # training context, tokens
    embedding_std: float = 0.02  # standard deviation of the token embeddings at initialisation
    attention: str = "softmax"  # the kind of attention
    longest: int | None = None  # longest input, tokens, if a table must be longer than the training context
    trained_length: int | None = None  # context that positions were trained in, tokens; None means context_length

    @property
    def positions_length(self) -> int:
        """Return L of the formulas: the training context, or the source's in a continued run."""
        return self.trained_length or self.context_length


class Placement(NamedTuple):
    """The positions of the queries and keys of one attention call, a row per token."""

    pos: Any  # result of `Scheme.prepare` for the positions of the queries
    first_query: int  # position of the first query, tokens
    first_key: int  # position of the first cached key, tokens
    length: int  # tokens of the whole input
    positions: Tensor | None = None  # positions of all cached keys, [B, keys] int64, if each sequence has its own
    position_limit: int = 0  # 1 + the largest entry of `positions`, or more; 0 if unset
    documents: Tensor | None = None  # first row of each key's document, [B, keys] int64, if documents are masked

    def past(self, cached: dict[str, Tensor] | None) -> EarlierRows:
        """Return access to the tokens before the queries, for hooks that read earlier tokens.

        Arguments: cached, {hook: the last rows of its tensor}; None if the input is processed whole.
        """
        return EarlierRows(None if self.documents is None else self.positions, self.first_key, cached)

    def distance(self, b: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """Return how many tokens key row `j` is before query row `i` in sequence `b`; negative if the key is later."""
        # Positions, not row numbers, so an input read whole, in chunks or token by token gives the same distances.
        if self.positions is None:
            return (i + self.first_query) - (j + self.first_key)
        return self.positions[b, i + self.first_query - self.first_key] - self.positions[b, j]

    def is_later(self, i: Tensor, j: Tensor) -> Tensor:
        """Return True if key row `j` comes after query row `i`. A bias that sums over keys needs it."""
        return j + self.first_key > i + self.first_query

    def distances(self, q: Tensor) -> Tensor:
        """Return all distances 0, 1, 2, ... that queries `q` [B, H, T, .] can have to a key, 1-d int64."""
        # The last query is at `first_query + T - 1`. Positions with gaps can be farther apart than rows.
        count = self.position_limit or self.first_query + q.shape[2] - self.first_key
        return torch.arange(count, device=q.device)

    def value_at_query(self, values: Tensor, b: Tensor, i: Tensor) -> Tensor:
        """Return the entries for query rows `i` from `values` [T], or [B, 1, T] with `positions`."""
        return values[i] if self.positions is None else values[b, 0, i]

    def look_up(self, by_distance: Tensor) -> Bias:
        """Return a bias that looks up head h and distance d in the table `by_distance` [H, distances]."""

        def bias(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            # Later keys are masked, so any entry serves their negative distances.
            d = self.distance(b, i, j).clamp(min=0)
            # FlexAttention passes one index at a time. Sequences with their own positions have more than [rows, keys].
            if h.ndim == 0 or d.ndim != 2:
                return by_distance[h, d]
            # All heads read the same columns: on a CPU this takes a quarter of the time of the line above.
            return by_distance.index_select(1, d.flatten()).unflatten(1, d.shape)

        return bias


class Gates(NamedTuple):
    """Per-token values that a scheme computes, and their running sums (own token included), [B, G, rows, N] each.

    G is the number of heads; in `Scheme.bias`, G = H. The sums are float64: their differences keep their digits.
    """

    # Queries and keys have separate tensors: FlexAttention computes a gradient only for a tensor indexed once.
    at_query: Tensor
    at_key: Tensor
    sum_at_query: Tensor
    sum_at_key: Tensor


class Scheme(nn.Module):
    """A position scheme of one layer: methods (hooks) that the model calls around attention, and properties.

    A subclass overrides one or two hooks and declares its properties. Hooks receive `pos`, the result of `prepare`: by
    default the positions, [T] int64, in tokens from the start of the input.

    The hooks in `LOOKING_BACK` may take a third argument, `earlier`: `earlier(n)` is x, n tokens earlier (zeros before
    the input and before the document), for n up to `looks_back`.

    The constructor's arguments after `shape` are the options in the scheme's YAML file. A parameter made by `normal` is
    drawn from (seed, its name); others keep their values.
    """

    is_relative: bool = True  # logits depend only on differences of positions (measured by `posbench verify`)
    keeps_norms: bool = True  # the hooks q, k, v and o keep the length of each vector (measured too)
    has_kinks: bool = False  # the bias is piecewise linear in scores or gates, so its gradient has jumps
    is_streaming: bool = True  # the logits of a position do not depend on how many tokens follow (measured too)
    per_layer: bool | tuple[str, ...] = False  # parameters that are not shared by layers: none, all, or these names
    reads_length: bool = False  # a formula contains L, `Shape.positions_length`
    reads_keys: bool = False  # `bias` uses the keys; kinds of attention without keys refuse such a scheme
    looks_back: int = 0  # tokens before the current one that hooks read by `earlier`
    window: int | None = None  # keys each query can see, including its own; None means all. An option of any scheme
    chunk: int | None = None  # tokens of the chunks that the bias hides from each other; None means no chunks
    reads_earlier_gates: bool = True  # `bias` or `locate` reads gates of keys or running sums, not only at_query
    decayed: frozenset[str] = frozenset()  # parameters with weight decay, which pulls them to 0

    _takes_earlier: frozenset[str] = frozenset()  # hooks with the argument `earlier`

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # Inspected once per class, because `call_hook` runs in every layer of every forward pass.
        cls._takes_earlier = frozenset(
            hook for hook in LOOKING_BACK if "earlier" in inspect.signature(getattr(cls, hook)).parameters
        )

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape

    def normal(self, *sizes: int) -> nn.Parameter:
        """Return a new parameter of shape `sizes`, drawn later like the decoder's matrices."""
        parameter = nn.Parameter(torch.empty(sizes))
        parameter.is_drawn = True  # type: ignore[attr-defined]  # `posbench.model.decoder.initialise` fills it
        return parameter

    @property
    def group(self) -> str:
        """Return the scheme's heading in `posbench schemes`."""
        if "bias" in self.acts_on:
            return "biases on the scores"
        if self.looks_back:
            return "earlier tokens"
        if "embed" in self.acts_on:
            return "added once"
        return "rotations" if self.acts_on else "no position"

    @property
    def acts_on(self) -> frozenset[str]:
        """Return where the scheme adds position, by default the hooks it overrides: embed, hidden, q, k, v, o, bias."""
        return frozenset(site for site in ("embed", "hidden", "q", "k", "v", "o", "bias") if self.overrides(site))

    @property
    def reach(self) -> int | None:
        """Return the largest number of keys that a query can see, including its own, or None if it sees all."""
        return min((limit for limit in (self.window, self.chunk) if limit is not None), default=None)

    @property
    def moves_k_and_v_alike(self) -> bool:
        """Return True if the scheme changes k and v in the same way; a shared K = V then needs only one cache."""
        return not (self.overrides("k") or self.overrides("v"))

    @property
    def longest(self) -> int | None:
        """Return the longest input in tokens for which the scheme is defined, or None without a limit.

        Longer inputs are not trained on, evaluated (tables show a dash) or certified.
        """
        return None

    @classmethod
    def overrides(cls, *hooks: str) -> bool:
        """Return True if the class overrides any of the methods named in `hooks`, such as `bias`."""
        return any(getattr(cls, hook) is not getattr(Scheme, hook) for hook in hooks)

    def flops_per_token(self, length: int) -> float | None:
        """Return the FLOPs per token that the scheme adds to one layer in a forward pass over `length` tokens.

        Elementwise operations such as rotations are not counted, as in most publications. None means unknown, the
        default of a class outside posbench; reports then do not claim equal compute.
        """
        return 0.0 if type(self).__module__.startswith("posbench.schemes") else None

    def prepare(self, pos: Tensor, length: int) -> Any:
        """Return what the other hooks receive as `pos`, such as cosines and sines; by default `pos`.

        It runs once per forward pass for all layers that share the scheme, so it must not use `per_layer` parameters.
        Arguments: pos, [T] int64 from 0 to millions ([B, 1, T] if each sequence has its own); length, tokens of the
        whole input.
        Returns: a tensor or tuple of tensors, float64 or integer. The decoder rounds floats once, to its own dtype.
        """
        return pos

    def embed(self, x: Tensor, pos: Any) -> Tensor:
        """Return the token embeddings `x` [B, T, C] with position added; called once, before the first layer."""
        return x

    def hidden(self, x: Tensor, pos: Any) -> Tensor:
        """Return the hidden states that projections and `gate` read, [B, T, C]; by default `x`, unchanged.

        Arguments: x, the hidden states after the layer's norm, [B, T, C].
        """
        return x

    def gate(self, x: Tensor, pos: Any) -> Any:
        """Return N values per token computed from the hidden states, [B, G, T, N] with G = 1, Hkv or H, or None.

        The scheme chooses N. `locate` and `bias` receive the values and their running sums as `Gates`. Sums grow with
        the length: use at least the dtype of the parameters, and float64 for sums that become angles.
        Arguments: x, the hidden states after the layer's norm and the hook `hidden`, [B, T, C].
        """
        return None

    def locate(self, pos: Any, gates: Any) -> Any:
        """Return the `pos` that the methods q, k, v and o receive in this layer; by default the argument, unchanged.

        Arguments: gates, `Gates` of the current tokens, with 1 head or one per head of the methods' tensors. For G =
        Hkv < H it is called twice: for q and o (H heads), and for k and v (Hkv). With G = H > Hkv it can only serve q
        and o.
        """
        return pos

    def q(self, x: Tensor, pos: Any) -> Tensor:
        """Return the queries `x` [B, H, T, D] with position added. `pos` is the result of `locate`.

        q and k may get wider, both alike. The scale stays D ** -0.5.
        """
        return x

    def k(self, x: Tensor, pos: Any) -> Tensor:
        """Return the keys `x` [B, Hkv, T, D] with position added. `pos` is the result of `locate`.

        q and k may get wider, both alike.
        """
        return x

    def v(self, x: Tensor, pos: Any) -> Tensor:
        """Return the values `x` [B, Hkv, T, D] with position added; same shape. `pos` is the result of `locate`."""
        return x

    def o(self, x: Tensor, pos: Any) -> Tensor:
        """Return the attention output `x` [B, H, T, D], before its projection, changed by the query's position."""
        return x

    def bias(self, q: Tensor, k: Tensor, gates: Any, at: Placement) -> Bias | None:
        """Return a function (b, h, i, j) that computes the term to add to the scaled scores, or None to add nothing.

        The indices are sequence, head, query row and key row: integer tensors that broadcast (0-d ones included), on
        which the function works elementwise, so that every kernel can use it. None keeps the fused kernel. Expand a
        learned table to [H, distances] outside the function. Indexing a whole [B, H, rows, keys] tensor is allowed, but
        slow. Later keys are masked afterwards; a bias that sums over keys must exclude them itself (`at.is_later`).

        Arguments: q, the unscaled queries after the hook q, [B, H, T, .]; k, the unscaled cached keys after the hook k,
        [B, Hkv, keys, .], to be read only if `reads_keys`; gates, the result of `gate` as `Gates` with H heads; at, the
        positions of the rows.
        """
        return None

    def log_decay(self) -> Tensor | float | None:
        """Return the slope of a bias that is linear in distance, `log_decay[h] * (i - j)`, or None for other biases.

        Slopes are at most 0 (no bias): [H], or one number for all heads. Attention without a softmax uses them for
        linear time.
        """
        return None if self.overrides("bias") else 0.0

    def call_hook(self, hook: str, x: Tensor, pos: Any, past: EarlierRows) -> Any:
        """Call the method named `hook`, one of `LOOKING_BACK`, on the tensor `x`.

        Arguments: past, from which `earlier` reads tokens before x.
        """
        if hook in self._takes_earlier:
            return getattr(self, hook)(x, pos, past.earlier(hook, x, self.looks_back))
        return getattr(self, hook)(x, pos)


HOOKS = ("prepare", "embed", "hidden", "gate", "locate", "q", "k", "v", "o", "bias", "log_decay", "flops_per_token")
LOOKING_BACK = ("embed", "hidden", "gate", "q", "k", "v", "o")  # hooks that may take `earlier`


@functools.cache
def check_hooks(scheme: type[Scheme]) -> None:
    """Check the names and parameters of the hooks in a user's class.

    Raises: ConfigError with the hook's place, its signature and the expected one.
    """
    for name, method in vars(scheme).items():
        # A misspelt hook would silently do nothing.
        similar = difflib.get_close_matches(name, HOOKS, n=1, cutoff=0.8)
        if callable(method) and similar and name not in HOOKS:
            raise ConfigError(
                f"{_source_line(method)}{scheme.__name__}.{name} is not a hook; did you mean {similar[0]!r}? Give your "
                "own method another name"
            )
    # Other names of parameters are fine (without `earlier`), another number of them is not.
    for hook in HOOKS:
        method = getattr(scheme, hook)
        actual, expected = (list(inspect.signature(m).parameters) for m in (method, getattr(Scheme, hook)))
        if hook in scheme._takes_earlier:
            expected.append("earlier")
        if len(actual) != len(expected) or ("earlier" in actual and actual != expected):
            raise ConfigError(
                f"{_source_line(method)}{scheme.__name__}.{hook}({', '.join(actual)}) must be "
                f"{hook}({', '.join(expected)}): see docs/adding-a-scheme.md"
            )


def apply_hook(scheme: Scheme, hook: str, x: Tensor, pos: Any, past: EarlierRows) -> Tensor:
    """Return what the hook of `scheme` (embed, hidden, q, k, v or o) makes of `x`, checked.

    Raises: ConfigError if the shape differs from x's (q, k may change the last dimension).
    """
    result = scheme.call_hook(hook, x, pos, past)
    same_dims = x.ndim - 1 if hook in ("q", "k") else x.ndim  # how many of the first dimensions must stay the same
    shape = getattr(result, "shape", ())
    if len(shape) != x.ndim or shape[:same_dims] != x.shape[:same_dims]:
        returned = list(shape) if isinstance(result, Tensor) else type(result).__name__
        raise ConfigError(
            f"{_source_line(getattr(scheme, hook))}{type(scheme).__name__}.{hook} returns {returned} for "
            f"{list(x.shape)}: return the same shape{'' if same_dims == x.ndim else ' (the last dimension may differ)'}"
        )
    return result


def evaluate_bias(bias: Bias, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Return the result of a bias function at sequence, head, query and key indices.

    Raises: ConfigError for booleans, and for more dimensions than the indices have.
    """
    added = bias(b, h, i, j)
    expected = torch.broadcast_shapes(b.shape, h.shape, i.shape, j.shape)
    if added.dtype == torch.bool or added.ndim > len(expected):
        raise ConfigError(
            f"{_source_line(bias)}the function that bias returns gives "
            + (
                f"{list(added.shape)}: return a shape that broadcasts to {list(expected)}, such as tensor[b, h, i, j]"
                if added.ndim > len(expected)
                else "booleans, which would be added as 0 and 1: return torch.where(visible, 0.0, -float('inf'))"
            )
        )
    return added


def _source_line(function: Any) -> str:
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}, line {code.co_firstlineno}: " if code else ""


def require_integer(key: str, value: object, least: int, usual: str) -> int:
    """Return the option if it is an integer of at least `least`.

    Arguments: usual, what the error suggests, such as "16 is the authors'". Raises: ConfigError if it is not.
    """
    # A YAML `true` is an int in Python.
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"scheme.{key}={value} must be a whole number, {least} or more ({usual})")
    return value


def require_number(key: str, value: object, low: float, high: float, usual: str) -> float:
    """Return the option as a float if it is a number from `low` to `high`.

    Arguments: usual, what the error suggests. Raises: ConfigError if it is not.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ConfigError(f"scheme.{key}={value} must be between {low:g} and {high:g} ({usual})")
    return float(value)
