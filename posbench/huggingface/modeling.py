"""Wrap our decoder in a class of transformers, so it loads, runs and generates as their models do."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from posbench.config import Config, ModelConfig, SchemeConfig
from posbench.model.architecture import Architecture
from posbench.model.decoder import Decoder, initialise


class PosbenchConfig(PreTrainedConfig):
    """The content of `config.json` for a posbench model.

    `sizes` has the fields of `ModelConfig`, `scheme` the keys of `conf/scheme/*.yaml`, `context_length` is the training
    length in tokens, and `longest` a greater length that the model may read, or None.
    """

    model_type = "posbench"

    sizes: dict[str, Any] | None = None
    scheme: dict[str, Any] | None = None
    context_length: int = 128
    longest: int | None = None
    vocab_size: int = 257
    use_cache: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    tie_word_embeddings: bool = False
    max_position_embeddings: int | None = None  # includes a rescaling's factor; None: `longest` or `context_length`

    def __post_init__(self, **kwargs: Any) -> None:
        if self.sizes is not None:
            # The names that other programs look for.
            model = ModelConfig(**self.sizes)
            self.hidden_size, self.head_dim = model.d_model, model.head_width
            self.num_hidden_layers, self.num_attention_heads = model.num_layers, model.num_heads
            self.num_key_value_heads, self.intermediate_size = model.kv_heads, model.ffn_width
            self.tie_word_embeddings = model.tied_embeddings
        self.max_position_embeddings = self.max_position_embeddings or self.longest or self.context_length
        super().__post_init__(**kwargs)

    @classmethod
    def for_run(cls, config: Config, vocab_size: int, **kwargs: Any) -> PosbenchConfig:
        """Return the transformers configuration of a run's model. Arguments: vocab_size, rows of the embedding."""
        return cls(
            sizes=asdict(config.model),
            scheme=config.scheme.to_mapping(),
            context_length=config.train.context_length,
            longest=config.data.window,
            vocab_size=vocab_size,
            **kwargs,
        )

    def build(self) -> Decoder:
        """Return the posbench decoder, on the CPU, without initialised weights.

        Raises: ConfigError if the scheme is unknown (such as a plug-in that is not installed) or refuses its options.
        """
        assert self.sizes is not None and self.scheme is not None
        model, row = ModelConfig(**self.sizes), SchemeConfig.from_mapping(dict(self.scheme))
        with torch.device("cpu"):  # transformers builds on `meta`, but a scheme's own tables need their numbers
            return Decoder(Architecture.build(model, row, self.context_length, self.longest), self.vocab_size)


class PosbenchForCausalLM(PreTrainedModel, GenerationMixin):
    """A posbench model in transformers: `input_ids` [B, T] -> `logits` [B, T, V] over the vocabulary.

    Weights stay float32; `dtype=torch.bfloat16` sets the type of the activations.
    """

    config_class = PosbenchConfig
    _keep_in_fp32_modules_strict = {"decoder"}  # noqa: RUF012

    def __init__(self, config: PosbenchConfig) -> None:
        super().__init__(config)
        self.decoder = config.build()
        dtype = torch.get_default_dtype()  # transformers sets it to the `dtype` of from_pretrained
        self.decoder.compute_dtype = dtype if dtype is torch.bfloat16 else None  # None: that of the weights
        if torch.empty(0).device.type != "meta":  # from_pretrained builds on `meta` and will load weights
            initialise(self.decoder, seed=0)
        # Tied embeddings, and scheme parameters that layers share, are stored once.
        first_names: dict[nn.Parameter, str] = {}
        parameters = self.named_parameters(remove_duplicate=False)
        names = [(name, first_names.setdefault(parameter, name)) for name, parameter in parameters]
        self._tied_weights_keys = {name: source for name, source in names if name != source}
        self.post_init()

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Return {alias: first name} of shared tensors."""
        return dict(self._tied_weights_keys)

    def get_input_embeddings(self) -> nn.Module:
        return self.decoder.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.decoder.unembedding

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        # `from_pretrained` calls this for each module. Buffers are not stored with the weights, and the model may have
        # been built on `meta`, so they are computed again.
        if any(True for _ in module.buffers(recurse=False)):
            [name] = [name for name, submodule in self.decoder.named_modules() if submodule is module]
            computed = self.config.build().get_submodule(name)
            for buffer, computed_buffer in zip(
                module.buffers(recurse=False), computed.buffers(recurse=False), strict=True
            ):
                buffer.copy_(computed_buffer)

    def prepare_inputs_for_generation(  # type: ignore[override]
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Return the `forward` arguments that predict the next token: all tokens so far, without a cache."""
        # Schemes differ in what could be cached, and exported models are for scoring rather than serving.
        return {"input_ids": input_ids, "attention_mask": attention_mask}

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int = 0,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Return the logits [B, T, V] and the mean loss in nats, which is None without labels [B, T].

        Arguments: attention_mask, [B, T], 0 for padding; logits_to_keep, the number of last positions to compute logits
        for, 0 for all; return_dict, False to get a tuple.
        Raises: ValueError for padding before a sequence, which would move its positions.
        """
        if attention_mask is not None and (attention_mask.long().diff(dim=-1) > 0).any():
            raise ValueError(
                "attention_mask has a 0 before a token: pad after the sequence, or read prompts one at a time"
            )
        x = self.decoder.hidden(input_ids)
        if logits_to_keep:
            x = x[:, -logits_to_keep:]
        logits = self.decoder.unembedding(x)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        output = CausalLMOutputWithPast(loss=loss, logits=logits)
        return output if return_dict is not False else output.to_tuple()
