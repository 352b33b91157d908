"""Linear attention and decay: against formulas by hand, in every way that they run, with states of fixed size."""

from dataclasses import replace

import pytest
import torch

from posbench import reference
from posbench.attention.linear import features
from posbench.model.architecture import build_architecture
from posbench.model.decoder import build_model
from posbench.schemes.alibi import slopes
from posbench.verify import VOCAB, certificate_config, certify, random_tokens, randomise
from tests.schemes.trials import trial

ROWS = ["linear_nope", "linear_qk_rope", "linear_alibi", "decay", "decay_vo_rope"]
H, HKV, D, C, T = 6, 2, 16, 48, 150


def built(name, *words):
    model = build_model(certificate_config(name, words), VOCAB)
    randomise(model)
    return model


def mixed(name, q, k, v, offset=0, **options):
    """Return the output of the first layer's kind of attention for these heads."""
    model = built(name).double()
    kind, at = model.blocks[0].attention.kind, model._embed(random_tokens(T), offset, 0, T, None)[1][0]
    for option, value in options.items():
        setattr(kind, option, value)
    x = torch.zeros(len(v), T, C, dtype=torch.float64)
    return kind.mix(q, k, v, x, model.scheme[0], at, None)


def heads(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, n, T, D, generator=generator, dtype=torch.float64) for n in (H, HKV, HKV)]


def complex_pairs(x):
    """Return channels (t, t + D/2) as complex numbers, [..., D/2]."""
    return torch.complex(*x.chunk(2, dim=-1))


def frequencies():
    return 10000.0 ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)


@pytest.mark.parametrize("name", ["linear_nope", "linear_qk_rope", "linear_alibi"])
def test_linear_attention_equals_a_recurrence_step_by_step(name):
    q, k, v = heads()
    rows, state, total = [], 0.0, 0.0
    gamma = torch.exp(-slopes(H))[:, None] if name == "linear_alibi" else torch.ones(H, 1, dtype=torch.float64)
    angle = frequencies() if name == "linear_qk_rope" else torch.zeros(D // 2, dtype=torch.float64)
    for t in range(T):
        q_t, k_t = (torch.nn.functional.elu(x[:, :, t]) + 1 for x in (q, k.repeat_interleave(H // HKV, 1)))
        turned_q, turned_k = (complex_pairs(x) * torch.exp(1j * angle * (t + 5)) for x in (q_t, k_t))
        v_t = v.repeat_interleave(H // HKV, 1)[:, :, t]
        state = gamma[..., None] * state + turned_k[..., :, None] * v_t[..., None, :]
        total = gamma * total + k_t
        numerator = (turned_q.conj()[..., :, None] * state).sum(-2).real
        rows.append(numerator / (q_t * total).sum(-1, keepdim=True))
    assert (mixed(name, q, k, v, offset=5) - torch.stack(rows, dim=2)).abs().max() < 1e-12


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("name", ["decay", "decay_vo_rope"])
def test_decay_equals_a_complex_recurrence_step_by_step(name, normalise):
    """`o_i = gamma exp(-1j theta) o_(i-1) + v_i` on pairs as complex numbers (kexue.fm/archives/10862)."""
    v = heads()[2]
    theta = frequencies() if name == "decay_vo_rope" else torch.zeros(D // 2, dtype=torch.float64)
    gamma = torch.exp(-slopes(H))[:, None]
    pairs = complex_pairs(v).repeat_interleave(H // HKV, 1)  # [B, H, T, D/2]
    o, weight, rows = 0.0, 0.0, []
    for t in range(T):
        o = gamma * torch.exp(-1j * theta) * o + pairs[:, :, t]
        weight = gamma * weight + 1
        rows.append(o / weight if normalise else o)
    o = torch.stack(rows, dim=2)
    expected = torch.cat((o.real, o.imag), dim=-1)
    assert (mixed(name, None, None, v, offset=37, normalise=normalise) - expected).abs().max() < 1e-12


def test_there_are_no_queries_and_keys_without_content():
    model, plain = built("decay"), built("nope")
    attention = model.blocks[0].attention
    assert attention.rows() == {"v": HKV * D} and attention.qkv.weight.shape == (HKV * D, C)
    lost = sum(p.numel() for p in plain.parameters()) - sum(p.numel() for p in model.parameters())
    assert lost == 2 * (H + HKV) * D * C


@torch.no_grad()
@pytest.mark.parametrize("name", ROWS)
def test_the_state_does_not_grow(name):
    model = built(name)
    sizes = set()
    for length in (70, 140):
        caches = model.caches(length)
        for begin in range(0, length, 35):
            model.hidden(random_tokens(length)[:, begin : begin + 35], 0, caches)
        sizes.add(caches[0].num_bytes)
    assert sizes == {H * D * 4 if name.startswith("decay") else H * D * (D + 1) * 4}


def test_features_are_positive_and_their_gradient_finite_where_a_sum_with_elu_is_not():
    small = torch.tensor([-8.5, -20.0, -60.0], dtype=torch.bfloat16)
    assert not (torch.nn.functional.elu(small) + 1).any() and (features(small) > 0).all()
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.tensor([-200.0, -1.0, 0.0, 1.0, 200.0, 1e4], dtype=dtype, requires_grad=True)
        features(x).float().sum().backward()
        assert x.grad.isfinite().all() and x.grad[2:].tolist() == [1, 1, 1, 1]
    exact = torch.linspace(-20, 20, 401, dtype=torch.float64)
    assert torch.allclose(features(exact), torch.nn.functional.elu(exact) + 1, rtol=0, atol=1e-15)


def config_of(kind, scheme, **options):
    return replace(certificate_config("nope"), scheme=trial(scheme, attention={"kind": kind, **options}))


@pytest.mark.parametrize("kind, options", [("linear", {}), ("decay", {}), ("decay", {"normalise": True})])
def test_a_bias_that_cannot_be_split_runs_quadratic_and_is_certified(kind, options, monkeypatch):
    config = config_of(kind, "Gentle", **options)
    monkeypatch.setattr("posbench.verify.random_model.LENGTH", 80)
    monkeypatch.setitem(reference.definitions(), config.scheme.kind, DefinedGentle)
    certificate = certify(config)
    failed = {check.name: f"{check} {check.where}" for check in certificate.checks if not check.holds}
    assert failed == {} and certificate.defined and certificate.measured == "relative"
    built = build_architecture(config)
    assert "chunks" not in built.kinds[0].kernels(list(built.scheme), True, None)


class DefinedGentle(reference.Definition):
    def bias(self, h, t, s, rows):
        return -0.3 * rows.distance(t, s) ** 0.5


@torch.no_grad()
@pytest.mark.parametrize(
    "config", [config_of("linear", "Rising"), config_of("decay", "Rising", normalise=True)], ids=["linear", "decay"]
)
def test_a_bias_beyond_what_exp_can_hold_overflows_nothing(config):
    model = build_model(config, VOCAB)
    randomise(model)
    assert model(random_tokens()).isfinite().all()
