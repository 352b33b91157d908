"""The output gate of softmax attention, held to transformers' AFMoE."""

import pytest
import torch
from transformers.models.afmoe.configuration_afmoe import AfmoeConfig
from transformers.models.afmoe.modeling_afmoe import AfmoeAttention

from tests.rows import built, causal_mask, difference, first_layer, random

D, H, HKV, C = 16, 6, 2, 48
ROWS = {"head": H, "channel": H * D}  # of the gate's matrix


@pytest.mark.parametrize("gate", ROWS)
def test_the_output_gate_is_that_of_afmoe_with_its_gradients(gate):
    T = 40
    attention, at, scheme = first_layer(built("nope", f"scheme.attention.output_gate={gate}"), T)
    sizes = {"hidden_size": C, "num_attention_heads": H, "num_key_value_heads": HKV, "head_dim": D}
    config = AfmoeConfig(
        **sizes, num_hidden_layers=1, num_dense_layers=1, layer_types=["full_attention"], attn_implementation="sdpa"
    )
    theirs = AfmoeAttention(config, layer_idx=0).double()
    theirs.q_norm, theirs.k_norm = torch.nn.Identity(), torch.nn.Identity()
    parts = attention.qkv.weight.split([H * D, HKV * D, HKV * D])
    for part, weight in zip("qkv", parts, strict=True):
        getattr(theirs, f"{part}_proj").weight.data = weight.data
    theirs.o_proj.weight.data = attention.out.weight.data
    matrix = attention.kind.output_gate
    theirs.gate_proj.weight.data = matrix.data.repeat_interleave(H * D // ROWS[gate], 0)
    x, weight = random(2, 2, T, C)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = attention(inputs[0], at, scheme), theirs(inputs[1], (None, None), causal_mask(T))[0]
    assert outputs[1].abs().max() > 0.5 and difference(outputs[0], outputs[1]) < 1e-12
    ours, expected = (
        torch.autograd.grad((y * weight).sum(), [leaf, gates])
        for y, leaf, gates in zip(outputs, inputs, (matrix, theirs.gate_proj.weight), strict=True)
    )
    assert difference(ours[0], expected[0]) < 1e-12
    assert difference(ours[1], expected[1].unflatten(0, (ROWS[gate], -1)).sum(1)) < 1e-12
