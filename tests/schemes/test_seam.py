"""The seam carries gates, keys and parameters of each layer, in pieces as in whole windows."""

import re
from dataclasses import replace

import pytest
import torch

from posbench.attention import build_kind
from posbench.composition.compose import compose
from posbench.config import ConfigError, SchemeConfig
from posbench.model.architecture import build_architecture, checked_architecture
from posbench.model.decoder import build_model
from posbench.model.size import forward_flops_per_token, num_parameters
from posbench.schemes import Scheme, Shape, build_scheme, scheme_class
from posbench.schemes.building import unused_schemes
from posbench.schemes.rotary import Rotary
from posbench.verify import MODEL, VOCAB, certificate_config, certify, random_tokens, randomise
from tests.schemes.trials import trial

QK = {"name": "qk_rope", "kind": "rotary", "sites": ["q", "k"]}
NOPE, ALIBI, FOX, COPE, DAPE, SELECTIVE, FIRE, CANON = (
    {"name": kind, "kind": kind} for kind in ("nope", "alibi", "fox", "cope", "dape", "selective_rope", "fire", "canon")
)
SINK = {"name": "sink", "kind": "nope", "attention": {"kind": "softmax", "sink": True}}
LINEAR = {"name": "linear", "kind": "nope", "attention": {"kind": "linear"}}
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


GATED = {
    **{row["name"]: SchemeConfig.from_mapping(row) for row in (FOX, COPE, DAPE, SELECTIVE)},
    "several": combined(SELECTIVE, FOX, COPE, DAPE, FIRE),
    "one gate for all heads": trial("Turned", heads=1),
    "a gate of each key head": trial("Turned", heads=HKV),
    "gates that turn queries alone": trial("OfQueries"),
    "earlier rows in every hook": trial("Back"),
    "earlier rows under linear attention": trial("Back", attention={"kind": "linear"}),
    "earlier rows of two members": combined(
        {**CANON, "sites": ["k", "o"]}, QK, {**CANON, "sites": ["hidden", "k"], "width": 2}
    ),
    "earlier rows in a window": SchemeConfig("w", trial("Back").kind, {"window": 7}),
    "gates under linear attention": trial("Turned", heads=HKV, attention={"kind": "linear"}),
    "a kind of attention in each layer": interleaved(LINEAR, {**FOX, "attention": {"sink": True, "shared_kv": True}}),
}


@torch.no_grad()
@pytest.mark.parametrize("name", GATED)
def test_whole_windows_pieces_and_single_tokens_are_one_result(name):
    model, wide = (built(GATED[name], "train.context_length=256") for _ in range(2))
    wide, tokens = wide.double(), random_tokens(140).view(2, 70)
    exact = wide(tokens, offset=5)
    limit = 24 * 2.0**-24 * max(kind.sensitivity for kind in model.architecture.kinds)
    assert (exact - model(tokens, offset=5)).norm() / exact.norm() < limit
    for piece in (32, 9, 1):  # 70 is a multiple of 1 only
        wide.piece = piece
        assert (wide(tokens, offset=5) - exact).abs().max() < 1e-12
    model.piece = 32
    assert (model(tokens, offset=5) - exact).norm() / exact.norm() < limit


@torch.no_grad()
@pytest.mark.parametrize("heads", [1, HKV])
def test_gates_and_their_sums_reach_locate_and_bias_by_head(heads):
    model = built(trial("Turned", heads=heads)).double()
    scheme, kind = model.scheme[0], model.blocks[0].attention.kind
    x = torch.randn(2, 40, C, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    q, k, v = (
        torch.randn(2, n, 40, D, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in (H, HKV, HKV)
    )
    o = kind.mix(q, k, v, x, scheme, model._embed(random_tokens(40), 0, 0, 40, None)[1][0], None)
    for b, h in ((0, 0), (1, 4), (0, 5)):
        n = 0 if heads == 1 else h // (H // HKV)  # of the head's gates
        gate = torch.nn.functional.softplus(x[b] @ scheme.w[2 * n : 2 * n + 2].T)  # [T, 2]
        turn = torch.exp(1j * gate[:, :1].cumsum(0) / torch.arange(1, D // 2 + 1))
        turned_q, turned_k = (torch.complex(*y.chunk(2, -1)) * turn for y in (q[b, h], k[b, h // (H // HKV)]))
        scores = (turned_q.conj() @ turned_k.T).real / D**0.5
        for i in range(40):
            for j in range(i + 1):
                scores[i, j] -= gate[j + 1 : i + 1, 1].sum() * gate[j, 0]
        later = torch.ones(40, 40, dtype=torch.bool).triu(1)
        expected = scores.masked_fill(later, -torch.inf).softmax(-1) @ v[b, h // (H // HKV)]
        assert (o[b, h] - expected).abs().max() < 1e-12


def test_gates_of_float32_are_not_rounded_to_bfloat16():
    scheme = built(SchemeConfig.from_mapping(FOX)).scheme[0]
    assert scheme.gate(torch.ones(1, 4, C, dtype=torch.bfloat16), None).dtype == torch.float32


def test_a_parameter_is_each_layers_own_or_one_tensor_for_all():
    for name, names in {
        "Single": {
            "layers.0.own",
            "layers.0.common",
            "layers.0.table",
            "layers.1.own",
            "layers.1.common",
            "layers.1.table",
        },
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


def test_layers_that_no_row_uses_are_not_built():
    both = {"name": "both", "kind": "combined", "of": [QK, FOX]}
    model = built(interleaved(NOPE, both, FOX), "model.num_layers=5")
    assert scheme_parameters(model).keys() == {
        f"layers.{place}.{w}" for place in ("1.members.1", "2", "4.members.1") for w in ("w", "b")
    }
    shared = scheme_parameters(built(interleaved(NOPE, {"name": "t5", "kind": "t5"}), "model.num_layers=4"))
    assert shared.keys() == {"layers.1.table"}
    for name, count in (("Common", 1), ("Several", 2), ("Single", 2)):
        counted = scheme_class(trial(name).kind)
        count_before = counted.instances
        build_scheme(interleaved(NOPE, {"name": "own", "kind": trial(name).kind}), replace(SHAPE, num_layers=5))
        assert counted.instances - count_before == count


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


def test_equal_members_are_one_scheme_prepared_once():
    model = built(interleaved(QK, QK, NOPE), "model.num_layers=6")
    assert [type(layer) for layer in model.scheme] == [Rotary, Rotary, Scheme] * 2
    _, ats = model._embed(random_tokens(9), 0, 0, 9, None)
    assert len({id(at) for at in ats}) == len(set(model.scheme)) == 2


def message(scheme, *words):
    with pytest.raises(ConfigError) as refusal:
        model = built(scheme, *words)
        model(random_tokens(9))
    return str(refusal.value)


def test_what_does_not_fit_the_seam_is_refused():
    assert "Misshapen.gate gives [1, 9, 48]: it must give [B, G, T, N] with G of 1, 2 (key heads) or 6" in message(
        trial("Misshapen")
    )
    assert "its locate also moves keys or values, which have 2 heads: return G of 1 or 2" in message(trial("OfKeysToo"))
    for name in ("cope", "dape"):
        row = SchemeConfig("t", name, attention={"kind": "linear"})
        assert "reads keys, which attention of the kind linear does not cache" in message(row)
    several = replace(combined(COPE, QK), attention={"kind": "decay"})
    with pytest.raises(ConfigError, match="attention of the kind decay does not cache"):
        checked_architecture(replace(certificate_config("nope"), scheme=several))
    wider = combined({"name": "pope", "kind": "pope"}, {"name": "path", "kind": "path"})
    assert "path needs queries of 16 channels; another scheme in scheme.of made them 32 wide" in message(wider)
    error_text = message(trial("FromTheEnd"))
    assert "trials.py, line " in error_text
    assert "FromTheEnd.bias(self, q, gate, at) must be bias(self, q, k, gates, at)" in error_text
    sines = {"name": "sinusoidal", "kind": "sinusoidal"}
    assert "holds sinusoidal, which adds positions to the token embeddings once" in message(interleaved(QK, sines))
    assert "scheme.of must be a list of schemes" in message(SchemeConfig("t", "combined", {"of": []}))


@pytest.mark.parametrize(
    "name, says",
    [
        ("FiveDimensional", "FiveDimensional.q returns [1, 1, 6, 9, 16] for [1, 6, 9, 16]: return the same sh"),
        ("Stretched", "Stretched.o returns [1, 6, 9, 32] for [1, 6, 9, 16]: return the same shape"),
        ("Flat", "Flat.embed returns [1, 48] for [1, 9, 48]: return the same shape"),
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
    model = built(scheme)
    model.bos_id = 0 if setting == "documents" else None
    with pytest.raises(ConfigError) as refusal:
        model(random_tokens(9))
    assert says in str(refusal.value) and re.search(r"trials\.py, line \d+: ", str(refusal.value))


NESTED = {
    "a sink beside a bias": (combined(SINK, ALIBI), "holds sink, whose attention is {'kind': 'softmax', 'sink': True}"),
    "a linear scheme beside a rotation": (combined(LINEAR, QK), "the schemes of one layer have one kind of attention"),
    "a kind two levels down": (
        interleaved({"name": "both", "kind": "combined", "of": [SINK, ALIBI]}, NOPE),
        "scheme=turns holds sink",
    ),
    "a list of layers in a list": (interleaved(QK, TURNS), "holds turns, which is itself a list of layers"),
    "layers within a layer": (combined(TURNS, ALIBI), "holds turns, which differs from layer to layer"),
}


@pytest.mark.parametrize("name", NESTED)
def test_a_member_that_would_be_ignored_is_refused(name):
    scheme, says = NESTED[name]
    assert says in message(scheme)


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
    model = built(interleaved(QK, {**QK, "attention": {"kind": "linear"}}))
    assert [scheme.shape.attention for scheme in model.scheme] == ["softmax", "linear"]


def test_a_window_and_a_scheme_that_reads_keys_are_checked_with_the_attention_of_their_layer():
    windowed = {**QK, "window": 8}
    assert built(interleaved(windowed, LINEAR), randomised=False).architecture.kinds[0].takes_windows
    with pytest.raises(
        ConfigError, match=r"scheme\.window needs scheme\.attention={kind: softmax}, and this is linear"
    ):
        built(interleaved(NOPE, {**windowed, "attention": {"kind": "linear"}}))
    with pytest.raises(ConfigError, match="reads keys, which attention of the kind linear does not cache"):
        built(interleaved(NOPE, {**COPE, "attention": {"kind": "linear"}}))
    built(interleaved(LINEAR, COPE))


def test_schemes_that_no_layer_has_are_known():
    assert unused_schemes(interleaved(QK, QK, QK, NOPE), 3) == ["nope"]
    assert unused_schemes(interleaved(QK, QK, QK, NOPE), 4) == []
    assert unused_schemes(interleaved(QK, NOPE, QK, ALIBI), 1) == ["nope", "alibi"]
    assert unused_schemes(combined(QK, NOPE), 1) == []


@pytest.mark.parametrize("name", ["Bump", "BumpByQuery"])
@pytest.mark.parametrize("word", ["data=copy", "data.document_mask=true"])
def test_a_scheme_that_takes_positions_of_the_window_only_is_for_text_only(name, word):
    config = replace(compose([*MODEL, word]), scheme=trial(name))
    with pytest.raises(ConfigError, match=rf"trials\.py, line \d+: {name} is for text only: .* \[B, 1, T\]"):
        checked_architecture(config)
    assert checked_architecture(replace(compose([*MODEL]), scheme=trial(name)))


@pytest.mark.parametrize(
    "options, says",
    [
        ({"kind": "softmacs"}, "scheme.attention.kind='softmacs' is not known; did you mean 'softmax'"),
        ({"shared_kw": True}, "scheme.attention.shared_kw is not an option of 'softmax'; did you mean 'shared_kv'"),
        ({"shared_kv": 1}, "scheme.attention.shared_kv=1 must be true or false"),
        ({"value_norm": "yes"}, "scheme.attention.value_norm='yes' must be true or false"),
        ({"kind": "decay", "shared_kv": True}, "needs a kind of attention that has keys and values"),
        ({"kind": "decay", "normalise": 2}, "scheme.attention.normalise=2 must be true or false"),
    ],
)
def test_a_kind_of_attention_that_cannot_be_is_refused(options, says):
    with pytest.raises(ConfigError) as refusal:
        build_kind(options, SHAPE)
    assert says in str(refusal.value)


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


def test_the_shared_parts_of_every_kind_are_drawn_alike():
    def parts(scheme):
        tensors = {}
        for name, tensor in build_model(replace(certificate_config("nope"), scheme=scheme), VOCAB).shared_parts():
            tensors.setdefault(name, []).append(tensor)
        return tensors

    whole = parts(SchemeConfig("t", "nope"))
    for scheme, lacks in (
        (SchemeConfig("t", "rotary", {"sites": ["v", "o"]}, {"kind": "decay"}), {"attention.q", "attention.k"}),
        (SchemeConfig("t", "rotary", {"sites": ["q", "k"]}, {"shared_kv": True}), {"attention.v"}),
    ):
        some = parts(scheme)
        assert whole.keys() - some.keys() == lacks
        assert all(torch.equal(a, b) for name in some for a, b in zip(whole[name], some[name], strict=True))
        counted = num_parameters(build_architecture(replace(certificate_config("nope"), scheme=scheme)), VOCAB)
        assert sum(x.numel() for part in some.values() for x in part) == sum(counted.values())
    assert whole.keys() - parts(interleaved(NOPE, {**NOPE, "attention": {"shared_kv": True}})).keys() == {"attention.v"}


@torch.no_grad()
def test_gates_are_part_of_what_is_kept_of_the_past():
    plain, gated = (built(SchemeConfig.from_mapping(row)) for row in (NOPE, FOX))
    caches = [model.caches(4) for model in (plain, gated)]
    for model, kv_cache in zip((plain, gated), caches, strict=True):
        model.hidden(random_tokens(3), 0, kv_cache)
    gates = caches[1][0].gates.values()
    assert caches[1][0].num_bytes - caches[0][0].num_bytes == sum(cache.num_bytes for cache in gates) > 0


def test_a_past_that_is_full_takes_no_more():
    model = build_model(certificate_config("nope"), VOCAB)
    caches = model.caches(4)
    with torch.no_grad():
        model.hidden(random_tokens(3), 0, caches)
        assert caches[0].num_bytes == 4 * 2 * 2 * 16 * 4  # keys and values of 2 heads of 16 float32, 4 tokens
        with pytest.raises(ConfigError, match="6 tokens do not fit a cache made for 4"):
            model.hidden(random_tokens(3), 0, caches)


FLOPS = {  # of one layer, a token of a window of T
    "nope": lambda T: 0,
    "alibi": lambda T: 0,
    "qk_rope": lambda T: 0,
    "fox": lambda T: 2 * H * C,
    "shaw": lambda T: 2 * H * D * 17,
    "transformer_xl": lambda T: 2 * H * D * D + H * D * T,
    "pope": lambda T: H * D * T,
    "cope": lambda T: 2 * H * D * 64,
    "dape": lambda T: T * 32 * (2 * H + H),
    "selective_rope": lambda T: 2 * 16 * (C + HKV * D // 2),
    "repo": lambda T: 2 * (C // 8) * (2 * C + HKV),
    "grape_ap": lambda T: 2 * H * 8 * C + H * 8 * T,
    "fox_qk_rope": lambda T: 2 * H * C,
    "path": lambda T: 2 * (32 + HKV) * C + 2 * HKV * D * 32 + 2 * H * 32 * (5 * D + 64) + H * T * D * (1 + D / 32),
}


@pytest.mark.parametrize("name", FLOPS)
def test_operations_of_a_scheme_by_hand(name):
    scheme, plain = (build_architecture(certificate_config(row)) for row in (name, "nope"))
    for T in (64, 2048):
        difference = forward_flops_per_token(scheme, VOCAB, T) - forward_flops_per_token(plain, VOCAB, T)
        assert difference == scheme.model.num_layers * FLOPS[name](T)


def test_a_class_of_ones_own_states_none():
    assert build_scheme(trial("Gentle"), SHAPE).flops_per_token(64) is None
    both = combined({"name": "gentle", "kind": trial("Gentle").kind}, FOX)
    assert build_scheme(both, SHAPE).flops_per_token(64) is None
