"""The seam carries gates, keys and parameters of each layer, in pieces as in whole windows."""

import re
from dataclasses import replace

import pytest
import torch

from posbench.composition.compose import compose
from posbench.config import ConfigError, SchemeConfig
from posbench.model.architecture import checked_architecture
from posbench.model.decoder import build_model
from posbench.schemes import Shape, build_scheme
from posbench.verify import MODEL, VOCAB, certificate_config, certify, random_tokens, randomise
from tests.refusals import refuses
from tests.schemes.trials import trial

QK = {"name": "qk_rope", "kind": "rotary", "sites": ["q", "k"]}
NOPE, ALIBI, FOX, COPE, DAPE, SELECTIVE, POPE, PATH, SINES = (
    {"name": kind, "kind": kind}
    for kind in ("nope", "alibi", "fox", "cope", "dape", "selective_rope", "pope", "path", "sinusoidal")
)
SINK = {"name": "sink", "kind": "nope", "attention": {"kind": "softmax", "sink": True}}
LINEAR_KIND = {"attention": {"kind": "linear"}}
LINEAR = {"name": "linear", "kind": "nope", **LINEAR_KIND}
TURNS = {"name": "turns", "kind": "interleaved", "layers": [QK, NOPE]}
H, HKV, D, C = 6, 2, 16, 48
SHAPE = Shape(C, H, HKV, D, num_layers=2, context_length=128)


def combined(*members):
    return SchemeConfig("several", "combined", {"of": list(members)})


def interleaved(*members):
    return SchemeConfig("turns", "interleaved", {"layers": list(members)})


def built(scheme, *words, randomised=True):
    """Return a decoder under the scheme with random parameters."""
    model = build_model(replace(certificate_config("nope", words), scheme=scheme), VOCAB)
    if randomised:
        randomise(model)
    return model


def scheme_parameters(model):
    """Return the scheme's parameters by name."""
    return {name.removeprefix("scheme."): p for name, p in model.named_parameters() if name.startswith("scheme.")}


def test_a_parameter_is_each_layers_own_or_one_tensor_for_all():
    for name, names in {
        "Single": {f"layers.{n}.{name}" for n in (0, 1) for name in ("own", "common", "table")},
        "Several": {"layers.0.own", "layers.0.common", "layers.1.own"},
        "Common": {"layers.0.own", "layers.0.common"},
    }.items():
        model = built(trial(name), randomised=False)
        assert scheme_parameters(model).keys() == names
        first, second = model.scheme
        assert (first is second) == (name == "Common")
        assert (first.common is second.common) == (name != "Single") and (first.own is second.own) == (name == "Common")
        tensors = [first.own, second.own, first.common, second.common]
        assert len({tuple(x.flatten().tolist()) for x in tensors}) == len({id(x) for x in tensors})
    assert {"layers.0.content", "layers.0.position", "layers.0.matrix", "layers.1.matrix"} == scheme_parameters(
        built(SchemeConfig("xl", "transformer_xl"))
    ).keys()


def test_a_normal_parameter_depends_on_the_seed_and_its_name_alone():
    def drawn(scheme, seed=0):
        return scheme_parameters(built(scheme, f"seed={seed}", randomised=False))

    alone = drawn(SchemeConfig.from_mapping(FOX))
    for scheme, prefix in ((combined(FOX, QK), "members.0."), (combined(SELECTIVE, DAPE, FOX), "members.2.")):
        several = drawn(scheme)
        assert all(torch.equal(alone[f"layers.{n}.w"], several[f"layers.{n}.{prefix}w"]) for n in (0, 1))
    assert alone["layers.0.w"].std().item() == pytest.approx(0.25, rel=0.2)  # the decoder's init_std
    assert not torch.equal(alone["layers.0.w"], drawn(SchemeConfig.from_mapping(FOX), seed=1)["layers.0.w"])
    assert torch.equal(drawn(trial("Single"))["layers.1.own"], drawn(trial("Several"))["layers.1.own"])
    assert torch.equal(drawn(trial("Single"))["layers.0.common"], drawn(trial("Common"))["layers.0.common"])


def test_what_a_constructor_draws_depends_on_the_seed_the_kind_and_the_layer():
    def tables(seed, name="Single"):
        random_state = torch.get_rng_state()
        layers = [scheme.table for scheme in build_scheme(trial(name), SHAPE, seed)]
        assert torch.equal(random_state, torch.get_rng_state())  # which is no part of it
        torch.manual_seed(77)
        return layers

    (a, b), again = tables(0), tables(0)
    assert torch.equal(a, again[0]) and torch.equal(b, again[1])
    assert len({float(x.sum()) for x in (a, b, *tables(1), *tables(0, "Other"))}) == 6


def message(scheme, bos_id=None):
    with pytest.raises(ConfigError) as refusal:
        model = built(scheme)
        model.bos_id = bos_id
        model(random_tokens(9))
    return str(refusal.value)


REFUSED = [
    (trial("Misshapen"), "gate gives [1, 9, 48]: it must give [B, G, T, N] with G of 1, 2 (shape.num_kv_heads) or 6"),
    (interleaved(NOPE, {**COPE, **LINEAR_KIND}), "reads keys, which attention of the kind linear does not cache"),
    (replace(combined(COPE, QK), attention={"kind": "decay"}), "attention of the kind decay does not cache"),
    (combined(POPE, PATH), "path needs queries of 16 channels; another scheme in scheme.of made them 32 wide"),
    (interleaved(QK, SINES), "holds sinusoidal, which adds positions to the token embeddings once"),
    (SchemeConfig("t", "combined", {"of": []}), "scheme.of must be a list of schemes"),
    (combined(SINK, ALIBI), "holds sink, whose attention is {'kind': 'softmax', 'sink': True}"),
    (combined(LINEAR, QK), "the schemes of one layer have one kind of attention"),
    (interleaved({"name": "both", "kind": "combined", "of": [SINK, ALIBI]}, NOPE), "scheme=turns holds sink"),
    (interleaved(QK, TURNS), "holds turns, which is itself a list of layers"),
    (combined(TURNS, ALIBI), "holds turns, which differs from layer to layer"),
    (interleaved(NOPE, {**QK, **LINEAR_KIND, "window": 8}), "scheme.window needs scheme.attention={kind: softmax}"),
]


@pytest.mark.parametrize("scheme, says", REFUSED)
def test_what_does_not_fit_the_seam_is_refused(scheme, says):
    assert says in message(scheme)


@pytest.mark.parametrize(
    "name, says",
    [
        ("Stretched", "Stretched.o returns [1, 6, 9, 32] for [1, 6, 9, 16]: return the same shape"),
        (
            "BiasOfHeads",
            "gives [1, 6, 1, 1, 9, 9]: return a shape that broadcasts to [1, 6, 9, 9], such as tensor[b, h, i, j]",
        ),
        ("BiasOfTruths", "gives booleans, which would be added as 0 and 1"),
    ],
)
@pytest.mark.parametrize("setting", ["alone", "combined", "documents", "linear"])
def test_a_hook_that_gives_another_shape_is_named_with_its_place(name, says, setting):
    scheme = trial(name)
    if setting == "combined":
        scheme = combined(QK, {"name": "other", "kind": scheme.kind})
    if setting == "linear":
        scheme = replace(scheme, attention={"kind": "linear"})
    error = message(scheme, bos_id=0 if setting == "documents" else None)
    assert says in error and re.search(r"trials\.py, line \d+: ", error)


def test_a_layer_has_the_attention_of_its_scheme_or_else_of_the_list():
    shared = {"name": "shared", **QK, "attention": {"shared_kv": True}}
    model = built(interleaved(SINK, LINEAR, shared, NOPE), "model.num_layers=4")
    kinds = [type(kind).__name__ for kind in model.architecture.kinds]
    assert kinds == ["Softmax", "LinearAttention", "Softmax", "Softmax"]
    assert [kind.shared_kv for kind in model.architecture.kinds] == [False, False, True, False]
    assert [getattr(kind, "sink", None) is not None for kind in model.architecture.kinds] == [True, False, False, False]
    model = built(replace(interleaved(QK, SINK), attention={"shared_kv": True}), "model.num_layers=4")
    assert [kind.shared_kv for kind in model.architecture.kinds] == [True, False, True, False]
    assert [kind.shape.attention for kind in model.architecture.kinds] == ["softmax", "softmax"] * 2
    assert model.scheme.shared_with == [0, 1, 0, 1]
    model = built(interleaved(QK, {**QK, **LINEAR_KIND}))
    assert [scheme.shape.attention for scheme in model.scheme] == ["softmax", "linear"]
    windowed = built(interleaved({**QK, "window": 8}, LINEAR), randomised=False)
    assert windowed.architecture.kinds[0].takes_windows
    built(interleaved(LINEAR, COPE))


@pytest.mark.parametrize("name", ["Bump", "BumpByQuery"])
@pytest.mark.parametrize("word", ["data=copy", "data.document_mask=true"])
def test_a_scheme_that_takes_positions_of_the_window_only_is_for_text_only(name, word):
    config = replace(compose([*MODEL, word]), scheme=trial(name))
    refuses(rf"trials\.py, line \d+: {name} is for text only: .* \[B, 1, T\]", checked_architecture, config)
    assert checked_architecture(replace(compose([*MODEL]), scheme=trial(name)))


TRIALS = {
    "linear, v alone": (SchemeConfig("t", "rotary", {"sites": ["v"]}, {"kind": "linear"}), "absolute"),
    "decay with v": (SchemeConfig("t", "rotary", {"sites": ["v"]}, {"kind": "decay"}), "absolute"),
    "a gate under linear attention": (SchemeConfig("t", "fox", attention={"kind": "linear"}), "relative"),
    "layers of several kinds": (interleaved(ALIBI, {"name": "p", "kind": "combined", "of": [FOX, QK]}), "relative"),
    "gates, keys and rotations": (combined(SELECTIVE, FOX, DAPE), "relative"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRIALS)
def test_kinds_that_have_no_row_fit_the_seam_and_are_certified(name):
    scheme, promised = TRIALS[name]
    layers = 2 if scheme.kind == "interleaved" else 1
    certificate = certify(replace(certificate_config("nope", [f"model.num_layers={layers}"]), scheme=scheme))
    failed = {check.name: f"{check} {check.where}" for check in certificate.checks if not check.holds}
    assert failed == {} and certificate.defined and certificate.measured == certificate.promised == promised


def test_a_past_that_is_full_takes_no_more():
    model = build_model(certificate_config("nope"), VOCAB)
    caches = model.caches(4)
    with torch.no_grad():
        model.hidden(random_tokens(3), 0, caches)
        assert caches[0].size == 4 * 2 * 2 * 16  # keys and values of 2 heads of 16, 4 tokens
        refuses("6 tokens do not fit a cache made for 4", model.hidden, random_tokens(3), 0, caches)
