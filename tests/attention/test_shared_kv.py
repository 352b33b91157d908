"""Shared keys and values agree with transformers' Gemma 4 and DeepSeek-V4."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb, eager_attention_forward
from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextAttention

from tests.rows import built, causal_mask, difference, first_layer, random

D, H, HKV, C = 16, 6, 2, 48


def gemma(attention):
    """Return Gemma 4's global attention with our weights, and without norms unless we have them."""
    theirs = Gemma4TextAttention(
        Gemma4TextConfig(
            hidden_size=C,
            num_hidden_layers=1,
            num_attention_heads=H,
            num_global_key_value_heads=HKV,
            num_key_value_heads=HKV,
            head_dim=D,
            global_head_dim=D,
            layer_types=["full_attention"],
            num_kv_shared_layers=0,
            attention_k_eq_v=True,
            attn_implementation="sdpa",  # their eager softmax is in float32
        ),
        layer_idx=0,
    ).double()
    if attention.q_norm is None:
        theirs.q_norm = theirs.k_norm = theirs.v_norm = nn.Identity()
    theirs.scaling = D**-0.5
    q, k = attention.qkv.weight.split([H * D, HKV * D])
    weights = {"q_proj.weight": q, "k_proj.weight": k, "o_proj.weight": attention.out.weight}
    if attention.q_norm is not None:
        norms = {"q_norm.weight": attention.q_norm.weight, "k_norm.weight": attention.k_norm.weight}
        assert all(weight.sub(1).abs().max() > 0.1 for weight in norms.values())
        weights |= norms
    theirs.load_state_dict(weights, strict=True)
    return theirs


@torch.no_grad()
@pytest.mark.parametrize("offset", [0, 37])
@pytest.mark.parametrize("name, qk_norm", [("shared_kv_qk_rope", False), ("gemma_4_kv", True)])
def test_a_value_that_is_the_unrotated_key_equals_gemma_4(name, qk_norm, offset):
    model, T = built(name, f"model.qk_norm={qk_norm}", "model.norm_eps=1e-6"), 75
    x, (attention, at, scheme) = random(2, T, C), first_layer(model, T, offset)
    cos, sin = (torch.cat((half, half), dim=-1)[None] for half in at.pos)
    theirs, _ = gemma(attention)(x, (cos, sin), causal_mask(T), {})
    assert theirs.abs().max() > 0.5
    # Their norms are in float32 under all dtypes.
    assert difference(attention(x, at, scheme), theirs) < (1e-5 if qk_norm else 1e-12)


@torch.no_grad()
def test_turning_the_output_of_a_shared_key_back_equals_deepseek_v4():
    """Their last channels are rotated in pairs (2t, 2t + 1), and ours are the first, in pairs (t, t + r / 2)."""
    model, T, r = built("deepseek_v4", "model.qk_norm=true"), 75, 2
    x, (attention, at, scheme) = random(2, T, C), first_layer(model, T, 5)
    q, k = attention.qkv(x).view(2, T, H + HKV, D).transpose(1, 2).split([H, HKV], dim=1)
    q, k = (norm(y).roll(-r, -1) for norm, y in ((attention.q_norm, q), (attention.k_norm, k)))
    cos, sin = (half[None].double() for half in at.pos)
    q, k = (apply_rotary_pos_emb(y, cos, sin) for y in (q, k))
    module = SimpleNamespace(num_key_value_groups=H // HKV, sinks=attention.kind.sink, training=False)
    o, _ = eager_attention_forward(module, q, k, k, causal_mask(T), D**-0.5)
    o = apply_rotary_pos_emb(o.transpose(1, 2), cos, -sin).roll(r, -1)
    theirs = attention.out(o.transpose(1, 2).reshape(2, T, -1))
    assert theirs.abs().max() > 0.5
    assert difference(attention(x, at, scheme), theirs) < 1e-6  # theirs is in float32
