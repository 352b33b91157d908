"""Latent attention: transformers' DeepSeek-V3 and Kimi Linear, and grouped queries."""

import pytest
import torch

from posbench.model.size import forward_flops_per_token, num_parameters
from posbench.verify import VOCAB, random_tokens
from tests.rows import Float64, built, causal_mask, difference, first_layer, random

B, H, D, C, R = 2, 6, 16, 48, 4
LATENT = 2 * D - R


def their_weights(attention):
    """Return our weights by the names of transformers' classes, whose queries end with the shared channels."""
    kind = attention.kind
    q = attention.qkv.weight.view(H, D, C)
    k, v = kind.W_k.view(H, D - R, LATENT), kind.W_v.view(H, D, LATENT)
    return {
        "q_proj.weight": torch.cat((q[:, R:], q[:, :R]), 1).flatten(0, 1),
        "kv_a_proj_with_mqa.weight": torch.cat((kind.W_c, kind.W_r)),
        "kv_a_layernorm.weight": kind.norm_weight,
        "kv_b_proj.weight": torch.cat((k, v), 1).flatten(0, 1),
        "o_proj.weight": attention.out.weight,
    }


@torch.no_grad()
@pytest.mark.parametrize("name, offset", [("mla", 0), ("mla", 37), ("mla_nope", 0)])
def test_a_layer_is_deepseeks_or_kimi_linears_with_its_weights(name, offset, monkeypatch):
    deepseek = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    kimi = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    for module in (deepseek, kimi):
        monkeypatch.setattr(module, "torch", Float64())
    sizes = {
        "hidden_size": C, "num_hidden_layers": 1, "num_attention_heads": H, "num_key_value_heads": H,
        "q_lora_rank": None, "kv_lora_rank": LATENT, "qk_rope_head_dim": R, "qk_nope_head_dim": D - R, "v_head_dim": D,
    }  # fmt: skip
    if name == "mla":
        layer = deepseek.DeepseekV3Attention(deepseek.DeepseekV3Config(**sizes, rope_interleave=False), 0)
    else:
        layer = kimi.KimiLinearAttention(kimi.KimiLinearConfig(**sizes), 0)
    layer = layer.double()
    layer.config._attn_implementation = "eager"
    T = 75
    ours, at, scheme = first_layer(built(name), T, offset)
    layer.load_state_dict(their_weights(ours), strict=True)
    x = random(B, T, C)
    angles = torch.arange(offset, offset + T)[:, None] * 10000.0 ** (-torch.arange(0, R, 2).double() / R)
    rotation = tuple(torch.cat((part, part), -1)[None] for part in (angles.cos(), angles.sin()))
    options = {"position_embeddings": rotation} if name == "mla" else {}
    expected, _ = layer(x, attention_mask=causal_mask(T), **options)
    assert expected.dtype == torch.float64 and expected.abs().max() > 0.5
    assert difference(ours(x, at, scheme), expected) < 1e-13


@torch.no_grad()
def test_grouped_queries_are_those_of_a_model_with_as_many_key_heads():
    ours, usual = built("gqa_qk_rope"), built("qk_rope", "model.num_kv_heads=1")
    for block, theirs in zip(ours.blocks, usual.blocks, strict=True):
        kind = block.attention.kind
        weight = torch.cat((block.attention.qkv.weight, kind.W_k, kind.W_v))
        theirs.attention.qkv.weight.data.copy_(weight)
    tokens = random_tokens()
    assert difference(ours(tokens, offset=5), usual(tokens, offset=5)) < 1e-13
    sizes = [num_parameters(model.architecture, VOCAB) for model in (ours, usual)]
    flops = [forward_flops_per_token(model.architecture, VOCAB, 64) for model in (ours, usual)]
    assert sizes[0] == sizes[1] and flops[0] == flops[1]
