"""Read what a model of transformers does with position: from its configuration, and the modules of its class.

The class decides which layers attend, convolve or keep a state, and which keys it reads; the configuration gives the
numbers. `posbench.huggingface.behaviour` checks each statement on the model itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from posbench.model.positions import (
    ALL,
    CHOSEN,
    CHUNK,
    CONVOLUTION,
    NOTHING,
    STATE,
    WINDOW,
    LayerPositions,
    ModelPositions,
    QueryScale,
    Rotation,
)
from posbench.schemes.rescaling import LENGTH, ROPE_TYPES
from posbench.schemes.rotary import inverse_frequencies

_STATES = ("mamba", "delta", "lightning", "linearattention", "rwkv", "mlstm", "xlstm", "recurrent", "rglru")
_LISTS = ("layers", "h", "blocks", "block", "layer")  # names of the list of layers
_LENGTH_KEYS = (  # in the order of preference
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "context_length",
    "max_sequence_length",
)
# In these families, layers that see all tokens have no position if other layers have windows.
_NO_POSITION_IN_FULL = ("cohere2", "cohere2_moe", "afmoe", "exaone4", "exaone_moe", "kolibri1", "flint")


def skeleton(config: PreTrainedConfig) -> PreTrainedModel:
    """Return a model of a configuration without weights, in no memory."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def layers_of(model: nn.Module) -> nn.ModuleList:
    """Return the layers of a model. Raises: ValueError if its class has no list of them."""
    for name, module in model.named_modules():
        # A scheme of posbench that alternates has a list of this name too.
        if isinstance(module, nn.ModuleList) and name.rpartition(".")[2] in _LISTS and "scheme" not in name:
            return module
    raise ValueError(f"{type(model).__name__} has no list of layers")


def rotations_in(config: PreTrainedConfig) -> dict[str, dict[str, Any]]:
    """Return {layer type: rope_parameters}, with the type "" if all layers share one; {} without rotations."""
    text = config.get_text_config()
    parameters = getattr(text, "rope_parameters", None)
    if not parameters or getattr(text, "alibi", False):
        return {}
    nested = {key: value for key, value in parameters.items() if isinstance(value, dict)}
    return nested or {"": parameters}


def of_layer(config: PreTrainedConfig, number: int) -> Any:
    """Return the configuration of one layer, for classes whose layers differ in their sizes."""
    return config.per_layer_config[number] if getattr(config, "is_heterogeneous", False) else config


def head_width(config: PreTrainedConfig) -> int:
    """Return the number of channels of a head; of the first layer's, if layers differ."""
    text: Any = of_layer(config.get_text_config(), 0)
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def trained_length(config: PreTrainedConfig, content: Mapping[str, Any]) -> int | None:
    """Return the longest input in the model's own training, in tokens, or None if it is not recorded."""
    text = config.get_text_config()
    for parameters in rotations_in(config).values():
        if parameters.get("rope_type") == "yarn" and parameters.get(LENGTH):
            # With the other types, training reaches the length that they are for.
            return int(parameters[LENGTH])
    # The class may not know a length that `config.json` has.
    if isinstance(content.get("text_config"), dict):
        content = content["text_config"]
    for key in _LENGTH_KEYS:
        value = getattr(text, key, None) or content.get(key)
        if isinstance(value, int):
            return value
    return None


def read_positions(
    model: PreTrainedModel,
    config: PreTrainedConfig,
    length: int,
    methods: Mapping[str, tuple[str, float]] | None = None,
    trained: int | None = None,
) -> ModelPositions:
    """Return what a model's layers do, in inputs of `length` tokens.

    Arguments: model, of the class, with or without weights; config, which may have other rotations than the model's;
    methods, {layer type: name and factor} of rescalings that `config` writes by another name.
    """
    text: Any = config.get_text_config()
    reader = _Reader(model, text, length, methods or {})
    layers = [reader.layer(number, layer) for number, layer in enumerate(layers_of(model))]
    embedding, longest = added_positions(model)
    return ModelPositions(layers, embedding, longest, trained)


def added_positions(model: PreTrainedModel) -> tuple[str, int | None]:
    """Return what a model adds to its embeddings, and the longest input that its table of positions has."""
    text: Any = model.config.get_text_config()
    tokens = model.get_input_embeddings()
    length = next((getattr(text, key) for key in _LENGTH_KEYS if getattr(text, key, None)), None)
    for name, module in model.named_modules():
        is_table = isinstance(module, nn.Embedding) and module is not tokens and ("pos" in name or "wpe" in name)
        # Such a table has the trained length in rows, and sometimes a few more for padding.
        if is_table and length is not None and 0 <= module.num_embeddings - length <= 8:
            return "learned", length
        if "sinusoid" in type(module).__name__.lower() or hasattr(module, "pos_encoding"):
            return "sinusoidal", None
    # Sines or biases of these are a table of the trained length.
    return "", length if text.model_type in ("gptj", "codegen", "mpt") else None


class _Reader:
    """The layers of one model."""

    def __init__(
        self, model: PreTrainedModel, text: Any, length: int, methods: Mapping[str, tuple[str, float]]
    ) -> None:
        self.text, self.length, self.methods = text, length, methods
        self.rotations = rotations_in(text)
        self.types = getattr(text, "layer_types", None)
        self.source = inspect.getsource(inspect.getmodule(type(model)))  # type: ignore[arg-type]
        # It begins the names of its modules' classes: a layer of RecurrentGemma may attend, none of RWKV does.
        has_heads = getattr(of_layer(text, 0), "num_attention_heads", None)
        self.family = type(model).__name__.removesuffix("ForCausalLM") if has_heads else ""

    def get(self, key: str) -> Any:
        """Return a setting, or None if the class's code does not read it."""
        is_read = f"config.{key}" in self.source or f'"{key}"' in self.source
        return getattr(self.text, key, None) if is_read else None

    def layer(self, number: int, layer: nn.Module) -> LayerPositions:
        """Return what a layer does."""
        kind = self.types[number] if self.types else ""
        decays = any(name.endswith("A_log") for name, _ in layer.named_parameters())
        has_state = decays or any(self._keeps_state(module) for module in layer.modules())
        attention = next((module for module in layer.modules() if self._attends(module)), None)
        if attention is None:
            convolutions = [module for module in layer.modules() if isinstance(module, nn.Conv1d)]
            if has_state:
                return LayerPositions(STATE)
            if convolutions:
                return LayerPositions(CONVOLUTION, int(convolutions[0].kernel_size[0]))
            return LayerPositions(NOTHING)
        sees, width = self._sees(number, kind, attention)
        channels = getattr(attention, "qk_head_dim", None) or getattr(attention, "head_dim", None)
        channels = int(channels or head_width(self.text))
        rotation = self._rotation(number, kind, sees)
        # DeepSeek has YaRN's temperature in the scale of its scores.
        if rotation is not None and "mscale_all_dim" in self.rotations.get("", {}):
            scale = getattr(attention, "scaling", channels**-0.5)
            rotation = replace(rotation, temperature=rotation.temperature * scale * channels**0.5)
        return LayerPositions(
            sees,
            width,
            rotation,
            channels,
            self._other(),
            has_state,
            any(name.endswith(("sinks", "sink")) for name, _ in layer.named_parameters()),
            self.get("attn_logit_softcapping"),
            self._query_scale(number),
        )

    def _name(self, module: nn.Module) -> str:
        return type(module).__name__.removeprefix(self.family).lower()

    def _keeps_state(self, module: nn.Module) -> bool:
        return any(word in self._name(module) for word in _STATES)

    def _attends(self, module: nn.Module) -> bool:
        name = self._name(module)
        return ("attention" in name or name.endswith("mla")) and not self._keeps_state(module)

    def _sees(self, number: int, kind: str, attention: nn.Module) -> tuple[str, int | None]:
        if "compressed" in kind:
            raise ValueError(f"layers of the type {kind} are not known")
        if "chunk" in kind:
            return CHUNK, self.text.attention_chunk_size
        if "indexed" in kind:
            return CHOSEN, self.get("index_topk")
        # GPT-Neo and RecurrentGemma name their windows differently.
        if kinds := getattr(self.text, "attention_layers", None):
            return (WINDOW, self.text.window_size) if kinds[number] == "local" else (ALL, None)
        window = self.get("attention_window_size") or self.get("sliding_window")
        # The type says whether a layer has a window, or else its module does; other classes have one for all layers.
        if self.types:
            window = window if "sliding" in kind else None
        elif hasattr(attention, "sliding_window"):
            window = attention.sliding_window
        return (WINDOW, int(window)) if window else (ALL, None)

    def _rotation(self, number: int, kind: str, sees: str) -> Rotation | None:
        bases = getattr(self.text, "layer_rope_theta", None)
        flags = getattr(self.text, "no_rope_layers", None)  # despite the name, 1 means rotated
        # GPT-J and CodeGen have no key for their base.
        if width := self.get("rotary_dim"):
            return Rotation(1e4, "none", 1.0, 1.0, inverse_frequencies(width, 1e4))
        key = "" if "" in self.rotations else kind
        parameters = self.rotations.get(key)
        if not parameters or (flags and not flags[number]) or (bases and not bases[number]):
            return None
        if self.get("position_embedding_type") == "nope":
            return None
        has_windows = getattr(self.text, "sliding_window", None)
        if self.text.model_type in _NO_POSITION_IN_FULL and sees == ALL and has_windows:
            return None
        base = float(bases[number] if bases else parameters["rope_theta"])
        name = str(parameters.get("rope_type", "default"))
        is_rescaled = name not in ("default", "proportional")
        method = self.methods.get(key) or (name if is_rescaled else "none", float(parameters.get("factor") or 1))
        temperature = 1.0
        if name not in ("default", *ROPE_INIT_FUNCTIONS):
            raise ValueError(f"transformers has no rope_type={name}")
        # It has no such function for `default`: each class computes RoPE's own frequencies.
        if name != "default" and not bases:
            words = (self.text, torch.device("cpu"), self.length)
            frequencies, temperature = ROPE_INIT_FUNCTIONS[name](*words, layer_type=key or None)
        else:
            channels = int(head_width(self.text) * (parameters.get("partial_rotary_factor") or 1.0))
            frequencies = inverse_frequencies(channels, base)
        rescaling = {} if name == "default" else self._completed(parameters)
        return Rotation(base, *method, temperature**2, frequencies, rescaling=rescaling)

    def _completed(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return a rescaling with the training length and the factor that transformers would use."""
        longest = self.text.max_position_embeddings
        original = getattr(self.text, LENGTH, None) or parameters.get(LENGTH)  # Phi-3 has it outside
        # transformers takes max_position_embeddings for this type.
        if parameters["rope_type"] == "dynamic":
            original = None
        length = original or longest
        complete = {**parameters, LENGTH: length, "factor": parameters.get("factor") or longest / length}
        # Keys that a type does not have are left out.
        keys = ("rope_type", *ROPE_TYPES.get(parameters["rope_type"], complete))
        return {key: value for key, value in complete.items() if key in keys}

    def _other(self) -> str:
        nested = getattr(self.text, "attn_config", None)
        has_slopes = getattr(self.text, "alibi", False) or getattr(nested, "alibi", False)
        return "ALiBi" if has_slopes or self.text.model_type == "bloom" else ""

    def _query_scale(self, number: int) -> QueryScale | None:
        parameters = self.rotations.get("") or {}
        if beta := parameters.get("llama_4_scaling_beta"):
            return QueryScale(beta, parameters[LENGTH], 0)
        if self.get("attn_temperature_tuning") and not self.text.no_rope_layers[number]:
            return QueryScale(self.text.attn_scale, self.text.floor_scale, 1)
        return None
