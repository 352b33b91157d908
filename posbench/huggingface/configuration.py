"""Describe a posbench model to transformers: the decoder's sizes and its position scheme, as plain data."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from transformers import PreTrainedConfig

from posbench.config import Config, ModelConfig, SchemeConfig
from posbench.model.architecture import Architecture
from posbench.model.decoder import Decoder


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
