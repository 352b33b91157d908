"""The decoder: embeddings, layers that call a scheme's hooks, a norm and logits; and how a seed determines its weights.

Shapes: B batch, T tokens, C = d_model, H heads, D = head_dim, V vocabulary. Master weights are float32. Activations are
in `compute_dtype` (bfloat16 in training if the device is fast in it); norms, softmax and losses are in float32.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from types import MethodType
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.attention import KVCache
from posbench.config import Config, ConfigError, ModelConfig
from posbench.model.architecture import Architecture, build_architecture, check_sequences, round_prepared
from posbench.model.layers import Block, Linear, RMSNorm
from posbench.model.loss import losses_and_gradient, mean_cross_entropy
from posbench.schemes import Placement
from posbench.schemes.base import apply_hook
from posbench.schemes.building import seed_of
from posbench.system.plain import is_plain
from posbench.system.torch_internals import share_no_row_buffers

_ROWS = 4096  # rows of logits in memory at a time, without a gradient, if the vocabulary is small
_LOGITS = 1 << 26  # logits in memory at a time, without a gradient: 256 MiB in float32


class Decoder(nn.Module):
    """A LLaMA-style language model with one position scheme.

    `model(tokens, offset=0)` maps tokens [B, T] int64 to logits [B, T, V]. `offset` shifts every position, in tokens.
    `positions`, [B, T] int64, ascending in each sequence, replaces consecutive positions.
    """

    def __init__(self, architecture: Architecture, vocab_size: int) -> None:
        super().__init__()
        self.architecture = architecture
        self.config = config = architecture.model
        self.scheme = architecture.scheme  # of all layers
        self.compute_dtype: torch.dtype | None = None  # of the activations; None means the dtype of the weights
        self.piece: int | None = None  # without a gradient, longer sequences are read in pieces of this many tokens
        self.bos_id: int | None = None  # the token that begins documents, if documents are masked from each other
        self.embedding = nn.Embedding(vocab_size, config.d_model)
        self.blocks = nn.ModuleList(Block(config, kind) for kind in architecture.kinds)
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        self.unembedding = Linear(config.d_model, vocab_size)
        if config.tied_embeddings:
            self.unembedding.weight = cast(nn.Parameter, self.embedding.weight)
        self._losses_and_gradient = losses_and_gradient

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Return the number format of the activations."""
        return self.compute_dtype or self.embedding.weight.dtype

    @property
    def vocab_size(self) -> int:
        return self.embedding.num_embeddings

    @property
    def num_heads(self) -> int:
        return self.config.num_heads

    def shared_parts(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) for the weights that all schemes share, layer by layer; names repeat in each layer."""
        # Split the packed projection: a run that lacks q, k or v in any layer can then be compared by the rest.
        in_all_layers = set.intersection(*(set(kind.heads_by_part) for kind in self.architecture.kinds))
        for name, parameter in self.named_parameters():
            # `blocks.3.ffn.down.weight` is called `ffn.down`, in all layers.
            module, _, rest = name.removesuffix(".weight").partition(".")
            if module == "scheme" or ".kind." in name:
                continue
            layer, _, inside = rest.partition(".")  # `inside` is "" outside the layers
            if inside.startswith("attention.qkv"):
                rows = cast(Block, self.blocks[int(layer)]).attention.rows()
                suffix = inside.removeprefix("attention.qkv")
                for part, tensor in zip(rows, parameter.split(list(rows.values())), strict=True):
                    if part in in_all_layers:
                        yield f"attention.{part}{suffix}", tensor
            elif "norm" in name:
                yield "norms", parameter
            else:
                yield inside or module, parameter

    def compile_blocks(self) -> None:
        """Compile one block and run every layer through it, in a sixth of the time that compiling all takes."""
        self.allow_compiled_attention()
        share_no_row_buffers()
        compiled = torch.compile(Block.forward, dynamic=False)

        def forward(block: Block, *inputs: Any) -> Tensor:
            # Only steps with a gradient, because their shapes never change. Inference runs at many lengths; compiling
            # it would make results depend on which lengths came first, and a resumed run differ from a whole one.
            return (compiled if torch.is_grad_enabled() else Block.forward)(block, *inputs)

        for block in self.blocks:
            block.forward = MethodType(forward, block)
        self._losses_and_gradient = torch.compile(losses_and_gradient, dynamic=False)

    def allow_compiled_attention(self) -> None:
        """Allow attention with a bias to compile itself for inference on long windows (only on CUDA)."""
        for block in self.blocks:
            cast(Block, block).attention.kind.may_compile = True

    def hidden(
        self, tokens: Tensor, offset: int = 0, caches: Sequence[KVCache] | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """Return the residual stream after the last norm, [B, T, C] in the compute dtype.

        Arguments: offset, the position of the window's first token, also in later pieces of the window; caches, one per
        layer, which hold the window's earlier tokens and are appended to; positions, [B, T], None if they are
        consecutive.
        """
        if self.bos_id is not None:
            positions = self._positions_in_documents(tokens, offset, caches[0] if caches else None)
        if caches is None and self.piece and tokens.shape[1] > self.piece and not torch.is_grad_enabled():
            return self._hidden_in_pieces(tokens, offset, self.piece, positions)
        # Tokens of the window before these ones, and of the whole window.
        begin, length = (caches[0].filled, caches[0].length) if caches else (0, tokens.shape[1])
        # The first layer's cache also holds the last embeddings, for a hook `embed` that looks back.
        rows = caches[0].rows if caches else None
        x, placements = self._embed(tokens, offset, begin, length, positions, rows)
        layer_caches: Sequence[KVCache | None] = caches or [None] * len(placements)
        for block, scheme, at, cache in zip(self.blocks, self.scheme, placements, layer_caches, strict=True):
            x = block(x, at, scheme, cache)
        return self.norm(x)

    def _positions_in_documents(self, tokens: Tensor, offset: int, cache: KVCache | None) -> Tensor:
        """Return the positions of all tokens so far, [B, tokens], which start again at `offset` in each document."""
        cached = None if cache is None else cache.positions
        begin = 0 if cached is None else cached.shape[1]
        row = torch.arange(begin, begin + tokens.shape[1], device=tokens.device)
        # The index of the token at which the document that continues from the cache began.
        first: Tensor | int = 0 if cached is None else begin - 1 + offset - cached[:, -1:]
        # The running maximum of the rows of BOS tokens is the row at which each token's document began.
        positions = offset + row - torch.where(tokens.eq(cast(int, self.bos_id)), row, first).cummax(1).values
        if cache is not None:
            cache.positions = positions if cached is None else torch.cat((cached, positions), 1)
            positions = cache.positions
        return positions

    def caches(self, length: int) -> list[KVCache]:
        """Return empty caches, one per layer, for a window of `length` tokens that is read piece by piece."""
        return [cast(Block, block).attention.kind.new_cache(length) for block in self.blocks]

    def _embed(
        self,
        tokens: Tensor,
        offset: int,
        begin: int,
        length: int,
        positions: Tensor | None,
        rows: dict[str, Tensor] | None = None,
    ) -> tuple[Tensor, list[Placement]]:
        """Return the stream before the first layer, [B, T, C], and the `Placement` per layer.

        Arguments: begin, tokens of the window before `tokens`; length, of the whole window; positions, [B, begin + T]
        or more, or None; rows, last rows of the embeddings so far, for a hook that looks back.
        """
        first = offset + begin  # position of the first of these tokens
        end = begin + tokens.shape[1]  # tokens of the window so far
        position_limit = 0  # one more than the largest position, 0 if positions are consecutive
        documents = None  # the row at which each token's document begins
        if positions is not None and self.bos_id is not None:
            position_limit = offset + length
            documents = torch.arange(offset, offset + end, device=tokens.device) - positions[:, :end]
        elif positions is not None:
            # Tasks have the same limit in every batch, so that a compiled step compiles once.
            position_limit = self.scheme.shape.longest or int(positions.max()) + 1
        longest = self.scheme.longest
        tokens_needed = position_limit or offset + end
        if longest is not None and tokens_needed > longest:
            raise ConfigError(
                f"the scheme is defined up to {longest} tokens, and this window reaches position "
                f"{tokens_needed - 1}: use a shorter window"
            )
        if positions is None:
            pos = torch.arange(first, first + tokens.shape[1], device=tokens.device)
        else:
            pos = positions[:, None, begin:end]
            positions = positions[:, :end]
        # Layers that share a scheme share its prepared positions.
        placements: dict[int, Placement] = {}  # by the first layer with the scheme
        for layer in self.scheme.shared_with:
            if layer not in placements:
                prepared = round_prepared(self.embedding.weight.dtype, self.scheme[layer].prepare(pos, length))
                placements[layer] = Placement(prepared, first, offset, length, positions, position_limit, documents)
        at = placements[0]
        x = apply_hook(self.scheme.first, "embed", self.embedding(tokens), at.pos, at.past(rows))
        return x.to(self.compute_dtype or x.dtype), [placements[layer] for layer in self.scheme.shared_with]

    def _hidden_in_pieces(self, tokens: Tensor, offset: int, piece: int, positions: Tensor | None) -> Tensor:
        """Return the residual stream after the last norm, as `hidden`, read in pieces of `piece` tokens."""
        length = tokens.shape[1]
        starts = range(0, length, piece)
        rows: dict[str, Tensor] = {}  # the last embeddings so far, which `_embed` reads and replaces
        pairs = (
            self._embed(tokens[:, start : start + piece], offset, start, length, positions, rows) for start in starts
        )
        stream, placements = zip(*pairs, strict=True)
        pieces = list(stream)
        # All pieces pass one layer before the next, so memory holds only the whole stream and the cache of one layer.
        for n, (block, scheme) in enumerate(zip(self.blocks, self.scheme, strict=True)):
            cache = cast(Block, block).attention.kind.new_cache(length)
            # Piece m in layer n.
            for m in range(len(pieces)):
                pieces[m] = block(pieces[m], placements[m][n], scheme, cache)
        return torch.cat([self.norm(x) for x in pieces], dim=1)

    def forward(self, tokens: Tensor, offset: int = 0, positions: Tensor | None = None) -> Tensor:
        return self.unembedding(self.hidden(tokens, offset, positions=positions))

    def loss(
        self, tokens: Tensor, targets: Tensor, positions: Tensor | None = None, divisor: Tensor | None = None
    ) -> Tensor:
        """Return the training loss, 0-d: the mean of `nll`, nats per token, of `tokens` and `targets` [B, T].

        If `divisor`, 0-d, is given, the loss is the sum over targets that are not negative, divided by `divisor`.
        """
        x = self.hidden(tokens, positions=positions).flatten(0, 1)
        targets = targets.flatten()
        gradient_of = self._losses_and_gradient
        # Code that is compiled or transformed by torch.func needs a fixed number of rows.
        may_drop_rows = gradient_of is losses_and_gradient and not is_plain()
        # Rows that are not scored need no logits.
        if divisor is not None and may_drop_rows:
            scored = targets >= 0
            x, targets = x[scored], targets[scored]
        return mean_cross_entropy(x, self.unembedding.weight, targets, gradient_of, divisor=divisor)

    def nll(
        self,
        tokens: Tensor,
        targets: Tensor,
        offset: int = 0,
        last: int | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of each target, [B, T] float32 in nats, or of the `last` targets only, [B, last].

        Arguments: tokens and targets, [B, T]; offset, the position of the first token; positions, [B, T], None if they
        are consecutive.
        """
        x = self.hidden(tokens, offset, positions=positions)
        if last is not None:
            x, targets = x[:, -last:], targets[:, -last:]
        # Logits are independent row by row, so without a gradient memory need not hold all of them.
        rows = min(_ROWS, max(1, _LOGITS // self.embedding.num_embeddings))
        # With a gradient, autograd keeps every chunk anyway.
        if torch.is_grad_enabled():
            rows = x.numel()  # more than there are: one chunk
        parts = zip(x.flatten(0, 1).split(rows), targets.flatten().split(rows), strict=True)
        losses = [F.cross_entropy(self._wide_logits(part), target, reduction="none") for part, target in parts]
        return torch.cat(losses).view(targets.shape)

    def answered(self, tokens: Tensor, targets: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the loss (float32, nats) and the likeliest token for each target [B, T] that is not negative, [N]."""
        scored = targets >= 0
        logits = self._wide_logits(self.hidden(tokens, positions=positions)[scored])
        return F.cross_entropy(logits, targets[scored], reduction="none"), logits.argmax(-1)

    def _wide_logits(self, x: Tensor) -> Tensor:
        # Multiply rounded numbers but do not round the logits: in bfloat16 they would shift a mean loss by up to 6e-4
        # nats.
        wide = torch.promote_types(x.dtype, torch.float32)
        weight = self.unembedding.weight.to(x.dtype)
        if x.is_cuda and x.dtype != wide and not torch.is_grad_enabled():
            return torch.mm(x, weight.t(), out_dtype=wide)  # the same products, on the fast bfloat16 units
        return F.linear(x.to(wide), weight.to(wide))


def initialise(model: Decoder, seed: int) -> None:
    """Set every tensor from (seed, its name), so that a scheme's parameters do not change the shared ones.

    Matrices are normal with `init_std` (or the parameter's own), divided by sqrt(2 num_layers) if they write to the
    stream (GPT-2); norm weights are 1.
    """
    config = model.config
    for name, parameter in model.named_parameters():
        if name.startswith("scheme."):
            if hasattr(parameter, "is_drawn"):
                own_name = re.sub(r"members\.\d+\.", "", name)  # if the scheme is not combined with others
                with torch.no_grad():
                    parameter.copy_(_draw(seed, own_name, tuple(parameter.shape), config.init_std))
            continue
        # Norm weights and biases keep their constructor's values.
        if parameter.ndim < 2:
            continue
        std = config.init_std
        if name.endswith(("attention.out.weight", "ffn.down.weight")):  # these write to the stream
            std = config.init_std / (2 * config.num_layers) ** 0.5
        if name.endswith("attention.qkv.weight"):
            block = cast(Block, model.blocks[int(name.split(".")[1])])
            # Always drawn for q, k and v, so that a kind of attention without one of them has the same others.
            rows = _rows_by_part(config)
            drawn = _draw(seed, name, (sum(rows.values()), parameter.shape[1]), std)
            parts = dict(zip(rows, drawn.split(list(rows.values())), strict=True))
            value = torch.cat([parts[part] for part in block.attention.rows()])
        else:
            value = _draw(seed, name, tuple(parameter.shape), getattr(parameter, "init_std", std))
        with torch.no_grad():
            parameter.copy_(value)


def _rows_by_part(config: ModelConfig) -> dict[str, int]:
    kv = config.kv_heads * config.head_width
    return {"q": config.num_heads * config.head_width, "k": kv, "v": kv}


def _draw(seed: int, name: str, shape: tuple[int, ...], std: float) -> Tensor:
    generator = torch.Generator().manual_seed(seed_of(seed, name))
    # Float64, because float32 draws differ by CPU.
    return torch.empty(shape, dtype=torch.float64).normal_(0, std, generator=generator)


def build_model(
    config: Config, vocab_size: int, architecture: Architecture | None = None, bos_id: int | None = None
) -> Decoder:
    """Return the decoder of `config`, initialised from its seed, in float32 on the CPU.

    Arguments: vocab_size, the tokenizer's (`model.vocab_size` may ask for a larger embedding); architecture, if it is
    already built and no other decoder uses it; bos_id, the token that begins documents, for `data.document_mask`.
    Raises: ConfigError if the embedding is too small for the tokenizer, or the scheme or the kind of attention refuses
    its options, masked documents or the positions of tasks.
    """
    config.check_vocabulary(vocab_size)
    architecture = architecture or build_architecture(config)
    check_sequences(config, architecture)
    model = Decoder(architecture, config.model.vocab_size or vocab_size)
    model.bos_id = bos_id if config.data.document_mask else None
    initialise(model, config.seed)
    return model


class ScoredModel(Protocol):
    """A model that protocols score: posbench's decoder, or a model of transformers (`posbench.huggingface`)."""

    piece: int | None  # longer windows are read in pieces of this many tokens; None means whole

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype:
        """Return the number format of the activations."""

    @property
    def vocab_size(self) -> int:
        """Return the rows of the embedding table."""

    @property
    def num_heads(self) -> int:
        """Return the query heads of a layer."""

    def nll(
        self,
        tokens: Tensor,
        targets: Tensor,
        offset: int = 0,
        last: int | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of the `last` targets of each window, [B, last] float32 in nats; None means all."""
