"""Rows that alternate windows and full layers, held layer by layer to transformers' classes and their patterns."""

from importlib import import_module

import pytest
import torch
from transformers.masking_utils import sliding_window_causal_mask_function
from transformers.models.bailing_hybrid.configuration_bailing_hybrid import BailingHybridConfig
from transformers.models.bailing_hybrid.modeling_bailing_hybrid import BailingHybridForgetGate
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
from transformers.models.granite_swa.configuration_granite_swa import GraniteSWAConfig
from transformers.models.granite_swa.modeling_granite_swa import GraniteSWAAttention
from transformers.models.mimo_v2_flash.configuration_mimo_v2_flash import MiMoV2FlashConfig
from transformers.models.mimo_v2_flash.modeling_mimo_v2_flash import MiMoV2FlashAttention
from transformers.models.mistral_large4.configuration_mistral_large4 import MistralLarge4TextConfig
from transformers.models.muse_glimmer.configuration_muse_glimmer import MuseGlimmerTextConfig
from transformers.models.muse_glimmer.modeling_muse_glimmer import MuseGlimmerTextAttention

from posbench.schemes.rotary import Rotary
from posbench.verify import random_tokens
from tests.refusals import refuses
from tests.rows import Float64, built, difference, first_layer, random

D, H, HKV, C, T, WINDOW = 16, 6, 2, 48, 150, 64
SIZES = {
    "hidden_size": C, "num_attention_heads": H, "num_key_value_heads": HKV, "head_dim": D, "sliding_window": WINDOW,
    "attn_implementation": "eager",
}  # fmt: skip


def muse():
    rotation = {"rope_type": "default", "rope_theta": 5e5}
    config = MuseGlimmerTextConfig(**SIZES, num_hidden_layers=8, rope_parameters=rotation)
    return config, [MuseGlimmerTextAttention(config, n) for n in range(8)], config.layer_rope_theta, D


def mimo():
    options = SIZES | {"num_hidden_layers": 6, "v_head_dim": D, "attention_value_scale": 1.0}
    config = MiMoV2FlashConfig(**options)
    # In this class a layer with a window has twice the key heads of a full layer.
    of_windows = MiMoV2FlashConfig(**options | {"num_key_value_heads": HKV // 2})
    configs = {"sliding_attention": of_windows, "full_attention": config}
    layers = [MiMoV2FlashAttention(configs[kind], n) for n, kind in enumerate(config.layer_types)]
    bases = [config.rope_parameters[kind]["rope_theta"] for kind in config.layer_types]
    return config, layers, bases, 6


def granite():
    config = GraniteSWAConfig(**SIZES, num_hidden_layers=8, attention_multiplier=D**-0.5)
    return config, [GraniteSWAAttention(config, n) for n in range(8)], config.layer_rope_theta, D


@torch.no_grad()
@pytest.mark.parametrize("name, theirs", [("muse", muse), ("mimo_v2", mimo), ("granite_swash", granite)])
def test_each_layer_is_theirs_with_our_weights(name, theirs, monkeypatch):
    config, layers, bases, rotated = theirs()
    monkeypatch.setattr(import_module(type(layers[0]).__module__), "torch", Float64())
    model = built(name, f"model.num_layers={len(layers)}")
    placements = model._embed(random_tokens(T), 7, 0, T, None)[1]
    x, i, j = random(2, T, C), torch.arange(T)[:, None], torch.arange(T)
    for n, (layer, base) in enumerate(zip(layers, bases, strict=True)):
        ours, layer = model.blocks[n].attention, layer.double()
        window = WINDOW if config.layer_types[n] == "sliding_attention" else T
        parts = dict(zip("qkv", ours.qkv.weight.split([H * D, HKV * D, HKV * D]), strict=True))
        copy_weights(layer, parts | {"o": ours.out.weight, "gate": ours.kind.output_gate}, ours.kind.sink)
        visible = sliding_window_causal_mask_function(window)(0, 0, i, j)
        mask = torch.zeros(T, T, dtype=torch.float64).masked_fill(~visible, -torch.inf)
        rotation = None
        if base:
            angles = (i + 7) * base ** (-torch.arange(0, rotated, 2).double() / rotated)
            rotation = tuple(torch.cat((half, half), -1)[None] for half in (angles.cos(), angles.sin()))
        expected = layer(x, position_embeddings=rotation, attention_mask=mask)[0]
        assert expected.abs().max() > 0.3
        assert difference(ours(x, placements[n], model.scheme[n]), expected) < 1e-12, n


def copy_weights(layer, matrices, sink):
    """Give a layer of transformers these matrices, {q, k, v, o or gate: weight or None}, and sinks if it has any."""
    for part, weight in matrices.items():
        if weight is not None:
            getattr(layer, f"{part}_proj").weight.copy_(weight)
    assert (sink is None) == (getattr(layer, "sinks", None) is None)
    if sink is not None:
        layer.sinks.copy_(sink)
    # Rows leave out what model.qk_norm adds; the constant factor of queries belongs to it.
    if hasattr(layer, "qk_norm"):
        layer.qk_norm, layer.qk_scale_factor = torch.nn.Identity(), 1.0


def kinds_of_layers(name, count):
    """Return which of `count` layers have linear attention, and which rotate anything."""
    model = built(name, f"model.num_layers={count}")
    linear = [type(block.attention.kind).__name__ == "GatedDeltaRule" for block in model.blocks]
    return linear, [isinstance(scheme, Rotary) for scheme in model.scheme]


def test_the_other_patterns_are_those_of_their_configurations():
    linear, rotates = kinds_of_layers("mistral_large_4", 8)
    assert rotates == [bool(has) for has in MistralLarge4TextConfig(num_hidden_layers=8).no_rope_layers]
    theirs = [kind == "linear_attention" for kind in Glm5NextTextConfig(num_hidden_layers=8).layer_types]
    for name in ("hybrid_kda_mla_nope", "hybrid_kda_mla"):
        linear, rotates = kinds_of_layers(name, 8)
        assert linear == theirs
        assert any(rotates) == (name == "hybrid_kda_mla")


@torch.no_grad()
def test_a_bounded_decay_is_that_of_ling_3(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    model = built("kda", "model.num_kv_heads=6", "+scheme.attention.decay_bound=5")
    kind = first_layer(model, T)[0].kind
    gate = BailingHybridForgetGate(BailingHybridConfig(hidden_size=C, linear_head_dim=D, linear_num_heads=H)).double()
    gate.load_state_dict({"f_proj.weight": kind.W_a @ kind.W_f, "dt_bias": kind.dt_bias, "A_log": kind.A_log})
    x = random(2, T, C)
    expected = gate(x).transpose(1, 2)
    assert expected.min() < -4 and expected.max() > -1
    assert difference(kind._log_decay(x), expected) < 1e-12


def test_a_bound_that_is_no_number_is_refused():
    message = "scheme.attention.decay_bound=-1 must be between 0 and inf"
    refuses(message, built, "kda", "+scheme.attention.decay_bound=-1")
