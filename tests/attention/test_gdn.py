"""The gated delta rule: its recurrence, Qwen3-Next's and Kimi Linear's code, and its options."""

import pytest
import torch
from torch.nn import functional as F

from posbench.attention.gdn import delta_rule
from tests.rows import Float64, assert_same_gradients, built, difference, first_layer, random

B, H, HKV, D, E, T = 2, 6, 2, 8, 5, 150


def inputs(*, heads=HKV, decay=1.0, decays=1):
    """Return random q, k, v, `decays` log-decays and strengths in float64, with unit keys, each with a gradient."""
    sizes = ((H, D), (heads, D), (heads, E), (heads, decays), (heads, 1))
    q, k, v, a, b = (random(B, heads, T, width, seed=n) for n, (heads, width) in enumerate(sizes))
    tensors = q, F.normalize(k, dim=-1), v, -decay * F.softplus(a), b.sigmoid()
    return [x.requires_grad_() for x in tensors]


def recurrence(q, k, v, log_decay, strength):
    """Compute the rule token by token, with the state S [E, D] of the paper, for each query head separately."""
    k, v, log_decay, strength = (x.repeat_interleave(H // x.shape[1], 1) for x in (k, v, log_decay, strength))
    state, rows = torch.zeros(B, H, E, D, dtype=torch.float64), []
    for t in range(T):
        key, value = k[:, :, t, :, None], v[:, :, t, :, None]
        a, b = log_decay[:, :, t, None, :].exp(), strength[:, :, t, :, None]
        state = a * state @ (torch.eye(D, dtype=torch.float64) - b * key @ key.mT) + b * value @ key.mT
        rows.append((state @ q[:, :, t, :, None])[..., 0])
    return torch.stack(rows, 2), state


@pytest.mark.parametrize("decays", [1, D], ids=["head", "channel"])
@pytest.mark.parametrize("decay", [0.01, 1.0, 1000.0])
def test_chunks_are_the_recurrence_with_its_gradients(decay, decays):
    tensors = inputs(decay=decay, decays=decays)
    (ours, state), (theirs, last) = delta_rule(*tensors), recurrence(*tensors)
    assert theirs.abs().max() > 0.5 and difference(ours, theirs) < 1e-12
    assert difference(state, last[:, :: H // HKV].mT) < 1e-12
    assert_same_gradients(ours, theirs, tensors, 1e-10, least=0)


def assert_alike(model, layer, weights, length):
    """Compare the first layer's attention with another library's, which gets our weights by its names."""
    layer.load_state_dict(weights, strict=True)
    x, (ours, at, scheme) = random(B, length, model.config.d_model), first_layer(model, length)
    expected = layer(x)
    assert expected.dtype == torch.float64 and expected.abs().max() > 1
    assert difference(ours(x, at, scheme), expected) < 1e-12


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 64, 150])
def test_a_layer_is_qwen3_nexts_with_its_weights(length, monkeypatch):
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    monkeypatch.setattr(qwen, "torch", Float64())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    model = built("gdn", "model.num_kv_heads=6")  # their class has one key head per query head
    ours, C, D = model.blocks[0].attention, model.config.d_model, model.config.head_width
    sizes = {"key_head_dim": D, "value_head_dim": D, "num_key_heads": H, "num_value_heads": H, "conv_kernel_dim": 4}
    config = qwen.Qwen3NextConfig(
        hidden_size=C, num_hidden_layers=1, layer_types=["linear_attention"], rms_norm_eps=1e-6,
        **{f"linear_{name}": size for name, size in sizes.items()},
    )  # fmt: skip
    layer = qwen.Qwen3NextGatedDeltaNet(config, 0).double()
    kind, q_k_v = ours.kind, ours.qkv.weight.view(3, H, D, C)
    taps = [getattr(kind, f"{part}_taps").flatten(0, 2) for part in "qkv"]
    theirs = {
        "in_proj_qkvz.weight": torch.cat((q_k_v, kind.W_z.view(1, H, D, C))).transpose(0, 1).reshape(-1, C),
        "in_proj_ba.weight": torch.stack((kind.W_b, kind.W_a), 1).reshape(-1, C),
        "conv1d.weight": torch.cat(taps).flip(-1)[:, None],  # theirs ends with the current token
        "out_proj.weight": ours.out.weight,
        "norm.weight": kind.norm_weight,
        "A_log": kind.A_log,
        "dt_bias": kind.dt_bias,
    }
    assert_alike(model, layer, theirs, length)


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 64, 150])
def test_a_layer_is_kimi_linears_with_its_weights(length, monkeypatch):
    kimi = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    monkeypatch.setattr(kimi, "torch", Float64())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    model = built("kda", "model.num_kv_heads=6", "model.head_dim=8")  # H D is C, the rank of their two matrices
    ours, C, D = model.blocks[0].attention, model.config.d_model, model.config.head_width
    config = kimi.KimiLinearConfig(
        hidden_size=C, num_hidden_layers=1, num_attention_heads=H, num_key_value_heads=H, linear_num_heads=H,
        linear_head_dim=D, linear_conv_kernel_dim=4, layer_types=["linear_attention"], rms_norm_eps=1e-6,
    )  # fmt: skip
    layer = kimi.KimiLinearDeltaAttention(config, 0).double()
    layer.g_a_proj, layer.g_b_proj = torch.nn.Linear(C, H * D, bias=False).double(), torch.nn.Identity()
    kind, q_k_v = ours.kind, ours.qkv.weight.view(3, H * D, C)
    theirs = {
        **{f"{part}_proj.weight": weight for part, weight in zip("qkv", q_k_v, strict=True)},
        "conv1d.weight": torch.cat([getattr(kind, f"{part}_taps").flatten(0, 2) for part in "qkv"]).flip(-1)[:, None],
        "forget_gate.f_a_proj.weight": kind.W_f,
        "forget_gate.f_b_proj.weight": kind.W_a,
        "forget_gate.dt_bias": kind.dt_bias,
        "forget_gate.A_log": kind.A_log.view(1, 1, H, 1),
        "b_proj.weight": kind.W_b,
        "g_a_proj.weight": kind.W_z,
        "o_norm.weight": kind.norm_weight,
        "o_proj.weight": ours.out.weight,
    }
    assert_alike(model, layer, theirs, length)


@torch.no_grad()
def test_rotated_queries_and_keys_are_those_of_transformers_in_its_recurrence(monkeypatch):
    """Rotate before the division by lengths, as HypeNet's code does (thunlp/hybrid-linear-attention, gdn.py)."""
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    monkeypatch.setattr(qwen, "torch", Float64())
    words = ["+scheme.attention.convolution=0", "+scheme.attention.output_gate=false"]
    model = built("gdn", "scheme.kind=rotary", "+scheme.sites=[q,k]", "model.num_kv_heads=6", *words)
    width, (ours, at, scheme) = model.config.head_width, first_layer(model, T, 5)
    x = random(B, T, model.config.d_model)
    q, k, v = F.silu(ours.qkv(x)).view(B, T, 3, H, width).transpose(1, 3).unbind(2)  # [B, H, T, D]
    angles = torch.arange(5, T + 5)[:, None] * 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    cos, sin = (torch.cat((part, part), -1)[None] for part in (angles.cos(), angles.sin()))
    q, k = qwen.apply_rotary_pos_emb(q, k, cos, sin)
    kind = ours.kind
    g, beta = -kind.A_log.exp() * F.softplus(x @ kind.W_a.T + kind.dt_bias), (x @ kind.W_b.T).sigmoid()
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    o, _ = qwen.torch_recurrent_gated_delta_rule(q, k, v, g, beta, None, False, use_qk_l2norm_in_kernel=True)
    expected = ours.out(F.rms_norm(o, (width,), kind.norm_weight, 1e-6).flatten(2))
    assert expected.abs().max() > 1
    assert difference(ours(x, at, scheme), expected) < 1e-11
