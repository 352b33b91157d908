"""Frequencies at evaluation: transformers' numbers, the definition's, and what the seed says of the factor."""

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from posbench.config import ConfigError, SchemeConfig
from posbench.reference.rescaling import rescaled
from posbench.reference.rotations import rotation
from posbench.schemes import Shape, build_scheme, takes_option, with_option
from posbench.schemes.rescaling import RESCALINGS
from posbench.verify import certificate_config, certify

L = 512  # tokens of training
# Of each class of rotations one; and other sites of the first, and several in one.
ROTATIONS = ["qk_rope", "rotary_pct_25", "p_rope_25", "hope", "qk_rope_learned", "qk_rope_learned_base", "xpos"]
OTHERS = ["qkvo_rope", "vo_rope", "q_rope", "rope_nope_interleaved"]


class Float64:
    """torch, with float64 under the name of float32: transformers computes frequencies in float32 by name."""

    float32 = float = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


def scheme_of(kind="rotary", head_dim=64, attention="softmax", **options):
    shape = Shape(4 * head_dim, 4, 2, head_dim, context_length=L, attention=attention)
    return build_scheme(SchemeConfig("mine", kind, {"sites": ["q", "k"], **options}), shape)


def inv_freq(scheme, length):
    return scheme.angles(torch.ones(1), length)[0]


# Ours -> theirs: the name, and what it calls a factor.
THEIRS = {"pi": "linear", "dynamic_ntk": "dynamic", "yarn_code": "yarn"}


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("base", [10000.0, 1e6])
@pytest.mark.parametrize("factor", [2.0, 8.0])
@pytest.mark.parametrize("name", THEIRS)
def test_frequencies_equal_transformers(name, factor, base, fraction, monkeypatch):
    compute = ROPE_INIT_FUNCTIONS[THEIRS[name]]
    monkeypatch.setitem(compute.__globals__, "torch", Float64())
    length = int(factor * L)
    # Dynamic NTK grows with the window at their factor 1.
    parameters = {"rope_type": THEIRS[name], "factor": 1.0 if name == "dynamic_ntk" else factor, "rope_theta": base}
    parameters |= {"original_max_position_embeddings": L, "partial_rotary_factor": fraction}
    config = LlamaConfig(head_dim=64, max_position_embeddings=L, rope_parameters=parameters)
    theirs, scaling = compute(config, seq_len=length)
    options = {} if name == "dynamic_ntk" else {"factor": factor}
    scheme = scheme_of("partial_rotary", fraction=fraction, base=base, rescale=name, **options)
    assert torch.allclose(inv_freq(scheme, length), theirs.double(), rtol=1e-13, atol=0)
    if name == "yarn_code":  # they put the root of the temperature into cosine and sine; ours is on q, whole
        assert scheme.rescaling.temperature(length, L) == pytest.approx(scaling**2, rel=1e-14)


def test_ntk_is_their_dynamic_kind_at_the_length_of_the_factor(monkeypatch):
    compute = ROPE_INIT_FUNCTIONS["dynamic"]
    monkeypatch.setitem(compute.__globals__, "torch", Float64())
    parameters = {"rope_type": "dynamic", "factor": 1.0, "rope_theta": 10000.0}
    theirs, _ = compute(LlamaConfig(head_dim=64, max_position_embeddings=L, rope_parameters=parameters), seq_len=4 * L)
    ours = inv_freq(scheme_of(rescale="ntk", factor=4), 77)
    assert torch.allclose(ours, theirs.double(), rtol=1e-13, atol=0)
    w = scheme_of().frequencies()
    assert ours[0] == w[0] and ours[-1].item() == pytest.approx(w[-1].item() / 4, rel=1e-14)


@pytest.mark.parametrize("name", RESCALINGS)
def test_every_rescaling_is_its_definition(name):
    for base, D, length in ((10000.0, 64, 2048), (500.0, 16, 1500), (1e6, 2, 5000)):
        scheme = scheme_of(head_dim=D, base=base, rescale=name)
        w, s = scheme.frequencies().tolist(), length / L
        assert torch.allclose(
            inv_freq(scheme, length), torch.tensor(rescaled(w, name, s, base, L), dtype=torch.float64), rtol=1e-13
        )


def test_the_papers_ramp_is_linear_in_turns_and_the_codes_in_pairs():
    w = scheme_of().frequencies()
    turns = L * w / (2 * math.pi)
    after = {name: inv_freq(scheme_of(rescale=name, factor=4), L) for name in ("yarn", "yarn_code")}
    kept = {name: (each / w - 1 / 4) / (3 / 4) for name, each in after.items()}
    inside = (turns > 1) & (turns < 32)
    assert torch.allclose(kept["yarn"][inside], (turns[inside] - 1) / 31)
    assert (kept["yarn"][turns >= 32] == 1).all() and (kept["yarn"][turns <= 1].abs() < 1e-12).all()
    steps = kept["yarn_code"][inside].diff()
    assert torch.allclose(steps, steps[:1].expand_as(steps)) and (kept["yarn"] - kept["yarn_code"]).abs().max() > 0.1


def test_the_factor_by_default_is_the_windows_length_over_that_of_training_and_1_within_it():
    w = scheme_of().frequencies()
    scheme = scheme_of(rescale="pi")
    assert torch.equal(inv_freq(scheme, 3 * L), w / 3) and torch.equal(inv_freq(scheme, L // 2), w)
    assert torch.equal(inv_freq(scheme_of(rescale="pi", factor=2), 3 * L), w / 2)
    assert not scheme.is_streaming and scheme_of(rescale="pi", factor=2).is_streaming
    # Then the longest position falls inside the trained range.
    angles = scheme.angles(torch.tensor([3 * L - 1]), 3 * L)
    assert (angles <= scheme_of().angles(torch.tensor([L]), L)).all()


def hooks(scheme, length):
    """What each hook makes of one vector of ones, at a position."""
    x = torch.ones(1, 4, 1, 64, dtype=torch.float64)
    pos = scheme.prepare(torch.tensor([700]), length)
    return {site: getattr(scheme, site)(x, pos) for site in "qkvo"}


@pytest.mark.parametrize("name", ["yarn", "yarn_code"])
def test_the_temperature_multiplies_q_and_nothing_else(name):
    hot = (0.1 * math.log(4) + 1) ** 2
    sites = ["q", "k", "v", "o"]
    scheme = scheme_of(sites=sites, rescale=name, factor=4)
    R = torch.from_numpy(rotation(700, 64, tuple(inv_freq(scheme, L).tolist())))
    ones = torch.ones(64, dtype=torch.float64)
    expected = {"q": hot * R @ ones, "k": R @ ones, "v": R @ ones, "o": R.T @ ones}
    for site, rows in hooks(scheme, L).items():
        assert torch.allclose(rows[0, 0, 0], expected[site], atol=1e-12), site
    for sites, attention in ((["v", "o"], "softmax"), (["q"], "softmax"), (["k"], "softmax"), (["q", "k"], "linear")):
        cool = scheme_of(sites=sites, rescale=name, factor=4, attention=attention)
        assert cool.keeps_norms and all(
            rows.norm().item() == pytest.approx(16, rel=1e-12) for rows in hooks(cool, L).values()
        ), (sites, attention)


@pytest.mark.slow
@pytest.mark.parametrize("name", RESCALINGS)
@pytest.mark.parametrize("row", ["qkvo_rope", pytest.param("rope_nope_interleaved", marks=pytest.mark.slow)])
def test_certificates_hold_under_every_rescaling(row, name):
    words = ["model.num_layers=1", f"scheme.rescale={name}"] + (["scheme.factor=4"] if name != "dynamic_ntk" else [])
    certificate = certify(certificate_config(row, words))
    assert certificate.holds and certificate.defined and certificate.measured == "relative"
    assert certificate.is_streaming == (name != "dynamic_ntk")


@pytest.mark.slow
@pytest.mark.parametrize("row", [*ROTATIONS, *(pytest.param(row, marks=pytest.mark.slow) for row in OTHERS)])
def test_every_rotation_is_certified_under_yarn(row):
    assert certify(certificate_config(row, ["model.num_layers=1", "scheme.rescale=yarn", "scheme.factor=3"])).holds


def test_a_window_that_decides_its_own_factor_must_not_be_said_to_stream(monkeypatch):
    monkeypatch.setattr("posbench.schemes.rotary.Rotary.is_streaming", True)
    certificate = certify(certificate_config("qk_rope", ["model.num_layers=1", "scheme.rescale=dynamic_ntk"]))
    assert not certificate["future"].holds


def test_an_option_goes_to_the_members_that_have_it():
    qk, nope = {"name": "qk_rope", "kind": "rotary", "sites": ["q", "k"]}, {"name": "nope", "kind": "nope"}
    row = {"name": "both", "kind": "interleaved", "layers": [qk, {"name": "x", "kind": "combined", "of": [qk, nope]}]}
    assert takes_option(row, "rescale") and not takes_option(nope, "rescale")
    changed = with_option(row, "rescale", "pi")
    hot = {**qk, "rescale": "pi"}
    assert changed["layers"] == [hot, {"name": "x", "kind": "combined", "of": [hot, nope]}] and "rescale" not in changed
    assert "rescale" not in qk


REFUSED = [
    ({"rescale": "yarm"}, "scheme.rescale='yarm' is not known; did you mean 'yarn'"),
    ({"rescale": "pi", "factor": 0.5}, "scheme.factor=0.5 must lie between 1 and"),
    ({"rescale": "pi", "factor": "x"}, "scheme.factor=x must lie between 1 and"),
    ({"rescale": "dynamic_ntk", "factor": 4}, "scheme.factor=4 has no meaning for scheme.rescale=dynamic_ntk"),
    ({"factor": 4}, "scheme.factor=4 needs scheme.rescale"),
]


@pytest.mark.parametrize("options, says", REFUSED, ids=lambda part: str(part)[:30])
def test_refused(options, says):
    with pytest.raises(ConfigError) as refusal:
        scheme_of(**options)
    assert says in str(refusal.value)
