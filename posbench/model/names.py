"""Map our names of a decoder's tensors to Hugging Face's, by one table for import and export."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

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
