"""Our decoder as a class of transformers: the same module, loaded, called and sampled from in their way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from posbench.huggingface.configuration import PosbenchConfig
from posbench.model.decoder import initialise


class PosbenchForCausalLM(PreTrainedModel, GenerationMixin):
    """A posbench model: `logits` [B, T, V] of `input_ids` [B, T]. `generate` reads the whole window for each token.

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

    def prepare_inputs_for_generation(  # type: ignore[override]
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **others: Any
    ) -> dict[str, Any]:
        """The whole window each time: schemes differ in what could be cached, and exports are scored, not served."""
        return {"input_ids": input_ids, "attention_mask": attention_mask}

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int = 0,
        return_dict: bool | None = None,
        **others: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits and, with labels, the mean loss in nats.

        Arguments: attention_mask, [B, T], 0 for padding, which must come after a sequence; logits_to_keep, those of so
        many last positions, 0 for all.
        Raises: ValueError for padding before a sequence, which would move its positions.
        """
        if attention_mask is not None and (attention_mask.long().diff(dim=-1) > 0).any():
            raise ValueError(
                "attention_mask has a 0 before a token: pad behind the sequence, or read prompts one at a time"
            )
        x = self.decoder.hidden(input_ids)
        logits = self.decoder.unembedding(x[:, -logits_to_keep:] if logits_to_keep else x)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **others)
        output = CausalLMOutputWithPast(loss=loss, logits=logits)
        return output if return_dict is not False else output.to_tuple()
