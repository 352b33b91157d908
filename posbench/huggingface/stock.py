"""Translate a model to the configuration and weights of a transformers class that computes exactly the same.

    LlamaForCausalLM      q and k rotated in every layer, all channels
    Qwen3ForCausalLM      the same, with q and k normalised first (`model.qk_norm`)
    Qwen2ForCausalLM      the same, with biases of q, k and v (`model.qkv_bias`)
    Phi3ForCausalLM       only some of the channels rotated
    SmolLM3ForCausalLM    only some of the layers rotated, or none (NoPE)

Any rotary frequencies can be translated. The classes compute angles in float32, posbench in float64.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from posbench.attention import Softmax
from posbench.huggingface.rotations import as_lists
from posbench.model.decoder import Decoder
from posbench.model.layers import Block
from posbench.schemes import Scheme
from posbench.schemes.rescaling import ROPE_TYPES
from posbench.schemes.rotary import Rotary, inverse_frequencies

WHOLE = {"embedding": "model.embed_tokens", "norm": "model.norm", "unembedding": "lm_head"}
# In layer n: `model.layers.n.NAME.weight` at Hugging Face, `blocks.n.NAME.weight` in posbench; biases likewise.
LAYER = {
    "attention_norm": "input_layernorm",
    "attention.qkv": "self_attn.qkv_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention.out": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate_up": "mlp.gate_up_proj",
    "ffn.down": "mlp.down_proj",
}
PARTS = {  # packed product -> the separate products of most model families, in our packing order
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "ffn.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
}


def to_hugging_face(tensors: Mapping[str, Tensor], rows: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """Return copies of a decoder's tensors under Hugging Face's names, without its scheme's.

    Arguments: rows, of each part of a packed product, such as {"attention.qkv": [32, 16, 16]}. A product without an
    entry stays packed, as in Phi-3.
    """
    theirs: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        inside, _, suffix = name.rpartition(".")
        if inside in WHOLE:
            theirs[f"{WHOLE[inside]}.{suffix}"] = tensor
        elif layer := re.fullmatch(r"blocks\.(\d+)\.(.+)", inside):
            prefix, inside = f"model.layers.{layer[1]}", layer[2]
            if inside in rows:
                parts = zip(PARTS[inside], tensor.split(list(rows[inside])), strict=True)
                theirs |= {f"{prefix}.{part}.{suffix}": piece for part, piece in parts}
            elif inside in LAYER:
                theirs[f"{prefix}.{LAYER[inside]}.{suffix}"] = tensor
    return {name: tensor.detach().clone() for name, tensor in theirs.items()}


def from_hugging_face(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return Hugging Face's tensors under our names, with q, k, v and gate, up packed.

    A name that is not known is kept, in a layer after `blocks.n.`.
    """
    whole = {theirs: name for name, theirs in WHOLE.items()}
    in_layer = {theirs: name for name, theirs in LAYER.items()}
    packed = {part: name for name, parts in PARTS.items() for part in parts}
    ours: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        inside, _, suffix = name.rpartition(".")
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", inside)
        if layer is None:
            ours[f"{whole.get(inside, inside)}.{suffix}"] = tensor
        elif (product := packed.get(layer[2])) is None:
            ours[f"blocks.{layer[1]}.{in_layer.get(layer[2], layer[2])}.{suffix}"] = tensor
        else:
            # Each part assigns the same packed tensor, so the order of names does not matter.
            parts = [tensors[f"model.layers.{layer[1]}.{part}.{suffix}"] for part in PARTS[product]]
            ours[f"blocks.{layer[1]}.{product}.{suffix}"] = torch.cat(parts)
    return ours


@dataclass(frozen=True)
class TransformersModel:
    """A decoder as a class of transformers, with its configuration and weights."""

    name: str  # the class, such as LlamaForCausalLM
    config: dict[str, Any]  # arguments of the class's configuration
    weights: dict[str, Tensor]  # its state_dict


def transformers_model(model: Decoder) -> TransformersModel | None:
    """Return `model` as a class of transformers that computes the same, or None if there is none."""
    rotations = _rotations(model)
    sizes = model.config
    # No class has both normalised q and k and biases.
    if rotations is None or (sizes.qk_norm and sizes.qkv_bias):
        return None
    layers_with = [scheme is not None for scheme in rotations]
    rotary = next((scheme for scheme in rotations if scheme is not None), None)
    is_partial = rotary is not None and rotary.width < rotary.shape.head_dim
    # Phi-3 counts the factors of a rescaling by hidden_size / num_heads, whatever head_dim is.
    if is_partial and (not all(layers_with) or _temperature(rotary) != 1.0):
        return None
    # These classes rotate all channels in all layers.
    if (sizes.qk_norm or sizes.qkv_bias) and (is_partial or not all(layers_with)):
        return None
    config = {
        "vocab_size": model.embedding.num_embeddings,
        "hidden_size": sizes.d_model,
        "intermediate_size": sizes.ffn_width,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_width,
        "rms_norm_eps": sizes.norm_eps,
        "initializer_range": sizes.init_std,
        "tie_word_embeddings": sizes.tied_embeddings,
        "rope_parameters": _rope_parameters(rotary),
    }
    if is_partial:
        return TransformersModel("Phi3ForCausalLM", config, _weights(model, is_packed=True))
    if all(layers_with):
        family = "Qwen2" if sizes.qkv_bias else "Llama"
        if sizes.qk_norm:
            family = "Qwen3"
        return TransformersModel(f"{family}ForCausalLM", config, _weights(model, is_packed=False))
    config |= {"no_rope_layers": [int(is_rotated) for is_rotated in layers_with], "use_sliding_window": False}
    return TransformersModel("SmolLM3ForCausalLM", config, _weights(model, is_packed=False))


def _rotations(model: Decoder) -> list[Rotary | None] | None:
    """Return the rotation of each layer, None for one without (NoPE); no list if a layer does anything else."""
    kinds = [cast(Block, block).attention.kind for block in model.blocks]
    if any(type(kind) is not Softmax or kind.shared_kv or kind.value_norm or [*kind.parameters()] for kind in kinds):
        return None
    if "embed" in model.scheme.acts_on or any(scheme.window for scheme in model.scheme):
        return None
    rotations = [None if type(scheme) is Scheme else scheme for scheme in model.scheme]
    if any(scheme is not None and not _only_rotates(scheme) for scheme in rotations):
        return None
    # A class of transformers has one rotation for all layers that rotate.
    if len({*rotations} - {None}) > 1:
        return None
    return cast(list[Rotary | None], rotations)


def _only_rotates(scheme: Scheme) -> bool:
    if not isinstance(scheme, Rotary) or scheme.sites != {"q", "k"} or not scheme.is_streaming:
        return False
    overridden = [hook for hook in ("q", "k", "v", "o", "prepare", "angles") if _overrides(scheme, hook, Rotary)]
    return not overridden and not any(_overrides(scheme, hook, Scheme) for hook in ("embed", "hidden", "gate", "bias"))


def _overrides(scheme: Scheme, hook: str, base: type[Scheme]) -> bool:
    return getattr(type(scheme), hook) is not getattr(base, hook)


def _temperature(rotary: Rotary | None) -> float:
    if rotary is None or rotary.rescaling is None:
        return 1.0
    return rotary.rescaling.temperature(rotary.shape.context_length)


def _rope_parameters(rotary: Rotary | None) -> dict[str, Any]:
    """Return the rotation as transformers' `rope_parameters`."""
    # No layer rotates, so these are not used.
    if rotary is None:
        return {"rope_type": "default", "rope_theta": 10000.0}
    width, length = rotary.width, rotary.shape.context_length
    common = {"rope_theta": rotary.base, "partial_rotary_factor": width / rotary.shape.head_dim}
    with torch.no_grad():
        # The angles at position 1 are the frequencies, as they are rescaled at the training length.
        frequencies_at_length = rotary.angles(torch.ones(1, dtype=torch.long), length)[0]
        trained = rotary.frequencies()
    usual = inverse_frequencies(width, rotary.base)
    temperature = _temperature(rotary)
    # RoPE's geometric schedule is given by its base, and its rescalings by transformers' own, if it has them.
    if torch.equal(trained, usual) and width == rotary.shape.head_dim and (parameters := _theirs(rotary)):
        return {**common, **parameters}
    if torch.equal(frequencies_at_length, usual) and temperature == 1.0:
        return {"rope_type": "default", **common}
    # Other frequencies, such as learned ones, and YaRN's temperature.
    return as_lists(common, usual, frequencies_at_length, temperature, rotary.shape.positions_length)


def _theirs(rotary: Rotary) -> dict[str, Any] | None:
    """Return the rescaling of a rotation as transformers' `rope_parameters`, or None if it has no such type."""
    if rotary.rescaling is None or rotary.rescaling.rope_type not in ROPE_TYPES:
        return None
    keys = ("rope_type", *ROPE_TYPES[rotary.rescaling.rope_type])
    return {key: value for key, value in rotary.rescaling.parameters.items() if key in keys}


def _weights(model: Decoder, is_packed: bool) -> dict[str, Tensor]:
    block = cast(Block, model.blocks[0])
    # Phi-3 keeps q, k, v one matrix, and gate, up too. For the others, the rows at which these matrices are cut.
    rows = {}
    if not is_packed:
        rows = {"attention.qkv": [*block.attention.rows().values()], "ffn.gate_up": 2 * [model.config.ffn_width]}
    return to_hugging_face(dict(model.named_parameters()), rows)
