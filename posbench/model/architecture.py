"""Describe a decoder: its sizes, and the position scheme and the kind of attention of each layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posbench.attention import Kind, KVCache, build_kind
from posbench.catalogue.own_files import place_of
from posbench.config import Config, ConfigError, ModelConfig, SchemeConfig
from posbench.schemes import Layers, Placement, Scheme, Shape, build_scheme
from posbench.schemes.base import apply_hook


@dataclass(frozen=True, eq=False)
class Architecture:
    """Everything about a decoder except its vocabulary and weights."""

    # The modules below have parameters, so each decoder needs its own architecture.
    model: ModelConfig
    scheme: Layers
    kinds: list[Kind]  # the kind of attention of each layer

    def __post_init__(self) -> None:
        """Raise ConfigError if a layer's kind of attention does not support its scheme or the model's options."""
        for scheme, kind in zip(self.scheme, self.kinds, strict=True):
            name = kind.shape.attention
            if scheme.window and not kind.takes_windows:
                raise ConfigError(
                    f"scheme.window needs scheme.attention={{kind: softmax}}, and this is {name}: leave it out"
                )
            if "bias" in scheme.acts_on and not kind.takes_bias:
                raise ConfigError(
                    f"{type(scheme).__name__} adds a bias to scores, and attention of the kind {name} has no scores: "
                    "choose scheme.attention={kind: softmax} or {kind: linear}, or a scheme without a bias"
                )
            if scheme.reads_keys and not kind.has_keys:
                raise ConfigError(
                    f"{type(scheme).__name__} reads keys, which attention of the kind {name} does not cache: choose "
                    "scheme.attention={kind: softmax}, or another scheme"
                )
            kind.check_scheme(scheme)
        if self.model.qk_norm and not any(kind.takes_qk_norm for kind in self.kinds):
            raise ConfigError(
                "model.qk_norm normalises queries and keys of softmax attention, and no layer has it "
                f"(scheme.attention is {self.kinds[0].shape.attention}): leave it out"
            )

    @classmethod
    def build(
        cls, model: ModelConfig, scheme: SchemeConfig, context_length: int, longest: int | None = None, seed: int = 0
    ) -> Architecture:
        """Return an architecture with the scheme and the kind of attention of each layer, built from `scheme`.

        Arguments: context_length, of training, tokens; longest, tokens of the longest training window of a task, None
        for text; seed, for constructors of schemes.
        Raises: ConfigError if the scheme or the kind of attention refuses its options, or does not support the other.
        """
        shape = Shape(
            model.d_model,
            model.num_heads,
            model.kv_heads,
            model.head_width,
            num_layers=model.num_layers,
            context_length=context_length,
            embedding_std=model.init_std,
            longest=longest,
            trained_length=scheme.trained_length,
        )
        layers = build_scheme(scheme, shape, seed)
        kinds = [build_kind(entry.attention, layer.shape) for entry, layer in zip(layers.entries, layers, strict=True)]
        return cls(model, layers, kinds)


def build_architecture(config: Config) -> Architecture:
    """Return the architecture that `config` describes; raises as `Architecture.build` does."""
    return Architecture.build(config.model, config.scheme, config.train.context_length, config.data.window, config.seed)


def checked_architecture(config: Config) -> Architecture:
    """Return the architecture of `config` after checking it can be trained. Read no text and write nothing.

    Raises: ConfigError if the scheme or the kind of attention refuses its options, the training length, or the
    positions of tasks or of masked documents.
    """
    architecture = build_architecture(config)
    longest, length = architecture.scheme.longest, config.train.context_length
    if longest is not None and longest < length:
        raise ConfigError(
            f"scheme={config.scheme.name} is defined up to {longest} tokens and train.context_length={length} is "
            "longer: lower train.context_length, or choose another scheme"
        )
    check_sequences(config, architecture)
    return architecture


def check_sequences(config: Config, architecture: Architecture) -> None:
    """Raise ConfigError if an architecture cannot have `config`'s masked documents, or the positions of its tasks."""
    if config.data.document_mask and not all(kind.takes_windows for kind in architecture.kinds):
        raise ConfigError("data.document_mask=true needs scheme.attention={kind: softmax}: leave it out")
    if config.data.window or config.data.document_mask:
        check_positions(architecture)


def check_positions(architecture: Architecture) -> None:
    """Raise ConfigError if a method of the schemes does not take positions that differ between sequences, [B, 1, T]."""
    pos = torch.arange(5)
    kinds = dict(zip(architecture.scheme, architecture.kinds, strict=True))  # a scheme that layers share runs once
    for scheme, kind in kinds.items():
        # First with positions [T]: an error here has another cause, and is raised as it is.
        call_hooks(scheme, kind, pos)
        try:
            call_hooks(scheme, kind, pos.expand(3, 1, -1))
        # Any exception: user code that expects [T] fails in its own way.
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
    """Run a scheme's methods and a kind of attention once, on tensors of zeros. Errors are raised to the caller.

    Arguments: pos, [T] or [B, 1, T]; dtype, of the activations after the embedding, by default the scheme's; cache, to
    which keys and values are appended, or None.
    """
    B, T, shape = 1, pos.shape[-1], kind.shape
    positions = None
    if pos.ndim > 1:
        B, positions = len(pos), pos[:, 0]
    weights = next((parameter.dtype for parameter in scheme.parameters()), torch.float32)
    prepared = round_prepared(weights, scheme.prepare(pos, T))
    at = Placement(prepared, first_query=0, first_key=0, length=T, positions=positions, position_limit=T)
    rows = None if cache is None else cache.rows
    x = apply_hook(scheme, "embed", torch.zeros(B, T, shape.d_model, dtype=weights), prepared, at.past(rows))
    x = apply_hook(scheme, "hidden", x.to(dtype or weights), prepared, at.past(rows))
    parts = {part: x.new_zeros(B, heads, T, shape.head_dim) for part, heads in kind.heads_by_part.items()}
    if kind.shared_kv:
        parts["v"] = parts["k"]
    kind.mix(parts, x, scheme, at, cache)


def round_prepared(dtype: torch.dtype, prepared: Any) -> Any:
    """Return `prepared`, the result of `Scheme.prepare`, with its floating-point tensors in `dtype`."""
    if isinstance(prepared, Tensor):
        return prepared.to(dtype) if prepared.is_floating_point() else prepared
    if isinstance(prepared, tuple):
        parts = [round_prepared(dtype, part) for part in prepared]
        if hasattr(prepared, "_fields"):  # a named tuple takes its fields one by one
            return type(prepared)(*parts)
        return tuple(parts)
    return prepared
