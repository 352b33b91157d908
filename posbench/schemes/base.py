"""What a position scheme is: hooks around attention that default to the identity. Unchanged, the base class IS NoPE."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

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


class At(NamedTuple):
    """Where a piece of a window stands. All but `pos` are tokens.

    Row `i` of the queries is at position `i + query`, row `j` of the keys at `j + key`, so their distance is
    `i + at.query - (j + at.key)` whether a window passes whole, in pieces or token by token.
    """

    pos: Any  # what `Scheme.prepare` made of the positions of the queries
    query: int  # the position of the first query
    key: int  # the position of the first key that is kept
    length: int  # of the whole window


class Scheme(nn.Module):
    """A position scheme. A subclass overrides one or two hooks and says in `is_relative` what its algebra promises.

    Hooks take `pos`: what `prepare` made of the positions, once a forward pass and shared by all layers of one scheme.
    By default that is the positions themselves, [T] int64, in tokens, counted from 0 at the start of the sequence.

    Arguments of the constructor after `shape` are the options of the scheme's YAML file, by name.
    """

    is_relative: bool = True  # do the logits depend on differences of positions alone? measured by `posbench verify`
    keeps_norms: bool = True  # do q, k, v and o leave their hooks as long as they came in? measured too
    is_streaming: bool = True  # do the tokens before a position decide its logits, however many come after it? measured
    gate_width: int = 0  # N, the numbers a head that `gate` gives for each token
    decayed: frozenset[str] = frozenset()  # own parameters that weight decay shrinks; a decayed table is pulled to 0

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape

    @property
    def group(self) -> str:
        """Its heading in `posbench schemes`: where position enters, unless a class overrides it."""
        if "bias" in self.acts_on:
            return "biases on the scores"
        return "added once" if "embed" in self.acts_on else "rotations" if self.acts_on else "no position"

    @property
    def acts_on(self) -> frozenset[str]:
        """Where position enters: any of embed, q, k, v, o and bias; by default the hooks that the class overrides."""
        sites = ("embed", "q", "k", "v", "o", "bias")
        return frozenset(site for site in sites if getattr(type(self), site) is not getattr(Scheme, site))

    @property
    def moves_k_and_v_alike(self) -> bool:
        """Do the hooks k and v change a tensor in the same way? With a shared K = V only one of them is then cached."""
        return type(self).k is Scheme.k and type(self).v is Scheme.v

    @property
    def longest(self) -> int | None:
        """Tokens up to which the scheme is defined: every position is below it. None: any length.

        A run is not trained beyond it, is not evaluated beyond it (tables show a dash) and is certified within it.
        """
        return None

    def describe(self) -> str:
        """A phrase for the report about what the options mean in this decoder; empty if they need none."""
        return ""

    def layer(self, n: int) -> Scheme:
        """The scheme of layer `n` (from 0): this one, unless it is made of several. Its hooks are then called there."""
        return self

    def prepare(self, pos: Tensor, length: int) -> Any:
        """What the hooks need to know of the positions [T], such as the cosines and sines of a rotation.

        Arguments: pos, [T] int64, any whole numbers from 0 to millions; length, tokens of the whole window.
        Returns: a tensor or a tuple of tensors, in float64 where it is not whole numbers: the decoder rounds them once
        to its own dtype.
        """
        return pos

    def embed(self, x: Tensor, pos: Any) -> Tensor:
        """Token embeddings [B, T, C] in, the same shape out; before the first layer."""
        return x

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

    def gate(self, x: Tensor, pos: Any) -> Tensor | None:
        """Numbers of each token that `bias` looks at, [B, H, T, N]; they are kept beside keys and values. None: none.

        Arguments: x, the stream behind the layer's norm, [B, T, C].
        """
        return None

    def bias(self, q: Tensor, gate: Tensor | None, at: At) -> Bias | None:
        """What is added to the scaled scores, as a function (b, h, i, j) of sequence, head, query row and key row.

        Pointwise on integer tensors of shapes that broadcast (0-d ones included), so that blocks, masks,
        FlexAttention's score function and linear attention's decay all use this one definition. None, for nothing,
        keeps the fused kernel. A learned table is expanded to [H, T] by distance here, before the function is made.

        Arguments: q, the queries behind their hook, [B, H, T, .]; gate, [B, H, T of the keys, N] of all tokens that
        are kept, so the row of query `i` is `i + at.query - at.key`; at, where the rows stand.
        """
        return None

    def log_decay(self) -> Tensor | float | None:
        """What `bias` adds a token of distance, at most 0, where it is `log_decay[h] * (i - j)`: [H], or one for all.

        0 where nothing is added, None where the bias is another function. Attention without a softmax runs in linear
        time where this is known, and gives what it gives by `bias`.
        """
        return 0.0 if type(self).bias is Scheme.bias else None


_HOOKS = ("layer", "prepare", "embed", "q", "k", "v", "o", "gate", "bias", "log_decay")


def check_hooks(scheme: type[Scheme]) -> None:
    """Hold the hooks of another package's class to the parameters of today's form.

    Raises: ConfigError that names the hook, the form it has and the form it must have.
    """
    for hook in _HOOKS:
        has, wants = (list(inspect.signature(getattr(cls, hook)).parameters) for cls in (scheme, Scheme))
        if [name.lstrip("_") for name in has] != wants:
            raise ConfigError(
                f"{scheme.__module__}.{scheme.__name__}.{hook}({', '.join(has)}) has the form of another version of "
                f"posbench: it is {hook}({', '.join(wants)}) now{_MOVED.get(hook, '')}; see docs/adding-a-scheme.md"
            )


_MOVED = {
    "bias": " and returns None or a function (b, h, i, j) of sequence, head, query row and key row, whose distance is "
    "i + at.query - (j + at.key)",
    "prepare": ", with the tokens of the whole window",
}
