"""Schemes refuse wrong options with a remedy, end at their longest position, and come from installed packages."""

import math
from importlib.metadata import EntryPoint

import pytest
import torch
import yaml

from posbench.composition.compose import compose
from posbench.config import ConfigError, SchemeConfig
from posbench.model.architecture import checked_architecture
from posbench.model.decoder import build_model
from posbench.schemes import SCHEMES, Shape, build_scheme, with_option
from posbench.verify import MODEL, VOCAB, certificate_config, certify, random_tokens
from tests.refusals import refuses
from tests.schemes.trials import trial

SHAPE = Shape(d_model=64, num_heads=4, num_kv_heads=2, head_dim=16)
Q = {"sites": ["q"]}

REFUSED = [
    ("kind: rotery", "did you mean 'rotary'"),
    ("kind: mine", "your own is a class in a file"),
    ("kind: rotary", "scheme.sites is missing"),
    ("kind: rotary, sites: [q, w]", "must name each of ['q', 'k', 'v', 'o'] at most once"),
    ("kind: rotary, sites: [q, q]", "at most once"),
    ("kind: rotary, sites: {q: 1}", "is not a list"),
    ("kind: rotary, sites: [q], bas: 5", "scheme.bas is not an option of 'rotary'; did you mean 'base'"),
    ("kind: rotary, sites: [q], base: 1", "scheme.base=1 must be between 1.001 and 1e+15 (10000 is usual)"),
    ("kind: rotary, sites: [q], base: .nan", "must be between"),
    ("kind: rotary, sites: [q], base: 10k", "scheme.base=10k must be between"),
    ("kind: rotary, sites: [q], base: true", "must be between"),
    ("kind: rotary, sites: [q], rescale: yarm", "scheme.rescale='yarm' is not known; did you mean 'yarn'"),
    ("kind: rotary, sites: [q], rescale: pi, factor: 0.5", "scheme.factor=0.5 must be between 1 and"),
    ("kind: rotary, sites: [q], rescale: dynamic_ntk, factor: 4", "scheme.factor=4 has no meaning"),
    ("kind: rotary, sites: [q], factor: 4", "scheme.factor=4 needs scheme.rescale"),
    ("kind: rotary, sites: [q], rescale: {rope_type: yarm}", "rope_type=yarm, which is not known; did you mean 'yarn'"),
    (
        "kind: rotary, sites: [q], rescale: {rope_type: linear, rope_theta: 9.0}",
        "has or lacks rope_theta, factor",
    ),
    ("kind: rotary, sites: [q], rescale: [4]", "scheme.rescale=[4] is not known"),
    ("kind: partial_rotary, sites: [q], fraction: 0.3", "scheme.fraction=0.3 of model.head_dim=16 is 4.8 channels"),
    ("kind: p_rope, sites: [q], fraction: -0.1", "scheme.fraction=-0.1 must be between 0 and 1"),
    ("kind: inkling_conv, profiles: 0", "scheme.profiles=0 must be a whole number, 1 or more"),
    ("kind: canon, sites: [q, q]", "scheme.sites="),
    ("kind: grape_ap, width: 7", "scheme.width=7 must be an even number above 0 (8 is the paper's)"),
    ("kind: nope, base: 10000", "scheme.base is not an option of 'nope', which has no options"),
    ("kind: alibi, exponents: [-1, -8]", "scheme.exponents=[-1, -8] must be a list of 4 numbers"),
    ("kind: alibi, exponents: -1", "scheme.exponents=-1 must be a list of 4 numbers, one for each head"),
    ("kind: alibi, exponents: deep", "scheme.exponents=deep must be a list of 4 numbers"),
    ("kind: alibi, exponents: [-1, -8, .nan, -1]", "scheme.exponents=nan must be between -64 and 8"),
    ("kind: t5, num_buckets: 31", "scheme.num_buckets=31 must be even"),
    ("kind: t5, num_buckets: true", "must be a whole number, 2 or more (32 is usual)"),
    ("kind: t5, max_distance: 16", "scheme.max_distance=16 must be above scheme.num_buckets / 2 = 16"),
    ("kind: transformer_xl, channels: 15", "scheme.channels=15 must be an even number above 0"),
    ("kind: transformer_xl, channels: C", "16 is the width of a head, 64 the paper's choice"),
    (f"kind: '{trial('Swallows').kind}', buckets: 32", "scheme.buckets is not an option of"),
]


def refusal(row, shape=SHAPE):
    with pytest.raises(ConfigError) as error:
        build_scheme(row, shape)
    return str(error.value)


@pytest.mark.parametrize("row, says", REFUSED)
def test_refused(row, says):
    assert says in refusal(SchemeConfig.from_mapping({"name": "mine", **yaml.safe_load(f"{{{row}}}")}))


LENGTH = "original_max_position_embeddings"
ROPE = {
    "linear": {"factor": 4},
    "dynamic": {"factor": 4, LENGTH: 64},
    "llama3": {"factor": 8, LENGTH: 64, "low_freq_factor": 1, "high_freq_factor": 4},
    "yarn": {"factor": 4, LENGTH: 64},
    "longrope": {"factor": 4, LENGTH: 64, "short_factor": 8 * [1], "long_factor": 8 * [2]},
}
NO_NUMBERS = (math.nan, math.inf, True, "four", [4])
NO_VALUES = [  # rope_type, key, values that it cannot have
    *((kind, "factor", (0, -2, *NO_NUMBERS)) for kind in ROPE),
    *((kind, "factor", (0.5,)) for kind in ROPE if kind != "longrope"),
    *((kind, LENGTH, (0, -64, 1, *NO_NUMBERS)) for kind in ROPE if kind != "linear"),
    ("llama3", "low_freq_factor", (0, -1, 4, 5, *NO_NUMBERS)),
    ("llama3", "high_freq_factor", (0, 1, 0.5, *NO_NUMBERS)),
    ("yarn", "beta_slow", (0, -1, 32, 40, *NO_NUMBERS)),
    ("yarn", "beta_fast", (0, 1, 0.5, *NO_NUMBERS)),
    ("yarn", "attention_factor", (0, -1, *NO_NUMBERS)),
    ("yarn", "mscale", (-1, *NO_NUMBERS)),
    ("yarn", "truncate", (1, "no")),
    ("longrope", "long_factor", (8, 8 * [0], 8 * [-1], 8 * [math.nan], 8 * ["1"])),
]


@pytest.mark.parametrize("kind, key, values", NO_VALUES)
def test_a_value_that_a_rescaling_cannot_have_is_refused(kind, key, values):
    for value in values:
        row = SchemeConfig("mine", "rotary", {**Q, "rescale": {"rope_type": kind, **ROPE[kind], key: value}})
        assert f"{key}={value!r}, which must be" in refusal(row) or f"{key}={value}" in refusal(row)


@pytest.mark.parametrize("kind", ROPE)
def test_usual_values_of_a_rescaling_are_taken(kind):
    more = {"beta_slow": 1.0, "beta_fast": None, "truncate": False, "mscale": 0} if kind == "yarn" else {}
    [scheme] = build_scheme(
        SchemeConfig("mine", "rotary", {**Q, "rescale": {"rope_type": kind, **ROPE[kind], **more}}), SHAPE
    )
    assert scheme.angles(torch.arange(100), 100).isfinite().all()


def test_an_odd_width_has_no_pairs_for_sines():
    assert "model.d_model=33 is odd" in refusal(SchemeConfig("mine", "sinusoidal"), Shape(33, 1, 1, 16))


LEARNED, NOPE = ({"name": name, "kind": name} for name in ("learned", "nope"))


def test_a_learned_table_is_drawn_like_the_embeddings_and_ends():
    model = build_model(certificate_config("learned"), VOCAB)
    assert model.scheme[0].table.std().item() == pytest.approx(model.config.init_std, rel=0.05)
    assert model(random_tokens(28), offset=100).isfinite().all()
    for arguments in ({"offset": 100}, {"positions": torch.arange(100, 129)[None]}):
        refuses("defined up to 128 tokens, and this window reaches position 128", model, random_tokens(29), **arguments)


def test_a_scheme_made_of_others_is_defined_as_far_as_all_of_them():
    shape = Shape(48, 4, 4, 12, context_length=64)
    assert build_scheme(SchemeConfig("both", "combined", {"of": [NOPE, LEARNED]}), shape).longest == 64
    assert build_scheme(SchemeConfig("both", "interleaved", {"layers": [NOPE, NOPE]}), shape).longest is None


@pytest.mark.slow
def test_certificates_and_training_stay_within_the_length():
    words = ["scheme.name=ends", f"scheme.kind={trial('Ends').kind}"]
    row = certify(certificate_config("nope", words))
    assert row.holds and row.longest == 100
    refuses(
        "defined up to 50 tokens, too few to be certified",
        certify,
        certificate_config("learned", ["train.context_length=50"]),
    )
    checked_architecture(compose(["scheme=nope", *words, *MODEL, "train.context_length=100"]))
    refuses(
        r"defined up to 100 tokens and train\.context_length=128 is longer",
        checked_architecture,
        compose(["scheme=nope", *words, *MODEL, "train.context_length=128"]),
    )


def registered(monkeypatch, name, value):
    monkeypatch.setitem(SCHEMES, name, EntryPoint(name, value, "posbench.schemes"))
    return SchemeConfig("mine", name)


def test_a_broken_package_harms_no_other_scheme(monkeypatch):
    registered(monkeypatch, "missing", "no_such_package:Thing")
    build_scheme(SchemeConfig("mine", "nope"), SHAPE)
    refuses("no_such_package:Thing cannot be imported", build_scheme, SchemeConfig("mine", "missing"), SHAPE)
    refuses(
        "pathlib:Path does not extend Scheme", build_scheme, registered(monkeypatch, "path_lib", "pathlib:Path"), SHAPE
    )
    row = registered(monkeypatch, "broken", "tests.schemes.trials:FromTheEnd")
    assert "bias(self, q, gate, at) must be bias(self, q, k, gates, at)" in refusal(row)


def test_a_package_registers_a_scheme_by_its_entry_point(monkeypatch):
    row = registered(monkeypatch, "kinked", "tests.schemes.trials:Kinked")
    assert type(build_scheme(row, SHAPE)[0]).__name__ == "Kinked"


def test_factors_of_another_length_are_refused():
    words = ["scheme=qk_rope", "model.head_dim=16"]
    lists = "short_factor: [1, 1, 1, 1], long_factor: [1, 1, 1, 1]"
    rescale = f"scheme.rescale={{rope_type: longrope, factor: 2, original_max_position_embeddings: 32, {lists}}}"
    refuses(
        "short_factor has 4 entries, and 16 channels a head are rotated: it needs 8",
        checked_architecture,
        compose([*words, rescale]),
    )
    checked_architecture(compose(["scheme=qk_rope", "model.head_dim=8", rescale]))


def test_an_option_goes_to_the_members_that_have_it():
    yarn = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 32}
    near = {"name": "near", "kind": "rotary", "sites": ["q", "k"], "window": 64}
    far = {**near, "window": None, "rescale": yarn}
    row = {"name": "both", "kind": "interleaved", "layers": [near, far, {"name": "nope", "kind": "nope"}]}
    nope = row["layers"][2]
    assert with_option(row, "base", 500)["layers"] == [near | {"base": 500}, far | {"base": 500}, nope]
    assert with_option(row, "full_attention.base", 500)["layers"] == [near, far | {"base": 500}, nope]
    assert with_option(row, "rescale.factor", 2)["layers"] == [near, far | {"rescale": yarn | {"factor": 2}}, nope]
    rescaled = with_option({**far, "rescale": "ntk", "factor": 8}, "rescale", "pi")
    assert rescaled["rescale"] == "pi" and "factor" not in rescaled
    refuses(r"full_attention\.clip=3: no layer of both without a window", with_option, row, "full_attention.clip", 3)
