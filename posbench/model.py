"""The decoder: LLaMA's block (pre-norm RMSNorm, SwiGLU, no biases; arXiv 2302.13971) with a scheme's hooks in it.

Shapes: B batch, T tokens, C = d_model, H heads, D = head_dim, V vocabulary. Master weights are float32; activations run
in `compute_dtype` (bfloat16 in training where the device is fast in it), norms, softmax and losses in float32.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from types import MethodType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.attention.ways import attend
from posbench.config import Config, ConfigError, ModelConfig
from posbench.cross_entropy import losses_and_gradient, mean_cross_entropy
from posbench.schemes import Scheme, Shape, build_scheme

ROWS = 4096  # of logits that stand in memory at a time where no gradient is wanted


class Linear(nn.Module):
    """`x @ weight.T` in x's dtype: float32 weights are rounded where the activations are bfloat16."""

    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(fan_out, fan_in))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    """`x / rms(x) * weight` over channels, in at least float32 (Zhang and Sennrich 2019, arXiv 1910.07467)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(self.weight.dtype)
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight).to(x.dtype)


class Past:
    """Keys and values of one layer, [B, Hkv, T, D] each, as the pieces of a long sequence fill them in."""

    def __init__(self, length: int) -> None:
        self.length, self.filled = length, 0  # tokens
        self.kept: tuple[Tensor, ...] = ()

    def with_new(self, *new: Tensor) -> tuple[Tensor, ...]:
        """All keys and values so far, `new` ones [B, Hkv, t, D] included."""
        if not self.kept:
            self.kept = tuple(x.new_empty(*x.shape[:2], self.length, x.shape[3]) for x in new)
        start, self.filled = self.filled, self.filled + new[0].shape[2]
        for kept, x in zip(self.kept, new, strict=True):
            kept[:, :, start : self.filled] = x
        return tuple(kept[:, :, : self.filled] for kept in self.kept)


class Attention(nn.Module):
    """Causal self-attention with the scheme's hooks. Grouped-query where num_kv_heads < num_heads."""

    attend = staticmethod(attend)  # one of the ways of `posbench.attention`: `posbench verify` asks for each

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.head_dim and config.num_kv_heads
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.qkv = Linear(config.d_model, (self.heads + 2 * self.kv_heads) * self.head_dim)
        self.out = Linear(self.heads * self.head_dim, config.d_model)

    def forward(self, x: Tensor, pos: Any, scheme: Scheme, offset: int, past: Past | None = None) -> Tensor:
        B, T, _ = x.shape
        packed = self.qkv(x).view(B, T, -1, self.head_dim).transpose(1, 2)  # [B, H + 2 Hkv, T, D]
        q, k, v = packed.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        q, k, v = scheme.q(q, pos), scheme.k(k, pos), scheme.v(v, pos)
        if past is not None:
            k, v = past.with_new(k, v)
        o = self.attend(q, k, v, scheme.bias if scheme.has_bias else None, offset)
        return self.out(scheme.o(o, pos).transpose(1, 2).reshape(B, T, -1))


class SwiGLU(nn.Module):
    """`down(silu(gate(x)) * up(x))` (Shazeer 2020, arXiv 2002.05202), gate and up in one product."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.ffn_dim
        self.gate_up = Linear(config.d_model, 2 * config.ffn_dim)
        self.down = Linear(config.ffn_dim, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """One layer: attention, then SwiGLU, each behind a norm and added to the stream [B, T, C]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.d_model, config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.d_model, config.norm_eps)
        self.ffn = SwiGLU(config)

    def forward(self, x: Tensor, pos: Any, scheme: Scheme, offset: int, past: Past | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), pos, scheme, offset, past)
        return x + self.ffn(self.ffn_norm(x))


class Decoder(nn.Module):
    """A LLaMA-style language model under one position scheme.

    `model(tokens, offset=0)`: tokens [B, T] int64 -> logits [B, T, V]. `offset` shifts every position, in tokens; a
    relative scheme ignores it.
    """

    def __init__(self, config: ModelConfig, scheme: Scheme, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.scheme = scheme
        self.compute_dtype: torch.dtype | None = None  # of the activations; None: the weights' own
        self.piece: int | None = (
            None  # tokens from which on a sequence is read in pieces of as many, without a gradient
        )
        self.embedding = nn.Embedding(vocab_size, config.d_model)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        self.unembedding = Linear(config.d_model, vocab_size)
        if config.tied_embeddings:
            self.unembedding.weight = cast(nn.Parameter, self.embedding.weight)
        self._losses_and_gradient = losses_and_gradient

    def shared_parts(self) -> Iterator[tuple[str, Tensor]]:
        """Logical parts of the weights that all schemes share, in the order of the layers, several tensors a name.

        `attention.q`, `attention.k` and `attention.v` are rows of the packed projection, so that a row of a table which
        lacks one of them can still be held to the others.
        """
        for name, parameter in self.named_parameters():
            part = name.removesuffix(".weight").partition(".")
            if part[0] == "scheme":
                continue
            inside = part[2].partition(".")[2]  # of a block
            if inside == "attention.qkv":
                attention = cast(Block, self.blocks[int(part[2].partition(".")[0])]).attention
                rows = [n * attention.head_dim for n in (attention.heads, attention.kv_heads, attention.kv_heads)]
                yield from zip(("attention.q", "attention.k", "attention.v"), parameter.split(rows), strict=True)
            else:
                yield "norms" if "norm" in name else inside or part[0], parameter

    def compile_blocks(self) -> None:
        """Compile one block and run every layer through it: a sixth of the time the whole model takes.

        For steps with a gradient alone, whose shapes never change: what reads without one, at many lengths, would make
        the compiled code depend on what was read before, and so a resumed run's on where it was cut off.
        """
        compiled = torch.compile(Block.forward, dynamic=False)

        def forward(block: Block, *given: Any) -> Tensor:
            return (compiled if torch.is_grad_enabled() else Block.forward)(block, *given)

        for block in self.blocks:
            block.forward = MethodType(forward, block)  # FSDP's hooks stay outside it
        self._losses_and_gradient = torch.compile(losses_and_gradient, dynamic=False)

    def hidden(self, tokens: Tensor, offset: int = 0) -> Tensor:
        """The stream after the last norm, [B, T, C] in the compute dtype."""
        if self.piece and tokens.shape[1] > self.piece and not torch.is_grad_enabled():
            return self._hidden_in_pieces(tokens, offset, self.piece)
        x, pos = self._embedded(tokens, offset)
        for block in self.blocks:
            x = block(x, pos, self.scheme, offset)
        return self.norm(x)

    def _embedded(self, tokens: Tensor, offset: int) -> tuple[Tensor, Any]:
        """The stream before the first layer, [B, T, C], and what the scheme prepared of the positions."""
        pos = torch.arange(offset, offset + tokens.shape[1], device=tokens.device)
        prepared = _as_wide_as(self.embedding.weight.dtype, self.scheme.prepare(pos))
        x = self.scheme.embed(self.embedding(tokens), prepared)
        return x.to(self.compute_dtype or x.dtype), prepared

    def _hidden_in_pieces(self, tokens: Tensor, offset: int, piece: int) -> Tensor:
        """`hidden`, layer by layer: only the stream and one layer's keys and values stand in memory whole."""
        starts = range(0, tokens.shape[1], piece)
        pairs = (self._embedded(tokens[:, start : start + piece], offset + start) for start in starts)
        stream, pos = zip(*pairs, strict=True)
        pieces = list(stream)
        for block in self.blocks:
            past = Past(tokens.shape[1])
            for n in range(len(pieces)):
                pieces[n] = block(pieces[n], pos[n], self.scheme, offset, past)
        return torch.cat([self.norm(x) for x in pieces], dim=1)

    def forward(self, tokens: Tensor, offset: int = 0) -> Tensor:
        return self.unembedding(self.hidden(tokens, offset))

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean of `nll`, nats a token, 0-d: what training minimises, with logits chunk by chunk."""
        x = self.hidden(tokens).flatten(0, 1)
        return mean_cross_entropy(x, self.unembedding.weight, targets.flatten(), self._losses_and_gradient)

    def nll(self, tokens: Tensor, targets: Tensor, offset: int = 0, last: int | None = None) -> Tensor:
        """Losses of targets [B, T] after tokens [B, T], nats: [B, T] float32, or of the `last` positions alone."""
        x = self.hidden(tokens, offset)
        if last is not None:
            x, targets = x[:, -last:], targets[:, -last:]
        # Row by row the logits are independent: without a gradient they need never stand whole in memory.
        rows = x.numel() if torch.is_grad_enabled() else ROWS
        parts = [
            self._row_nll(*part)
            for part in zip(x.flatten(0, 1).split(rows), targets.flatten().split(rows), strict=True)
        ]
        return torch.cat(parts).view(targets.shape)

    def _row_nll(self, x: Tensor, targets: Tensor) -> Tensor:
        # Of the rounded numbers, but not rounded again: bfloat16 logits would move a mean loss by up to 6e-4 nats.
        wide = torch.promote_types(x.dtype, torch.float32)
        logits = F.linear(x.to(wide), self.unembedding.weight.to(x.dtype).to(wide))
        return F.cross_entropy(logits, targets, reduction="none")


def _as_wide_as(dtype: torch.dtype, prepared: Any) -> Any:
    """Floating tensors of what a scheme prepared, alone or in tuples, rounded to the weights' dtype."""
    if isinstance(prepared, Tensor):
        return prepared.to(dtype) if prepared.is_floating_point() else prepared
    if isinstance(prepared, tuple):
        parts = [_as_wide_as(dtype, part) for part in prepared]
        return type(prepared)(*parts) if hasattr(prepared, "_fields") else tuple(parts)
    return prepared


def initialise(model: Decoder, seed: int) -> None:
    """Set every tensor from (seed, its name): a scheme with parameters of its own changes no shared one.

    Matrices are normal with `init_std`, those that write to the stream smaller by sqrt(2 num_layers) (GPT-2); norm
    weights are 1.
    """
    config = model.config
    for name, parameter in model.named_parameters():
        if name.startswith("scheme.") or parameter.ndim < 2:
            continue
        writes_to_stream = name.endswith(("attention.out.weight", "ffn.down.weight"))
        std = config.init_std / (2 * config.num_layers) ** 0.5 if writes_to_stream else config.init_std
        generator = torch.Generator().manual_seed(_seed_of(seed, name))
        with torch.no_grad():
            # Drawn in float64: float32 draws differ in their last bits between kinds of CPU.
            parameter.copy_(torch.empty(parameter.shape, dtype=torch.float64).normal_(0, std, generator=generator))


def _seed_of(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:7], "big")


def shape_of(config: ModelConfig) -> Shape:
    """What a scheme is told of the decoder."""
    assert config.head_dim is not None and config.num_kv_heads is not None
    return Shape(config.d_model, config.num_heads, config.num_kv_heads, config.head_dim, embedding_std=config.init_std)


def build_model(config: Config, vocab_size: int) -> Decoder:
    """The decoder of `config`, initialised from its seed, in float32 on the CPU.

    Arguments: vocab_size, V, that of the tokenizer; `model.vocab_size` may ask for a larger table.
    Raises: ConfigError where the table is too small for the tokenizer, or the scheme refuses its options.
    """
    asked = config.model.vocab_size
    if asked is not None and asked < vocab_size:
        raise ConfigError(
            f"the tokenizer has {vocab_size} tokens but model.vocab_size={asked}: raise it, leave it null, or "
            f"train a smaller tokenizer (tokenizer.vocab_size={asked})"
        )
    with torch.random.fork_rng(devices=[]):  # what a scheme draws for parameters of its own comes from the seed too
        torch.manual_seed(_seed_of(config.seed, "scheme"))
        scheme = build_scheme(config.scheme, shape_of(config.model))
    model = Decoder(config.model, scheme, asked or vocab_size)
    initialise(model, config.seed)
    return model
