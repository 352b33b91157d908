"""Read a decoder's sizes, position scheme and weights from a Hugging Face folder, for `train.from_run=FOLDER`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedConfig

from posbench.catalogue.own_files import kinds_in
from posbench.config import ConfigError
from posbench.huggingface.files import SAVE, check_adapter, weight_files
from posbench.huggingface.loading import Source, copied_config, from_pretrained
from posbench.huggingface.positions import read_positions, trained_length
from posbench.huggingface.stock import from_hugging_face
from posbench.model.positions import row_of
from posbench.schemes.entries import Positions, described

_CLASSES = {  # model_type -> the class of transformers
    "llama": "LlamaForCausalLM",  # SmolLM 2 too
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "posbench": "PosbenchForCausalLM",
}
_SIZES = {  # our field -> the key that every config.json has
    "num_layers": "num_hidden_layers",
    "d_model": "hidden_size",
    "num_heads": "num_attention_heads",
    "ffn_dim": "intermediate_size",
    "norm_eps": "rms_norm_eps",
}
_FIXED = {  # keys for which posbench has one value, the default: that value, and what posbench has
    "attention_bias": (False, "no bias in the projection after attention"),
    "mlp_bias": (False, "no biases in the MLP"),
}
_LAYER_TYPES = ("full_attention", "sliding_attention")


def checked_source(folder: Path) -> tuple[Source, list[str]]:
    """Return a folder that posbench's decoder can continue, and notes about what is read in another way.

    Raises: ConfigError if the decoder cannot represent the model, or as `Source.check`.
    """
    check_adapter(folder)
    source = Source(folder)
    content, file = source.content, folder / "config.json"
    family, architectures = content.get("model_type"), content.get("architectures")
    # `architectures` may be missing; the class then follows from the family.
    if family not in _CLASSES or (architectures or [_CLASSES[family]]) != [_CLASSES[family]]:
        facts = f"model_type={family}"
        if architectures:
            facts += f" and architectures={architectures}"
        raise ConfigError(
            f"{file} has {facts}, and posbench continues Llama, Mistral, Qwen 2 and 3, SmolLM 2 and 3, Phi-3 and "
            "folders of posbench export"
        )
    for key, (value, description) in _FIXED.items():
        if content.get(key, value) != value:
            raise ConfigError(f"{file} has {key}={content[key]}, and posbench has {description}")
    # "swish" is another name of SiLU in transformers.
    if content.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ConfigError(f"{file} has hidden_act={content['hidden_act']}, and posbench has SiLU")
    needed = (*_SIZES.values(), "max_position_embeddings", "vocab_size")
    if family == "posbench":
        needed = ("sizes", "scheme", "vocab_size")
    if missing := [key for key in needed if key not in content]:
        raise ConfigError(f"{file} has no {missing[0]}: save the model again with transformers ({SAVE})")
    if unknown := [kind for kind in content.get("layer_types") or () if kind not in _LAYER_TYPES]:
        raise ConfigError(f"{file} has layer_types with {unknown[0]}, and posbench has {' and '.join(_LAYER_TYPES)}")
    return source, source.check()


def sizes(source: Source) -> dict[str, Any]:
    """Return {field: value} of ModelConfig, and `vocab_size`."""
    config: Any = source.config
    entries = {"vocab_size": config.vocab_size}
    family = config.model_type
    if family == "posbench":
        return config.sizes | entries
    num_heads = config.num_attention_heads
    return entries | {
        "name": source.name,
        **{ours: getattr(config, theirs) for ours, theirs in _SIZES.items()},
        "num_kv_heads": _unless_usual(source, "num_key_value_heads", num_heads),
        "head_dim": _unless_usual(source, "head_dim", config.hidden_size // num_heads),
        # transformers 5 uses both tables too, if they differ.
        "tied_embeddings": config.tie_word_embeddings and not source.has_two_tables,
        "qk_norm": family == "qwen3",
        "qkv_bias": family == "qwen2",
        "init_std": config.initializer_range,
    }


def _unless_usual(source: Source, key: str, usual: int) -> int | None:
    """Return a setting, or None if `config.json` lacks it and its value is the usual one.

    None is what the identity of runs has for it.
    """
    value: int | None = getattr(source.config, key, None)
    is_unset = key not in source.content and value == usual
    return None if is_unset else value


def positions(source: Source) -> Positions:
    """Return the position scheme of the model; without a `row` if posbench has none such."""
    config: Any = source.config
    if config.model_type == "posbench":
        row = config.scheme
        # A folder must not name code to run, so a scheme of the user's own files is not read.
        return Positions(None if kinds_in(row) else row, described(row), config.context_length)
    length = trained_length(config, source.content)
    try:
        row = row_of(read_positions(source.skeleton, config, config.max_position_embeddings))
    except ConfigError as error:
        return Positions(None, str(error), length)
    return Positions(row, described(row), length)


def load_weights(source: Source) -> dict[str, Tensor]:
    """Return the float32 weights by posbench's names. Raises: ConfigError for tensors that do not fit."""
    weights: dict[str, Tensor] = {}
    if kinds_in(source.content.get("scheme") or {}):
        # Read without the class, which would import the file that the folder names.
        for file in weight_files(source.path):
            weights |= load_file(file)
    else:
        config: PreTrainedConfig = copied_config(source)
        # The class needs a rotation that it knows, and its weights do not depend on it.
        config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
        # A tensor that several modules share is named once.
        weights = dict(from_pretrained(source, config, torch.float32).named_parameters())
    return from_hugging_face({name.removeprefix("decoder."): tensor.detach() for name, tensor in weights.items()})
