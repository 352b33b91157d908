"""The seam carries every kind of scheme to come: each a trial of a few lines, certified like the schemes there are.

Kinds of attention under schemes of all sorts, values shared with keys, layers of several schemes, forgetting gates,
wider q and k, frequencies rescaled at evaluation: the hooks carry them without a change to any other file.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from posbench.attention import build_kind
from posbench.composition import compose
from posbench.config import ConfigError, SchemeConfig
from posbench.model import build_model, shape_of
from posbench.reference.definition import Definition
from posbench.reference.schemes import DEFINITIONS
from posbench.schemes import SCHEMES, Scheme, Shape, build_scheme
from posbench.schemes.rotary import Rotary
from posbench.size import num_parameters
from posbench.verify import VOCAB, certificate_config, certify, random_tokens, randomise

QK = {"name": "qk_rope", "kind": "rotary", "sites": ["q", "k"]}
NOPE = {"name": "nope", "kind": "nope"}
ALIBI = {"name": "alibi", "kind": "alibi"}


class Forgets(Scheme):
    """FoX: `sum_{l=j+1..i} log sigmoid(w_h . x_l + b_h)` (arXiv 2503.02130)."""

    gate_width = 1

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.w, self.b = nn.Parameter(torch.zeros(shape.num_heads, shape.d_model)), nn.Parameter(torch.zeros(6))

    def gate(self, x, pos):
        return nn.functional.logsigmoid(x.to(self.w.dtype) @ self.w.T + self.b).mT[..., None]

    def bias(self, q, gate, at):
        c = gate[..., 0].cumsum(-1)
        copied, before = c.clone(), at.query - at.key
        return lambda b, h, i, j: c[b, h, i + before] - copied[b, h, j]


class DefinedForgets(Definition):
    def gate(self, x, h):
        return np.array([-np.log1p(np.exp(-(self.weights["w"][h] @ x + self.weights["b"][h])))])

    def bias(self, h, i, j, q, gates):
        return sum(float(gates(p)[0]) for p in range(j + 1, i + 1))


class Wider(Scheme):
    """q and k with a channel of the squared norm each: wider than they came, at the scale of head_dim."""

    keeps_norms = False

    def q(self, x, pos):
        return torch.cat((x, x.square().mean(-1, keepdim=True)), -1)

    k = q


class DefinedWider(Definition):
    def q(self, x, p, h):
        return np.append(x, (x**2).mean())

    k = q


@pytest.fixture(autouse=True)
def trials(monkeypatch):
    """The trials under names of their own, as an installed package would have them."""
    for registry, entries in (
        (SCHEMES, {"forgets": Forgets, "wider": Wider}),
        (DEFINITIONS, {"forgets": DefinedForgets, "wider": DefinedWider}),
    ):
        for name, entry in entries.items():
            monkeypatch.setitem(registry, name, entry)


def rotary(sites, **attention_options):
    return SchemeConfig("trial", "rotary", {"sites": list(sites)}, attention_options)


SEVERAL = {"name": "pair", "kind": "combined", "of": [{"name": "forgets", "kind": "forgets"}, QK]}
TRIALS = {
    "linear, v alone": (rotary("v", kind="linear"), "absolute"),
    "decay with v": (rotary("v", kind="decay"), "absolute"),
    "layers of several kinds": (SchemeConfig("t", "interleaved", {"layers": [ALIBI, SEVERAL]}), "relative"),
    "a forgetting gate under linear attention": (
        SchemeConfig("t", "forgets", attention={"kind": "linear"}),
        "relative",
    ),
    "a gate, a rotation and a penalty": (
        SchemeConfig("t", "combined", {"of": [{"name": "f", "kind": "forgets"}, QK, ALIBI]}),
        "relative",
    ),
    "wider q and k": (SchemeConfig("t", "wider"), "relative"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name.startswith("a gate,") else ()) for name in TRIALS]
)
def test_kinds_that_have_no_row_fit_the_seam_and_are_certified(name):
    scheme, promised = TRIALS[name]
    layers = 2 if scheme.kind == "interleaved" else 1
    certificate = certify(replace(certificate_config("nope", [f"model.num_layers={layers}"]), scheme=scheme))
    failed = {check.name: f"{check} {check.where}" for check in certificate.checks if not check.holds}
    assert failed == {} and certificate.defined and certificate.measured == certificate.promised == promised


def test_the_shared_parts_of_every_kind_are_drawn_alike():
    plain = build_model(certificate_config("nope"), VOCAB)
    whole = {name: [] for name, _ in plain.shared_parts()}
    for name, tensor in plain.shared_parts():
        whole[name].append(tensor)
    for scheme, lacks in (
        (rotary("vo", kind="decay"), {"attention.q", "attention.k"}),
        (rotary("qk", shared_kv=True), {"attention.v"}),
    ):
        config = replace(certificate_config("nope"), scheme=scheme)
        model = build_model(config, VOCAB)
        parts = {name: [] for name, _ in model.shared_parts()}
        for name, tensor in model.shared_parts():
            parts[name].append(tensor)
        assert whole.keys() - parts.keys() == lacks
        assert all(torch.equal(a, b) for name in parts for a, b in zip(whole[name], parts[name], strict=True))
        counted = num_parameters(config, VOCAB)
        assert sum(p.numel() for p in model.parameters()) == sum(counted.values())
        assert sum(counted.values()) < sum(num_parameters(certificate_config("nope"), VOCAB).values())


def test_equal_members_are_one_scheme_prepared_once(monkeypatch):
    prepared = []
    prepare = Rotary.prepare
    monkeypatch.setattr(Rotary, "prepare", lambda self, *at: prepared.append(self) or prepare(self, *at))
    scheme = SchemeConfig("t", "interleaved", {"layers": [QK, QK, NOPE]})
    config = replace(compose(["model=tiny", "model.num_layers=6"]), scheme=scheme)
    model = build_model(config, VOCAB)
    assert [type(layer) for layer in model.schemes] == [Rotary, Rotary, Scheme] * 2
    model(random_tokens(9))
    assert len(prepared) == 1


def test_what_is_made_of_nothing_or_adds_to_embeddings_in_a_layer_is_refused():
    shape = Shape(48, 6, 2, 16, num_layers=2)
    with pytest.raises(ConfigError, match=r"scheme\.of must be a list of schemes"):
        build_scheme(SchemeConfig("t", "combined", {"of": []}), shape)
    sines = {"name": "sinusoidal", "kind": "sinusoidal"}
    with pytest.raises(ConfigError, match="adds positions to the token embeddings once"):
        build_scheme(SchemeConfig("t", "interleaved", {"layers": [QK, sines]}), shape)


@pytest.mark.parametrize(
    "options, says",
    [
        ({"kind": "softmacs"}, "scheme.attention.kind='softmacs' is not known; did you mean 'softmax'"),
        ({"shared_kw": True}, "scheme.attention.shared_kw is not an option of 'softmax'; did you mean 'shared_kv'"),
        ({"shared_kv": 1}, "scheme.attention.shared_kv=1 must be true or false"),
        ({"kind": "decay", "shared_kv": True}, "needs a kind of attention that has keys and values"),
    ],
)
def test_a_kind_of_attention_that_cannot_be_is_refused(options, says):
    with pytest.raises(ConfigError) as refusal:
        build_kind(SchemeConfig("t", "nope", attention=options), shape_of(compose(["model=tiny"])))
    assert says in str(refusal.value)


def test_a_past_that_is_full_takes_no_more():
    model = build_model(certificate_config("nope"), VOCAB)
    pasts = model.pasts(4)
    with torch.no_grad():
        model.hidden(random_tokens(3), 0, pasts)
        assert pasts[0].num_bytes == 4 * 2 * 2 * 16 * 4  # keys and values of 2 heads of 16 float32, 4 tokens
        with pytest.raises(ConfigError, match="6 tokens do not fit a past that was made for 4"):
            model.hidden(random_tokens(3), 0, pasts)


def test_learned_numbers_are_drawn_before_they_are_certified():
    model = build_model(replace(certificate_config("nope"), scheme=SchemeConfig("t", "forgets")), VOCAB)
    assert not model.scheme.w.any()
    randomise(model)
    assert model.scheme.w.abs().min() > 0 and model.scheme.b.abs().min() > 0
