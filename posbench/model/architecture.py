"""The architecture of a decoder: its sizes, and the position scheme and the kind of attention of each layer.

A command builds it once for each run and passes it on: to the decoder, and to what counts parameters, FLOPs and bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from posbench.attention import Kind, KVCache, build_kind
from posbench.catalogue.own_files import place_of
from posbench.config import Config, ConfigError, ModelConfig, SchemeConfig
from posbench.schemes import Layers, Placement, Scheme, Shape, build_scheme
from posbench.schemes.base import apply_hook


@dataclass(frozen=True, eq=False)
class Architecture:
    """All of a decoder but its vocabulary and its weights. It is part of one decoder: modules hold parameters."""

    model: ModelConfig
    scheme: Layers
    kinds: list[Kind]  # of attention, one per layer

    def __post_init__(self) -> None:
        """Raise ConfigError if a scheme or the model's options do not suit a layer's kind of attention."""
        readers = [type(scheme).__name__ for scheme in self.scheme if scheme.reads_keys]
        for kind in self.kinds:
            name = type(kind).__name__.lower()
            if any(scheme.window for scheme in self.scheme) and not kind.takes_windows:
                raise ConfigError(
                    f"scheme.window is for attention of the kind softmax, and this is {name}: leave it out"
                )
            if readers and not kind.has_keys:
                raise ConfigError(
                    f"{readers[0]} reads keys, which attention of the kind {name} does not keep: take "
                    "scheme.attention={kind: softmax}, or another scheme"
                )
            if self.model.qk_norm and (kind.shared_kv or not {"q", "k"} <= kind.heads.keys()):
                raise ConfigError(
                    "model.qk_norm normalises queries and keys, and this kind of attention has no keys of their own: "
                    "leave it out"
                )

    @classmethod
    def build(
        cls, model: ModelConfig, scheme: SchemeConfig, context_length: int, longest: int | None = None, seed: int = 0
    ) -> Architecture:
        """Build the scheme, and one kind of attention per layer.

        Arguments: context_length, of training, in tokens; longest, the same in a task, whose windows differ in length;
        seed, of what constructors of schemes draw for themselves.
        Raises: ConfigError if the scheme or the kind of attention refuses its options or the other.
        """
        shape = Shape(
            model.d_model,
            model.num_heads,
            model.kv_heads,
            model.head_width,
            num_layers=model.num_layers,
            context_length=context_length,
            embedding_std=model.init_std,
            attention=str(scheme.attention.get("kind", "softmax")),
            longest=longest,
        )
        layers = build_scheme(scheme, shape, seed)
        return cls(model, layers, [build_kind(scheme, shape) for _ in range(model.num_layers)])


def build_architecture(config: Config) -> Architecture:
    """Build what `config` asks for. Raises: ConfigError as `Architecture.build` does."""
    return Architecture.build(config.model, config.scheme, config.train.context_length, config.data.window, config.seed)


def checked_architecture(config: Config) -> Architecture:
    """Build what `config` asks for and check that it can be trained, before any text is read or anything is written.

    Raises: ConfigError as `Architecture.build` does, if the training length is longer than the scheme is defined, and
    if the scheme or the kind of attention cannot have the positions of a task or of masked documents.
    """
    architecture = build_architecture(config)
    longest, length = architecture.scheme.longest, config.train.context_length
    if longest is not None and longest < length:
        raise ConfigError(
            f"scheme={config.scheme.name} is defined up to {longest} tokens and train.context_length={length} is "
            "longer: lower train.context_length, or take another scheme"
        )
    if config.data.document_mask and not all(kind.takes_windows for kind in architecture.kinds):
        raise ConfigError("data.document_mask=true is for attention of the kind softmax: leave it out")
    if config.data.window or config.data.document_mask:
        check_positions(architecture)
    return architecture


def check_positions(architecture: Architecture) -> None:
    """Call every hook of the schemes with positions of each sequence's own, [B, 1, T].

    Raises: ConfigError if a hook takes positions [T] only.
    """
    pos = torch.arange(5)
    for scheme, kind in dict(zip(architecture.scheme, architecture.kinds, strict=True)).items():
        call_hooks(scheme, kind, pos)
        try:
            call_hooks(scheme, kind, pos.expand(3, 1, -1))
        except Exception as error:
            raise ConfigError(
                f"{place_of(error)}{type(scheme).__name__} is for text only: its hooks take positions [T], and tasks "
                "and data.document_mask give each sequence its own, [B, 1, T]. Write pos[..., None] for pos[:, None], "
                "and in embed reshape what you add to (-1, *x.shape[1:])"
            ) from error


@torch.no_grad()
def call_hooks(
    scheme: Scheme, kind: Kind, pos: Tensor, dtype: torch.dtype | None = None, cache: KVCache | None = None
) -> None:
    """Call every hook of a scheme on zeros of `dtype` at positions `pos`, [T] or [B, 1, T]."""
    B, T, shape = (len(pos) if pos.ndim > 1 else 1), pos.shape[-1], kind.shape
    weights = next((parameter.dtype for parameter in scheme.parameters()), torch.float32)
    prepared = as_wide_as(weights, scheme.prepare(pos, T))
    at = Placement(prepared, 0, 0, T, pos[:, 0] if pos.ndim > 1 else None, T)
    x = apply_hook(scheme, "embed", torch.zeros(B, T, shape.d_model, dtype=dtype or weights), prepared)
    parts = {part: x.new_zeros(B, heads, T, shape.head_dim) for part, heads in kind.heads.items()}
    k = parts.get("k")
    kind.mix(parts.get("q"), k, cast(Tensor, k if kind.shared_kv else parts["v"]), x, scheme, at, cache)


def as_wide_as(dtype: torch.dtype, prepared: Any) -> Any:
    """Floating tensors of what a scheme prepared, alone or in tuples, rounded to the weights' dtype."""
    if isinstance(prepared, Tensor):
        return prepared.to(dtype) if prepared.is_floating_point() else prepared
    if isinstance(prepared, tuple):
        parts = [as_wide_as(dtype, part) for part in prepared]
        return type(prepared)(*parts) if hasattr(prepared, "_fields") else tuple(parts)
    return prepared
