"""Linear attention and decay: against formulas by hand, in every way that they run, with states of fixed size."""

from dataclasses import replace

import pytest
import torch

from posbench.model.decoder import build_model
from posbench.schemes.alibi import slopes
from posbench.verify import VOCAB, certificate_config, random_tokens, randomise
from tests.rows import built, difference, first_layer, random
from tests.schemes.trials import trial

H, HKV, D, C, T = 6, 2, 16, 48, 150


def mixed(name, q, k, v, offset=0, **options):
    """Return the output of the first layer's kind of attention for these heads."""
    attention, at, scheme = first_layer(built(name), T, offset)
    kind = attention.kind
    for option, value in options.items():
        setattr(kind, option, value)
    x = torch.zeros(len(v), T, C, dtype=torch.float64)
    return kind.mix({"q": q, "k": k, "v": v}, x, scheme, at, None)


def heads():
    return [random(2, heads, T, D, seed=seed) for seed, heads in enumerate((H, HKV, HKV))]


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
    assert difference(mixed(name, q, k, v, offset=5), torch.stack(rows, dim=2)) < 1e-12


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
    assert difference(mixed(name, None, None, v, offset=37, normalise=normalise), expected) < 1e-12


def config_of(kind, scheme, **options):
    return replace(certificate_config("nope"), scheme=trial(scheme, attention={"kind": kind, **options}))


@torch.no_grad()
@pytest.mark.parametrize(
    "config", [config_of("linear", "Rising"), config_of("decay", "Rising", normalise=True)], ids=["linear", "decay"]
)
def test_a_bias_beyond_what_exp_can_hold_overflows_nothing(config):
    model = build_model(config, VOCAB)
    randomise(model)
    assert model(random_tokens()).isfinite().all()


def test_a_difference_of_running_sums_keeps_its_digits_in_long_inputs():
    """Gates near 1/2: after 8,000 tokens the sums are near -5,500, where float32 numbers are 5e-4 apart."""
    model = built("fox").float()
    kind, scheme = model.blocks[0].attention.kind, model.scheme[0]
    x = random(1, 8000, C).float()
    last, keys = torch.tensor(7999), torch.arange(7900, 8000)
    gates = kind._gates(scheme.gate(x, None), scheme, None)
    zero = torch.tensor(0)
    bias = scheme.bias(None, None, gates, None)(zero, zero, last, keys)

    steps = torch.nn.functional.logsigmoid(x.double() @ scheme.w[0].double() + scheme.b[0].double())[0]
    expected = torch.stack([steps[key + 1 :].sum() for key in keys])
    torch.testing.assert_close(bias.double(), expected, rtol=1e-6, atol=1e-6)
