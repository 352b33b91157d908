"""Sinks, held to transformers' gpt-oss, and to every kernel."""

import pytest
import torch
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention

from posbench.config import ConfigError
from posbench.model import build_model, checked_scheme
from posbench.training.optimizer import decayed_parameters
from posbench.verify import VOCAB, certificate_config, random_tokens, randomise

D, H, HKV, C = 16, 6, 2, 48


def built(name):
    model = build_model(certificate_config(name), VOCAB)
    randomise(model)
    return model.double()


def gpt_oss(attention):
    """Their attention with our weights."""
    sizes = {"hidden_size": C, "num_attention_heads": H, "num_key_value_heads": HKV, "head_dim": D}
    config = GptOssConfig(**sizes, num_hidden_layers=1, attention_bias=False, attn_implementation="eager")
    theirs = GptOssAttention(config, layer_idx=0).double()
    parts = attention.qkv.weight.split([H * D, HKV * D, HKV * D])
    weights = {f"{part}_proj.weight": weight for part, weight in zip("qkv", parts, strict=True)}
    theirs.load_state_dict(weights | {"o_proj.weight": attention.out.weight, "sinks": attention.kind.sink})
    return theirs


@pytest.mark.parametrize("kernel", ["usual", "without a gradient", "blocks", "masked"])
def test_sinks_are_those_of_gpt_oss(kernel):
    """Outputs, and gradients by the stream and by the sinks, which the kernels that have one compute."""
    model, T = built("sink_qk_rope"), 150
    attention, (_, (at, *_)) = model.blocks[0].attention, model._embedded(random_tokens(T), 7, 0, T, None)
    theirs = gpt_oss(attention)
    attention.kind.kernel = attention.kind.kernels([model.scheme[0]], True, torch.device("cpu")).get(kernel)
    x, weight = torch.randn(2, 2, T, C, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    leaves = [[x.clone().requires_grad_(), sink] for sink in (attention.kind.sink, theirs.sinks)]
    causal = torch.full((T, T), -torch.inf, dtype=torch.float64).triu(1)
    with torch.set_grad_enabled(kernel != "without a gradient"):
        ours = attention(leaves[0][0], at, model.scheme[0])
        expected = theirs(leaves[1][0], tuple(half[None] for half in at.pos), causal)[0]
        assert expected.abs().max() > 0.5 and (ours - expected).abs().max() < 1e-12
        if ours.requires_grad:
            pairs = zip((ours, expected), leaves, strict=True)
            for one, other in zip(*(torch.autograd.grad((o * weight).sum(), of) for o, of in pairs), strict=True):
                assert other.abs().max() > 0.1 and (one - other).abs().max() < 1e-11


def test_a_sink_begins_at_zero_and_is_not_decayed_and_other_weights_are_as_without():
    sink, plain = (build_model(certificate_config(name), VOCAB) for name in ("sink_qk_rope", "qk_rope"))
    more = {name for name, _ in sink.named_parameters()} - {name for name, _ in plain.named_parameters()}
    assert more == {f"blocks.{n}.attention.kind.sink" for n in range(2)} and not more & decayed_parameters(sink)
    weights = sink.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in plain.state_dict().items())
    assert not any(weights[name].any() for name in more)
    with pytest.raises(ConfigError, match=r"attention\.sink=2 must be true or false"):
        config = certificate_config("sink_nope")
        config.scheme.attention = {"kind": "softmax", "sink": 2}
        checked_scheme(config)
