"""Score a model of transformers: token losses of a window, and the attention weights of one layer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from posbench.config import ConfigError
from posbench.huggingface.positions import added_positions
from posbench.huggingface.rotations import is_dynamic

_LOGITS = 1 << 25  # logits in memory at a time: 128 MiB in float32
_SAME = 0.02  # nats; rounding in bfloat16 is less, another part's losses differ by more
_CACHED_EXACTLY = {"full_attention", "sliding_attention"}


class SubjectModel:
    """A model of transformers as the protocols need it (`posbench.model.decoder.ScoredModel`)."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.piece: int | None = None
        self.base: nn.Module | None = None  # gives the hidden states that the head reads; None: read logits whole
        self.base = self._find_base()

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def vocab_size(self) -> int:
        table: Any = self.model.get_input_embeddings()
        return int(table.weight.shape[0])

    @property
    def num_heads(self) -> int:
        return int(getattr(self.model.config.get_text_config(), "num_attention_heads", None) or 1)

    @property
    def longest(self) -> int | None:
        """Return the longest input in tokens, which a table of positions sets, or None without such a table."""
        return added_positions(self.model)[1]

    @property
    def has_exact_cache(self) -> bool:
        """Return whether reading a window in pieces gives the same losses as reading it whole."""
        text = self.model.config.get_text_config()
        layer_types = set(getattr(text, "layer_types", None) or ())
        return not (is_dynamic(text) or getattr(self.model, "_is_stateful", False) or layer_types - _CACHED_EXACTLY)

    def nll(
        self,
        tokens: Tensor,
        targets: Tensor,
        offset: int = 0,
        last: int | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of the `last` targets of each window, [B, last] float32 in nats; None means all.

        Arguments: tokens and targets, [B, T]; offset and positions must be left out.
        """
        assert offset == 0 and positions is None
        last = last or tokens.shape[1]
        targets = targets[:, -last:]
        # No part is known whose hidden states the head reads, so all logits are computed at once.
        if self.base is None:
            logits = self.model(input_ids=tokens, use_cache=False).logits[:, -last:]
            return F.cross_entropy(logits.float().transpose(1, 2), targets, reduction="none")
        output = self._hidden(self.base, tokens, last)
        # The head reads a few rows at a time, so that memory never holds the logits of a long window.
        rows_at_once = max(1, _LOGITS // (self.vocab_size * len(tokens)))
        hidden = output.last_hidden_state.split(rows_at_once, dim=1)
        losses = []
        for part, target in zip(hidden, targets.split(rows_at_once, dim=1), strict=True):
            logits = self._logits(self.base, output, part, target)
            losses.append(F.cross_entropy(logits.float().transpose(1, 2), target, reduction="none"))
        return torch.cat(losses, dim=1)

    @torch.no_grad()
    def _find_base(self) -> nn.Module | None:
        """Return the part of the model that gives the hidden states for the head, or None if it is not found."""
        tokens = (torch.arange(9, device=self.device) * 7 % self.vocab_size)[None]  # any different tokens will do
        whole_losses = self.nll(tokens[:, :-1], tokens[:, 1:])
        # Some classes call another part than their `base_model` (OPT its decoder). So a part is taken only if reading
        # it and the head one after the other gives the losses of the whole model.
        for part in (self.model.base_model, self.model.get_decoder()):
            if part is None or part is self.model:
                continue
            self.base = part
            try:
                losses = self.nll(tokens[:, :-1], tokens[:, 1:])
            except (AttributeError, TypeError, RuntimeError, IndexError, KeyError):
                continue  # it does not take tokens, or its output has no hidden states
            if torch.allclose(losses, whole_losses, atol=_SAME, rtol=0):
                return part
        return None

    def _hidden(self, base: nn.Module, tokens: Tensor, last: int) -> Any:
        piece = self.piece if self.has_exact_cache else None
        if piece is None or tokens.shape[1] <= piece:
            output = base(input_ids=tokens, use_cache=False, return_dict=True)
            output.last_hidden_state = output.last_hidden_state[:, -last:]
            return output
        # Read in pieces with the model's own cache, and keep only the hidden states.
        cache = DynamicCache(config=self.model.config.get_text_config())
        parts = []
        for part in tokens.split(piece, dim=1):
            output = base(input_ids=part, past_key_values=cache, use_cache=True, return_dict=True)
            parts.append(output.last_hidden_state)
        output.past_key_values = None
        output.last_hidden_state = torch.cat(parts, dim=1)[:, -last:]
        return output

    def _logits(self, base: nn.Module, output: Any, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Return the logits that the model's own head gives for `hidden`. Of `tokens` only the shape counts."""
        # The model's own `forward` runs, so a softcap or another scaling of logits is applied as the class applies it.
        # It calls its base model, which now only returns `hidden`, and then applies its own head to it.
        answer = copy.copy(output)
        answer.last_hidden_state = hidden
        base.forward = lambda *args, **kwargs: answer
        try:
            logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        finally:
            del base.forward  # the class's own is used again
        return logits

    @contextmanager
    def recording(self, record: Callable[[int, dict[str, Tensor]], None]) -> Iterator[None]:
        """Record attention weights in a `with` block; memory holds one layer's.

        Arguments: record, called with a layer's number and {"weights": [B, heads, T, T] float64}. Raises: ConfigError
        if no layer gave weights.
        """
        modules = {name: module for name, module in self.model.named_modules() if _is_attention(module)}
        recorded: list[int] = []
        usual_implementation, piece = self.model.config._attn_implementation, self.piece

        # Called after each attention module, whose output is a tuple if it has weights.
        def hook(number: int, module: nn.Module, inputs: Any, output: Any) -> None:
            if not isinstance(output, (tuple, list)):
                return
            maps = [part for part in output if isinstance(part, Tensor) and part.ndim == 4]
            for weights in maps[:1]:
                # Weights are [B, heads, T, T]; another tensor of four dimensions is left out.
                if weights.shape[-1] == weights.shape[-2]:
                    recorded.append(number)
                    record(number, {"weights": weights.double()})

        handles = []
        for number, module in enumerate(modules.values()):
            layer = getattr(module, "layer_idx", None)
            # Some classes do not number their layers; the modules come in order.
            if layer is None:
                layer = number
            handles.append(module.register_forward_hook(partial(hook, layer)))
        # Whole windows, by the implementation that returns weights.
        self.piece = None
        try:
            if usual_implementation != "eager":
                self.model.set_attn_implementation("eager")
            yield
        finally:
            for handle in handles:
                handle.remove()
            if usual_implementation != "eager":
                self.model.set_attn_implementation(usual_implementation)
            self.piece = piece
        if not recorded:
            raise ConfigError(
                f"{type(self.model).__name__} gives no attention weights (its layers are recurrent, or fuse them): "
                "protocol mechanism cannot be scored"
            )


def _is_attention(module: nn.Module) -> bool:
    # Wrappers of an attention module have its name too.
    inner = [child for child in module.modules() if child is not module]
    return _is_named_attention(module) and not any(_is_named_attention(child) for child in inner)


def _is_named_attention(module: nn.Module) -> bool:
    return type(module).__name__.endswith("Attention")
