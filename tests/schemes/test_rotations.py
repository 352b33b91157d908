"""`rotate` is a rotation, its angles are right a million tokens out, and frequencies are what their definitions say."""

import math

import mpmath
import pytest
import torch

from posbench.config import SchemeConfig
from posbench.model.decoder import build_model
from posbench.schemes import Shape, build_scheme
from posbench.schemes.rescaling import RESCALINGS
from posbench.schemes.rotary import Rotary, inverse_frequencies
from posbench.verify import VOCAB, certificate_config, certify, random_tokens

L = 512  # tokens of training


def scheme_of(kind="rotary", head_dim=64, context_length=L, attention="softmax", **options):
    shape = Shape(4 * head_dim, 4, 2, head_dim, context_length=context_length)
    config = SchemeConfig("mine", kind, {"sites": ["q", "k"], **options}, {"kind": attention})
    return build_scheme(config, shape)[0]


@pytest.mark.parametrize("base", [10000.0, 1e6])
@pytest.mark.parametrize("head_dim", [2, 16, 128])
def test_angles_are_exact_to_a_millionth_of_a_radian_up_to_position_2_to_the_20(head_dim, base):
    pos = torch.tensor([0, 1, 255, 257, 65537, 2**20 - 1, 2**20])
    scheme = scheme_of(head_dim=head_dim, base=base)
    angles, (cos, sin) = scheme.angles(pos, 1), scheme.prepare(pos, 1)
    with mpmath.workdps(40):
        for row, p in enumerate(pos.tolist()):
            for t in range(head_dim // 2):
                exact = p * mpmath.power(mpmath.mpf(base), mpmath.mpf(-2 * t) / head_dim)
                assert abs(angles[row, t].item() - exact) < 1e-6
                assert abs(cos.float()[row, t].item() - mpmath.cos(exact)) < 1e-6
                assert abs(sin.float()[row, t].item() - mpmath.sin(exact)) < 1e-6


@pytest.mark.parametrize("length, slow", [(L, 16), (6200, 8), (60_000, 0), (40_000, 1)])
def test_clipped_frequencies_are_their_authors(length, slow):
    geometric = inverse_frequencies(64, 10000.0)
    clip = int((2 * math.pi / geometric > length).sum())
    mask = 0.5 * (1.0 + torch.cos(torch.linspace(0.0, torch.pi, steps=clip, dtype=torch.float64)))  # hrlics/CoPE
    theirs = torch.cat((geometric[: 32 - clip], geometric[32 - clip :] * mask))
    assert clip == slow
    assert torch.allclose(scheme_of("clipped", context_length=length).frequencies(), theirs, rtol=0, atol=1e-16)


def test_the_base_may_be_the_training_length_also_where_it_is_one_of_several():
    row = certificate_config("qk_rope_context", ["train.context_length=333"])
    assert build_model(row, VOCAB).scheme[0].base == 333.0
    several = certificate_config("rope_nope_interleaved", ["scheme.layers=[qk_rope_context,nope]"])
    assert build_model(several, VOCAB).scheme[0].base == 128.0


@pytest.mark.parametrize("name", ["qk_rope_learned", "qk_rope_learned_base"])
def test_learned_frequencies_begin_as_the_geometric_schedule(name):
    model, plain = (build_model(certificate_config(row), VOCAB).double() for row in (name, "qk_rope"))
    assert torch.equal(model(random_tokens()), plain(random_tokens()))


def test_xpos_stays_in_float32_up_to_its_longest_window_and_not_much_further():
    scheme = build_scheme(SchemeConfig("x", "xpos"), Shape(64, 1, 1, 64))[0]
    T = scheme.longest
    assert T == 30594
    q, k = torch.randn(2, 1, 1, T, 64, generator=torch.Generator().manual_seed(0))
    by_q, by_k = (type(factors)(*(x.float() for x in factors)) for factors in scheme.prepare(torch.arange(T), T))
    ends = scheme.q(q, (by_q, by_k))[0, 0, [0, T - 1]], scheme.k(k, (by_q, by_k))[0, 0, [0, T - 1]]
    assert (ends[0] @ ends[1].T).isfinite().all()  # also the key that comes after its query, which is masked only then
    twice = scheme.prepare(torch.arange(0, 3 * T, 3 * T - 1), 3 * T)
    assert not all(x.float().isfinite().all() for factors in twice for x in factors)


def inv_freq(scheme, length):
    return scheme.angles(torch.ones(1), length)[0]


@pytest.mark.parametrize("name", RESCALINGS)
def test_a_learned_base_is_rescaled_as_a_fixed_one_of_its_value(name):
    learned, fixed = scheme_of("learned_base", rescale=name), scheme_of(base=5e5, rescale=name)
    learned.log_scale.data.fill_(math.log(5e5 / 10000.0))
    assert torch.allclose(inv_freq(learned, 4 * L), inv_freq(fixed, 4 * L), rtol=1e-6, atol=0)


def hooks(scheme, length):
    """Return the output of each hook for a vector of ones at position 700."""
    x = torch.ones(1, 4, 1, 64, dtype=torch.float64)
    pos = scheme.prepare(torch.tensor([700]), length)
    return {site: getattr(scheme, site)(x, pos) for site in "qkvo"}


@pytest.mark.slow
@pytest.mark.parametrize("name", RESCALINGS)
@pytest.mark.parametrize("row", ["qkvo_rope"])
def test_certificates_hold_under_every_rescaling(row, name):
    words = ["model.num_layers=1", f"scheme.rescale={name}"] + (["scheme.factor=4"] if name != "dynamic_ntk" else [])
    certificate = certify(certificate_config(row, words))
    assert certificate.holds and certificate.defined and certificate.measured == "relative"
    assert certificate.is_streaming == (name != "dynamic_ntk")


def test_a_window_that_decides_its_own_factor_must_not_be_said_to_stream(monkeypatch):
    monkeypatch.setattr(Rotary, "is_streaming", True)
    certificate = certify(certificate_config("qk_rope", ["model.num_layers=1", "scheme.rescale=dynamic_ntk"]))
    assert not certificate["future"].holds
