"""Frequencies of a rotation, held to transformers where it has them, and to loops by distances where it has not."""

import copy
import math

import pytest
import torch
from transformers import GPTNeoXConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gpt_neox import modeling_gpt_neox

from posbench.composition import choices, compose
from posbench.config import ConfigError, SchemeConfig
from posbench.model import build_model
from posbench.schemes import Shape, build_scheme
from posbench.schemes.rotary import inverse_frequencies
from posbench.verify import MODEL, VOCAB, certificate_config, random_tokens, randomise

SHAPE = Shape(d_model=256, num_heads=4, num_kv_heads=2, head_dim=64, num_layers=2, context_length=1024)


class Float64:
    """torch, with float64 under the name of float32: transformers computes frequencies in float32 by name."""

    float32 = float = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


def scheme_of(kind, shape=SHAPE, **options):
    return build_scheme(SchemeConfig("mine", kind, options), shape)


def heads(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("fraction", [0.25, 0.5, 0.75, 1.0])
def test_a_partial_rotation_is_gpt_neoxs(fraction, monkeypatch):
    monkeypatch.setattr(modeling_gpt_neox, "torch", Float64())
    parameters = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": fraction}
    config = GPTNeoXConfig(hidden_size=256, num_attention_heads=4, rope_parameters=parameters)
    scheme = scheme_of("partial_rotary", sites=["q", "k"], fraction=fraction)
    inv_freq, _ = modeling_gpt_neox.GPTNeoXRotaryEmbedding.compute_default_rope_parameters(config)
    assert inv_freq.dtype == torch.float64 and torch.allclose(scheme.frequencies(), inv_freq, rtol=1e-14, atol=0)
    q, k, positions = heads(2, 4, 300, 64), heads(2, 2, 300, 64, seed=1), torch.arange(7, 307)
    angles = (positions[:, None] * inv_freq).repeat(1, 2)[None]
    theirs = modeling_gpt_neox.apply_rotary_pos_emb(q, k, angles.cos(), angles.sin())
    pos = scheme.prepare(positions, 300)
    for ours, their in zip((scheme.q(q, pos), scheme.k(k, pos)), theirs, strict=True):
        assert (ours - their).abs().max() < 1e-12
    assert torch.equal(scheme.q(q, pos)[..., scheme.width :], q[..., scheme.width :])


@pytest.mark.parametrize("fraction", [0.0, 0.25, 0.3, 0.75, 1.0])
def test_a_proportional_rotation_is_transformers(fraction, monkeypatch):
    compute = ROPE_INIT_FUNCTIONS["proportional"]
    monkeypatch.setitem(compute.__globals__, "torch", Float64())
    parameters = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": fraction}
    config = LlamaConfig(hidden_size=256, num_attention_heads=4, head_dim=64, rope_parameters=parameters)
    theirs, _ = compute(config)
    ours = scheme_of("p_rope", sites=["q", "k"], fraction=fraction, base=1e6).frequencies()
    assert ours.shape == (32,) and (ours != 0).sum() == math.floor(fraction * 32)
    assert torch.allclose(ours, theirs.double(), rtol=1e-14, atol=0)


def test_the_three_partial_rotations_agree_at_position_0_and_part_with_distance():
    options = {"sites": ["q", "k"]}
    kinds = [("partial_rotary", {"fraction": 0.25}), ("p_rope", {"fraction": 0.25}), ("hope", {})]
    schemes = [scheme_of(kind, **options, **more) for kind, more in kinds]
    x = heads(1, 4, 1, 64)
    near, far = ([s.q(x, s.prepare(torch.tensor([p]), 1024)) for s in schemes] for p in (0, 700))
    assert all(torch.equal(near[0], each) for each in near[1:])
    assert all((far[a] - far[b]).abs().max() > 0.1 for a, b in ((0, 1), (0, 2), (1, 2)))


def test_hope_keeps_what_comes_round_within_the_training_length():
    w = scheme_of("hope", sites=["q", "k"]).frequencies()
    whole = inverse_frequencies(64, 10000.0)
    for t in range(32):
        assert w[t] == (whole[t] if 2 * math.pi / whole[t] <= 1024 else 0)
    assert w[0] == 1 and w[-1] == 0
    longer = Shape(256, 4, 2, 64, context_length=1 << 20)
    assert torch.equal(scheme_of("hope", longer, sites=["q"]).frequencies(), whole)


def test_the_base_may_be_the_training_length_also_where_it_is_one_of_several():
    row = certificate_config("qk_rope_context", ["train.context_length=333"])
    assert build_model(row, VOCAB).scheme.base == 333.0
    several = compose(["scheme=rope_nope_interleaved", *MODEL, "scheme.layers=[qk_rope_context,nope]"])
    assert build_model(several, VOCAB).schemes[0].base == 128.0


@pytest.mark.parametrize("name", ["qk_rope_learned", "qk_rope_learned_base"])
def test_learned_frequencies_begin_as_the_geometric_schedule_and_have_the_gradient_of_differences(name):
    config = certificate_config(name)
    model = build_model(config, VOCAB).double()
    plain = build_model(certificate_config("qk_rope"), VOCAB).double()
    tokens = random_tokens()
    with torch.no_grad():
        assert torch.equal(model(tokens), plain(tokens))
    randomise(model)
    model = model.double()
    (parameter,) = model.scheme.parameters()  # of all layers and heads
    loss = model.loss(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    step = 1e-6
    for n in range(len(parameter)):
        moved = []
        for sign in (1, -1):
            other = copy.deepcopy(model)
            with torch.no_grad():
                next(other.scheme.parameters())[n] += sign * step
                moved.append(other.loss(tokens[:, :-1], tokens[:, 1:]).item())
        slope = (moved[0] - moved[1]) / (2 * step)
        assert abs(parameter.grad[n].item() - slope) < 1e-6 * max(1, abs(slope))
    assert parameter.grad.abs().max() > 1e-4


def softmax_logit(scheme, q, k, i, j):
    """`q_i . k_j / sqrt(D)` behind the hooks, one head and one sequence."""
    T = len(q)
    pos = scheme.prepare(torch.arange(T), T)
    rows = scheme.q(q[None, None], pos)[0, 0], scheme.k(k[None, None], pos)[0, 0]
    return float(rows[0][i] @ rows[1][j]) / math.sqrt(q.shape[1])


def test_xpos_is_the_loop_over_differences():
    D, T = 16, 900
    scheme = build_scheme(SchemeConfig("x", "xpos"), Shape(D, 1, 1, D, context_length=T))
    q, k = heads(T, D), heads(T, D, seed=1)
    for i, j in ((0, 0), (5, 3), (899, 0), (700, 13), (899, 898)):
        d, total = i - j, 0.0
        for t in range(D // 2):
            zeta, angle = (t / (D / 2) + 0.4) / 1.4, d * 10000.0 ** (-2 * t / D)
            (a, b), (c, e) = ((float(x[n, t]), float(x[n, t + D // 2])) for x, n in ((q, i), (k, j)))
            total += zeta ** (d / 512) * ((a * c + b * e) * math.cos(angle) + (a * e - b * c) * math.sin(angle))
        assert abs(softmax_logit(scheme, q, k, i, j) - total / math.sqrt(D)) < 1e-12


def test_xpos_stays_in_float32_up_to_its_longest_window_and_not_much_further():
    scheme = build_scheme(SchemeConfig("x", "xpos"), Shape(64, 1, 1, 64))
    T = scheme.longest
    assert T == 30594
    q, k = (heads(1, 1, T, 64, seed=n).float() for n in (0, 1))
    by_q, by_k = (type(by)(*(x.float() for x in by)) for by in scheme.prepare(torch.arange(T), T))
    ends = scheme.q(q, (by_q, by_k))[0, 0, [0, T - 1]], scheme.k(k, (by_q, by_k))[0, 0, [0, T - 1]]
    assert (ends[0] @ ends[1].T).isfinite().all()  # also the key that comes after its query, which is masked only then
    twice = scheme.prepare(torch.arange(0, 3 * T, 3 * T - 1), 3 * T)
    assert not all(x.float().isfinite().all() for by in twice for x in by)


def test_pope_is_the_loop_over_differences():
    D, T = 8, 600
    scheme = build_scheme(SchemeConfig("p", "pope"), Shape(2 * D, 2, 1, D, num_layers=3))
    layer = scheme.layer(1)
    assert all(not member.delta.any() for member in scheme.layers) and layer is scheme.layers[1]
    layer.delta.data = heads(2, D, seed=3)
    q, k = heads(1, 2, T, D), heads(1, 1, T, D, seed=1)
    pos = layer.prepare(torch.arange(T), T)
    ours = (layer.q(q, pos)[0] @ layer.k(k, pos)[0].mT).detach()
    for h, i, j in ((0, 0, 0), (1, 5, 3), (1, 599, 0), (0, 300, 13)):
        total = sum(
            math.log1p(math.exp(float(q[0, h, i, c])))
            * math.log1p(math.exp(float(k[0, 0, j, c])))
            * math.cos((i - j) * 10000.0 ** (-c / D) + float(layer.delta.detach()[h, c]))
            for c in range(D)
        )
        assert abs(float(ours[h, i, j]) - total) < 1e-12


def test_every_row_is_what_the_specification_names():
    bases = [certificate_config(f"qk_rope_{name}").scheme.options["base"] for name in ("500k", "1m", "context")]
    assert bases == [5e5, 1e6, "context_length"]
    assert certificate_config("rotary_pct_25").scheme.options["fraction"] == 0.25
    assert [certificate_config(f"p_rope_{n}").scheme.options["fraction"] for n in (75, 25)] == [0.75, 0.25]
    turns = [type(s).__name__ for s in build_model(certificate_config("rope_nope_interleaved"), VOCAB).schemes]
    assert turns == ["Rotary", "Rotary", "Rotary", "Scheme"]
    assert {"hope", "xpos", "pope", "qk_rope_learned", "qk_rope_learned_base"} <= set(choices("scheme"))


REFUSED = [
    ("partial_rotary", {"sites": ["q"], "fraction": 0.3}, "scheme.fraction=0.3 of model.head_dim=64 is 19.2 channels"),
    ("partial_rotary", {"sites": ["q"], "fraction": 2}, "scheme.fraction=2 must lie between 0 and 1"),
    ("p_rope", {"sites": ["q"], "fraction": -0.1}, "scheme.fraction=-0.1 must lie between 0 and 1"),
    ("rotary", {"sites": ["q"], "base": "context"}, "scheme.base=context must lie above 1"),
    ("xpos", {"span": 0}, "scheme.span=0 must lie above 0"),
    ("pope", {"base": 1}, "scheme.base=1 must lie above 1"),
]


@pytest.mark.parametrize("kind, options, says", REFUSED, ids=lambda part: str(part)[:30])
def test_refused(kind, options, says):
    with pytest.raises(ConfigError) as refusal:
        scheme_of(kind, **options)
    assert says in str(refusal.value)
