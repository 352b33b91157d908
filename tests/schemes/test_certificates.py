"""The certificates hold for every file of conf/scheme, and each of them fails when the thing it certifies is broken."""

from dataclasses import replace
from itertools import combinations

import pytest
import torch

from posbench.attention import Past
from posbench.attention import ways as attention
from posbench.composition import choices, compose, read_row
from posbench.config import SchemeConfig
from posbench.schemes import SCHEMES, Scheme, alibi, rotary, transformer_xl
from posbench.verify import MODEL, certificate_config, certify, measures, relativity
from posbench.verify.certificates import SLOPE
from posbench.verify.gradients import gradients
from posbench.verify.specimen import Specimen
from tests.rows import ONE_OF_EACH_KIND

ONE_LAYER = "model.num_layers=1"
SUBSETS = [sites for size in range(5) for sites in combinations("qkvo", size)]


def failures(certificate):
    return {check.name for check in certificate.checks if not check.holds}


def keeps_its_promises(name, *overrides):
    certificate = certify(certificate_config(name, overrides))
    assert {check.name: str(check) for check in certificate.checks if not check.holds} == {}
    assert certificate.measured == certificate.promised
    assert certificate.scheme == name  # the file is named as the scheme is


@pytest.mark.parametrize("name", ONE_OF_EACH_KIND)
def test_a_row_of_each_kind_keeps_its_promises_in_one_layer(name):
    keeps_its_promises(name, ONE_LAYER)


@pytest.mark.slow
@pytest.mark.parametrize("name", choices("scheme"))
def test_every_scheme_keeps_its_promises(name):
    keeps_its_promises(name)


def test_a_row_of_each_kind_is_among_the_fast_tests():
    def kinds(names):
        rows = [read_row(name) for name in names]
        return {row.kind for row in rows} | {str(row.attention) for row in rows}

    assert kinds(ONE_OF_EACH_KIND) == kinds(choices("scheme"))


@pytest.mark.parametrize("name", ["qkvo_rope", "rope_nope_interleaved", "decay_vo_rope", "learned"])
def test_what_is_certified_is_what_the_words_compose(name):
    composed = compose([f"scheme={name}", *MODEL])
    assert certificate_config(name).scheme == composed.scheme
    assert replace(certificate_config(name), model=composed.model) == composed


def subset(sites):
    scheme = SchemeConfig(name="subset", kind="rotary", options={"sites": list(sites), "base": 10000.0})
    return replace(certificate_config("nope", [ONE_LAYER]), scheme=scheme)


@pytest.mark.parametrize("sites", SUBSETS, ids=lambda sites: "".join(sites) or "none")
def test_a_rotary_scheme_is_relative_if_and_only_if_its_rotations_come_in_pairs(sites):
    specimen = Specimen.of(subset(sites))
    with torch.no_grad():
        measured = relativity(measures.shift(specimen))
    assert measured == ("relative" if sites in [(), ("q", "k"), ("v", "o"), tuple("qkvo")] else "absolute")
    assert specimen.promises_relative == (measured == "relative")


@pytest.mark.slow
@pytest.mark.parametrize("sites", SUBSETS, ids=lambda sites: "".join(sites) or "none")
def test_rotations_of_any_sites_keep_their_promises(sites):
    assert certify(subset(sites)).holds


def test_the_eleven_schemes_are_what_the_specification_says():
    for sites in ("q", "k", "v", "o", "qk", "vo", "qkv", "qkvo"):
        scheme = certificate_config(f"{sites}_rope").scheme
        assert scheme.kind == "rotary" and "".join(scheme.options["sites"]) == sites
    assert {"nope", "alibi", "sinusoidal"} <= set(choices("scheme"))


# What has gone wrong in public code, and the certificate that must notice.


def turn_with(**broken):
    """`rotary.turn` with one thing changed."""

    def turn(x, by, inverse=False):
        cos, sin = by.cos.to(x.dtype), by.sin.to(x.dtype)
        if inverse:
            sin = -sin
            cos = -cos if broken.get("negate_cos") else cos
        if broken.get("interleaved"):
            first, second = x[..., 0::2], x[..., 1::2]
            return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1) * broken.get("temperature", 1)

    return turn


def angles_in(dtype):
    def angles(self, pos, length):
        return (pos.to(dtype)[:, None] * rotary.inverse_frequencies(self.shape.head_dim, self.base).to(dtype)).double()

    return angles


ROTARY_FAULTS = {
    "the inverse negates the cosine too": (rotary, "turn", turn_with(negate_cos=True), "fp64 trip kernel"),
    "pairs interleaved": (rotary, "turn", turn_with(interleaved=True), "fp64 kernel"),
    "a temperature in the cosine and sine": (rotary, "turn", turn_with(temperature=1.1), "norm fp64 kernel"),
    "o not inverted": (rotary.Rotary, "o", lambda self, x, pos: rotary.turn(x, pos), "shift kernel fp64"),
    "o left out": (rotary.Rotary, "o", lambda self, x, pos: x, "shift kernel fp64"),
    "v rotated twice": (
        rotary.Rotary,
        "v",
        lambda self, x, pos: rotary.turn(rotary.turn(x, pos), pos),
        "shift trip kernel fp64",
    ),
    "positions in bfloat16": (rotary.Rotary, "angles", angles_in(torch.bfloat16), "fp64"),
    "angles in float32": (rotary.Rotary, "angles", angles_in(torch.float32), "fp64 fp32"),
    "half the angle": (rotary.Rotary, "angles", lambda self, *at: angles_in(torch.float64)(self, *at) / 2, "fp64"),
}


@pytest.mark.parametrize("fault", ROTARY_FAULTS)
def test_a_fault_in_rotation_is_noticed(fault, monkeypatch):
    where, name, broken, noticed_by = ROTARY_FAULTS[fault]
    monkeypatch.setattr(where, name, broken)
    assert failures(certify(certificate_config("qkvo_rope", [ONE_LAYER]))) >= set(noticed_by.split())


def turn_in_bfloat16_all_but(pair):
    """`rotary.turn` that leaves one pair of channels as it came, in bfloat16 alone."""
    turn = rotary.turn

    def broken(x, by, inverse=False):
        kept = torch.arange(x.shape[-1]) % (x.shape[-1] // 2) == pair
        return torch.where(kept & (x.dtype == torch.bfloat16), x, turn(x, by, inverse))

    return broken


@pytest.mark.parametrize("pair", [0, 7])
@pytest.mark.parametrize("name", ["qk_rope", "vo_rope", "q_rope"])
def test_a_pair_that_bfloat16_leaves_as_it_came_is_noticed(name, pair, monkeypatch):
    monkeypatch.setattr(rotary, "turn", turn_in_bfloat16_all_but(pair))
    assert failures(certify(certificate_config(name, [ONE_LAYER]))) == {"bf16"}


def zeros_for(way):
    return lambda q, *rest: torch.zeros_like(way(q, *rest))


def forgetful(extended):
    """`Past.extended` whose keys and values of earlier pieces are gone."""

    def broken(self, *new):
        return tuple(
            None if part is None else torch.cat((x[:, :, : -part.shape[2]] * 0, part), 2)
            for x, part in zip(extended(self, *new), new, strict=True)
        )

    return broken


PATHS = {
    "fused": (attention, "fused", zeros_for, ["nope", "qkvo_rope"]),
    "masked": (attention, "masked", zeros_for, ["alibi"]),
    "blocks": (attention, "blocks", zeros_for, ["alibi", "nope", "qkvo_rope", "sinusoidal"]),
    "flex": (attention, "flex", zeros_for, ["alibi"]),
    "pieces": (Past, "extended", forgetful, ["alibi", "nope", "qkvo_rope", "sinusoidal"]),
}


@pytest.mark.parametrize("path, name", [(path, name) for path, (*_, names) in PATHS.items() for name in names])
def test_a_broken_path_is_noticed_and_named(path, name, monkeypatch):
    where, function, broken, _ = PATHS[path]
    monkeypatch.setattr(where, function, broken(getattr(where, function)))
    certificate = certify(certificate_config(name, [ONE_LAYER]))
    for numbers in ("fp32", "bf16"):
        assert not certificate[numbers].holds and certificate[numbers].where.endswith(path)


def without_gradient(way):
    """A way that attention runs whose bias gets no gradient."""
    return lambda q, k, v, bias, *rest: way(q, k, v, lambda *at: bias(*at).detach(), *rest)


@pytest.mark.parametrize("name", ["t5", "kerple", "fire", "shaw", "fox"])
@pytest.mark.parametrize("path", ["masked", "blocks"])
def test_a_way_that_gives_a_learned_bias_no_gradient_is_noticed_and_named(path, name, monkeypatch):
    monkeypatch.setattr(attention, path, without_gradient(getattr(attention, path)))
    with torch.no_grad():
        error, where = gradients(Specimen.of(certificate_config(name, [ONE_LAYER])))
    assert error > SLOPE and where.startswith(f"{path}, ")


def test_a_shared_vector_without_a_gradient_is_noticed_and_named(monkeypatch):
    q = transformer_xl.TransformerXLLayer.q

    def broken(self, x, pos):
        return torch.cat((q(self, x, pos)[..., :16].detach(), q(self, x, pos)[..., 16:]), dim=-1)

    monkeypatch.setattr(transformer_xl.TransformerXLLayer, "q", broken)
    certificate = certify(certificate_config("transformer_xl", [ONE_LAYER]))
    assert failures(certificate) == {"grad"}


def test_a_scheme_that_is_absolute_beyond_the_training_length_is_asked_there():
    with torch.no_grad():
        drift = measures.shift(Specimen.of(certificate_config("fire", ["train.context_length=1024"])))
    assert relativity(drift) == "absolute"


def test_what_learns_nothing_has_no_gradient_to_certify():
    assert certify(certificate_config("nope", [ONE_LAYER]))["grad"].measured is None


def test_a_base_that_is_not_used_is_noticed(monkeypatch):
    frequencies = rotary.inverse_frequencies
    monkeypatch.setattr(rotary, "inverse_frequencies", lambda head_dim, *rest: frequencies(head_dim, 10000.0))
    assert "fp64" in failures(certify(certificate_config("qk_rope", [ONE_LAYER, "scheme.base=500000"])))


def test_reversed_slopes_are_noticed(monkeypatch):
    exponents = alibi.exponents
    monkeypatch.setattr(alibi, "exponents", lambda num_heads: exponents(num_heads).flip(0))
    assert "fp64" in failures(certify(certificate_config("alibi", [ONE_LAYER])))


def scaled_bias(bias):
    """A bias that is divided by sqrt(D), as the product is."""

    def made(self, *at):
        return lambda b, h, i, j: bias(self, *at)(b, h, i, j) / self.shape.head_dim**0.5

    return made


def test_a_scaled_bias_is_noticed(monkeypatch):
    bias = alibi.Alibi.bias
    monkeypatch.setattr(alibi.Alibi, "bias", scaled_bias(bias))
    assert "fp64" in failures(certify(certificate_config("alibi", [ONE_LAYER])))


class LooksAhead(Scheme):
    """Every token's key is its successor's."""

    def k(self, x, pos):
        return x.roll(-1, dims=2)


class Boastful(Scheme):
    """Promises to be relative with a bias that is not; a bias of the key alone would be, since softmax drops it."""

    def bias(self, q, gate, at):
        return lambda b, h, i, j: -0.001 * (i + at.query) * (j + at.key)


class Modest(Scheme):
    """Promises to be absolute with nothing that is."""

    is_relative = False


class Deaf(Scheme):
    """Nothing reaches attention: what a broken forward pass would look like to a test of causality alone."""

    def embed(self, x, pos):
        return x * 0


@pytest.mark.parametrize(
    "scheme, noticed_by", [(LooksAhead, "future"), (Boastful, "shift"), (Modest, "shift"), (Deaf, "future")]
)
def test_a_scheme_that_breaks_its_word_is_noticed(scheme, noticed_by, monkeypatch):
    monkeypatch.setitem(SCHEMES, "broken", scheme)
    certificate = certify(replace(certificate_config("nope", [ONE_LAYER]), scheme=SchemeConfig("broken", "broken")))
    assert not certificate.holds and not certificate[noticed_by].holds
    assert not certificate.defined  # the reference has no such kind, and does not pretend to


class KeyBias(Scheme):
    """BLOOM's ALiBi: a bias that grows with the key's index, relative because a softmax drops what a row shares.

    Relative in exact arithmetic, that is: a million tokens out, float32 has no room left for the scores beside it.
    """

    def bias(self, q, gate, at):
        return lambda b, h, i, j: 0.01 * (j + at.key).double()


def test_relative_is_measured_not_read_off_the_formula(monkeypatch):
    monkeypatch.setitem(SCHEMES, "key_bias", KeyBias)
    certificate = certify(replace(certificate_config("nope", [ONE_LAYER]), scheme=SchemeConfig("key_bias", "key_bias")))
    assert certificate["shift"].holds and not certificate["fp32"].holds
