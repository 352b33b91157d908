"""Our decoder as a class of transformers: the same module, read and written, called and sampled from their way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from posbench.huggingface.cache import PosbenchCache
from posbench.huggingface.configuration import PosbenchConfig
from posbench.model import initialise


class PosbenchForCausalLM(PreTrainedModel, GenerationMixin):
    """A posbench model: `logits` [B, T, V] of `input_ids` [B, T], with its own cache and `generate`.

    Positions count from a sequence's first token: padding before or behind it (0 in `attention_mask`) takes none.
    Weights stay float32; `dtype=torch.bfloat16` is that of the activations, as in training.
    """

    config_class = PosbenchConfig
    _keep_in_fp32_modules_strict = {"decoder"}  # noqa: RUF012

    def __init__(self, config: PosbenchConfig) -> None:
        super().__init__(config)
        self.decoder = config.build()
        asked = torch.get_default_dtype()  # transformers sets it to the one that from_pretrained was asked for
        self.decoder.compute_dtype = asked if asked is torch.bfloat16 else None
        if torch.empty(0).device.type != "meta":  # made by itself, not by from_pretrained, which will read weights
            initialise(self.decoder, seed=0)
        first: dict[nn.Parameter, str] = {}
        names = [(name, first.setdefault(each, name)) for name, each in self.named_parameters(remove_duplicate=False)]
        self._tied_weights_keys = {name: source for name, source in names if name != source}
        self.post_init()

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Names of one tensor: tables, where they are tied, and what layers share of a scheme, tied or not."""
        return dict(self._tied_weights_keys)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # `forward` makes its own

    def get_input_embeddings(self) -> nn.Module:
        return self.decoder.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.decoder.unembedding

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Make tables that are never stored again: `from_pretrained` leaves their memory as it finds it."""
        if any(True for _ in module.buffers(recurse=False)):
            [name] = [name for name, each in self.decoder.named_modules() if each is module]
            made = self.config.build().get_submodule(name)
            for own, new in zip(module.buffers(recurse=False), made.buffers(recurse=False), strict=True):
                own.copy_(new)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: PosbenchCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        return_dict: bool | None = None,
        **others: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits, the cache and, with labels, the mean loss in nats.

        Arguments: attention_mask, [B, tokens so far], 0 for padding; position_ids, as `generate` makes them from the
        mask, and no others; past_key_values, what an earlier call returned; logits_to_keep, those of so many last
        positions, 0 for all.
        Raises: ValueError for masks and positions that this model does not know.
        """
        padding = _padding(input_ids, attention_mask)
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if past_key_values is None and use_cache:
            self._check_streams()
            past_key_values = PosbenchCache(self.decoder, padding)
        elif past_key_values is not None and not isinstance(past_key_values, PosbenchCache):
            raise ValueError(
                f"past_key_values is a {type(past_key_values).__name__}: give what this model returned, or leave it out"
            )
        _check_positions(position_ids, padding, past_key_values, input_ids.shape[1])
        x = self._hidden(input_ids, padding, past_key_values)
        logits = self.decoder.unembedding(x[:, -logits_to_keep:] if logits_to_keep else x)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **others)
        output = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)  # type: ignore[arg-type]
        return output if return_dict is not False else output.to_tuple()

    def _hidden(self, tokens: Tensor, padding: Tensor, cache: PosbenchCache | None) -> Tensor:
        """The stream after the last norm, [B, T, C], 0 at padding."""
        if cache is None and not padding.any():
            return self.decoder.hidden(tokens)
        groups = (cache or PosbenchCache(self.decoder, padding)).groups
        x = tokens.new_zeros(*tokens.shape, self.decoder.config.d_model, dtype=self.decoder.embedding.weight.dtype)
        for group in groups:
            begin = 0 if group.pasts[0].filled else group.padding
            pasts = None if cache is None else group.pasts
            hidden = self.decoder.hidden(tokens[group.rows, begin:], pasts=pasts)
            x = x.to(hidden.dtype)
            x[group.rows, begin:] = hidden
        return x

    def _check_streams(self) -> None:
        if not self.decoder.scheme.is_streaming:
            raise ValueError(
                "this scheme's positions follow the length of the whole window, so earlier tokens cannot "
                "be cached: pass use_cache=False,  or export it with a factor (--under factor=4)"
            )


def _padding(tokens: Tensor, mask: Tensor | None) -> Tensor:
    """Tokens of padding before each sequence, [B]. Raises: ValueError for a mask with holes, or of another form."""
    if mask is None:
        return tokens.new_zeros(len(tokens))
    if mask.ndim != 2 or mask.shape[0] != len(tokens) or mask.shape[1] < tokens.shape[1]:
        raise ValueError(f"attention_mask has shape {tuple(mask.shape)}: give [batch, tokens so far], 1 for each token")
    is_token = mask.bool()
    padding = (~is_token).long().cumprod(dim=1).sum(dim=1)
    padding = torch.where(padding == mask.shape[1], 0, padding)  # nothing but padding
    behind = (~is_token.flip(1)).long().cumprod(dim=1).sum(dim=1)
    holes = is_token.sum(dim=1) + padding + torch.where(behind == mask.shape[1], 0, behind) != mask.shape[1]
    if (holes & is_token.any(dim=1)).any():
        raise ValueError(
            "attention_mask has a 0 between tokens: this model allows padding only before or after a sequence"
        )
    return padding


def _check_positions(positions: Tensor | None, padding: Tensor, cache: PosbenchCache | None, length: int) -> None:
    """Raises: ValueError for positions that do not count from each sequence's first token."""
    if positions is None:
        return
    first = cache.get_seq_length() if cache is not None else 0
    counted = first + torch.arange(length, device=positions.device) - padding.to(positions.device)[:, None]
    if ((positions != counted) & (counted >= 0)).any():
        raise ValueError("position_ids do not count from each sequence's first token: leave them out")
