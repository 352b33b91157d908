"""What a position scheme is: hooks around attention that default to the identity. Unchanged, the base class IS NoPE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """The sizes of the decoder a scheme is built for."""

    d_model: int  # C
    num_heads: int  # H
    num_kv_heads: int
    head_dim: int  # D
    embedding_std: float = 0.02  # of the token embeddings at initialisation


class Scheme(nn.Module):
    """A position scheme. A subclass overrides one or two hooks and says in `is_relative` what its algebra promises.

    Hooks take `pos`: what `prepare` made of the positions, once a forward pass and shared by all layers. By default
    that is the positions themselves, [T] int64, in tokens, counted from 0 at the start of the sequence.

    Arguments of the constructor after `shape` are the options of the scheme's YAML file, by name.
    """

    is_relative: bool = True  # do the logits depend on differences of positions alone? measured by `posbench verify`
    has_bias: bool = False  # whether the class overrides `bias`; set by Python, not by hand

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        cls.has_bias = cls.bias is not Scheme.bias

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape

    def describe(self) -> str:
        """What the options amount to in this decoder, a phrase for the report; empty where they say it themselves."""
        return ""

    def prepare(self, pos: Tensor) -> Any:
        """What the hooks below need to know of the positions [T], such as the cosines and sines of a rotation.

        A tensor or a tuple of tensors, in float64 where it is not whole numbers: the decoder rounds them once to its
        own dtype. Positions are any whole numbers from 0 to millions.
        """
        return pos

    def embed(self, x: Tensor, pos: Any) -> Tensor:
        """Token embeddings [B, T, C] in, the same shape out; before the first layer."""
        return x

    def q(self, x: Tensor, pos: Any) -> Tensor:
        """Queries [B, H, T, D]."""
        return x

    def k(self, x: Tensor, pos: Any) -> Tensor:
        """Keys [B, Hkv, T, D]."""
        return x

    def v(self, x: Tensor, pos: Any) -> Tensor:
        """Values [B, Hkv, T, D]."""
        return x

    def o(self, x: Tensor, pos: Any) -> Tensor:
        """Attention output [B, H, T, D] at the query's position, before the output projection."""
        return x

    def bias(self, head: Tensor, i: Tensor, j: Tensor) -> Tensor | None:
        """What is added to the scaled score of query position `i` and key position `j` in `head`; None for nothing.

        Pointwise: integer tensors of shapes that broadcast (0-d ones included), so that the reference, the CPU path and
        FlexAttention's score function all use this one definition.
        """
        return None
