"""Inkling's profiles, with and without its convolutions, held to transformers' class; what its options mean."""

from dataclasses import replace

import pytest
import torch
from transformers.models.inkling import modeling_inkling
from transformers.models.inkling.configuration_inkling import InklingTextConfig

from posbench.config import SchemeConfig
from posbench.schemes import Shape, build_scheme
from tests.rows import Float64, built, causal_mask, difference, first_layer, random

H, HKV, D, C, EXTENT, T = 6, 2, 16, 48, 24, 60
SHAPE = Shape(C, H, HKV, D, context_length=128)


def inkling(attention, scheme):
    """Return transformers' attention layer, with the weights of ours."""
    config = InklingTextConfig(
        hidden_size=C,
        num_attention_heads=H,
        num_key_value_heads=HKV,
        head_dim=D,
        num_hidden_layers=1,
        rel_extent=EXTENT,
        layer_types=["hybrid"],
        attn_implementation="eager",
    )
    theirs = modeling_inkling.InklingAttention(config, layer_idx=0).double()
    parts = attention.qkv.weight.split([H * D, HKV * D, HKV * D])
    weights = {f"{part}_proj.weight": weight for part, weight in zip("qkv", parts, strict=True)}
    weights |= {"o_proj.weight": attention.out.weight, "r_proj.weight": scheme.W, "rel_logits_proj.proj": scheme.P}
    weights |= {"q_norm.weight": scheme.q_weight, "k_norm.weight": scheme.k_weight}
    for site in "kv":
        convolution = getattr(scheme, f"{site}_convolution", torch.zeros(HKV, 1, D, 4))
        weights[f"{site}_sconv.conv1d.weight"] = convolution.flatten(0, 2).flip(-1)[:, None]  # torch's last tap is x_t
    theirs.load_state_dict(weights)
    return theirs


@pytest.mark.parametrize("name", ["inkling", "inkling_conv"])
def test_inkling_is_its_authors_class_with_its_gradients(name, monkeypatch):
    monkeypatch.setattr(modeling_inkling, "torch", Float64())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    attention, at, scheme = first_layer(built(name, f"scheme.extent={EXTENT}"), T, 7)
    theirs = inkling(attention, scheme)
    x, weight = random(2, 2, T, C)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = attention(inputs[0], at, scheme), theirs(inputs[1], causal_mask(T))[0]
    assert outputs[1].abs().max() > 0.5 and difference(outputs[0], outputs[1]) < 1e-12
    for output in outputs:
        (output * weight).sum().backward()
    pairs = [(inputs[0].grad, inputs[1].grad), (scheme.W.grad, theirs.r_proj.weight.grad)]
    pairs += [(scheme.P.grad, theirs.rel_logits_proj.proj.grad), (scheme.q_weight.grad, theirs.q_norm.weight.grad)]
    if name == "inkling_conv":
        gradient = theirs.k_sconv.conv1d.weight.grad[:, 0].flip(-1).view(HKV, 1, D, 4)
        pairs.append((scheme.k_convolution.grad, gradient))
    assert all(theirs.abs().max() > 1e-3 and difference(ours, theirs) < 1e-11 for ours, theirs in pairs)


def test_an_extent_beyond_the_training_context_is_reduced_to_it():
    """Profiles of distances that training never shows would stay random."""
    for context, extent, columns in ((128, 1024, 128), (2048, 1024, 1024), (128, 16, 16)):
        shape = replace(SHAPE, context_length=context)
        [scheme] = build_scheme(SchemeConfig("mine", "inkling", {"extent": extent}), shape)
        assert scheme.P.shape == (16, columns)
