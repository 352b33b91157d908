"""The certificates hold for every file of conf/scheme, and each of them fails when the thing it certifies is broken."""

import copy
import io
import re
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
import torch
from rich.console import Console

from posbench.attention import KVCache, kernels
from posbench.catalogue.choices import choices
from posbench.config import SchemeConfig
from posbench.schemes import SCHEMES, Scheme, alibi, rotary
from posbench.verify import certificate_config, certify, list_schemes, measures, relativity, verify
from posbench.verify.certificates import ROUNDINGS, SLOPE
from posbench.verify.gradients import gradients, training_errors
from posbench.verify.random_model import RandomModel
from tests.refusals import refuses
from tests.rows import ONE_OF_EACH, rows
from tests.schemes import trials
from tests.schemes.trials import trial

ONE_LAYER = "model.num_layers=1"
SUBSETS = [sites for size in range(5) for sites in combinations("qkvo", size)]


def failures(certificate):
    return {check.name for check in certificate.checks if not check.holds}


@pytest.mark.parametrize("name", rows())
def test_every_row_keeps_its_promises(name):
    fast = [ONE_LAYER] if name in ONE_OF_EACH else []
    certificate = certify(certificate_config(name, fast))
    assert {check.name: f"{check} {check.worst_path}" for check in certificate.checks if not check.holds} == {}
    assert certificate.measured == certificate.promised and certificate.defined
    assert certificate.scheme == name  # the file is named as the scheme is


OPTIONS = [  # rows with options that no row of conf/scheme has
    "alibi +scheme.exponents=[-1,-8,-0.5,-2,-3,-4]",
    "gdn scheme.attention.convolution=0",
    "gdn scheme.attention.convolution=2 scheme.attention.output_gate=false",
    "gdn scheme.attention.decay=channel scheme.attention.output_gate=false",
    "gdn scheme.attention.shared_kv=true",
    "gdn scheme.kind=rotary +scheme.sites=[q,k,v,o]",
    "gdn scheme.kind=canon",
    "gdn model.num_kv_heads=6",
    "mla scheme.attention.latent_heads=3 scheme.attention.shared=0.5",
    "mla +scheme.rescale=yarn +scheme.factor=3",
    "mla_nope scheme.kind=fox",
    "mla_nope scheme.kind=ssmax +scheme.window=20",
    "gqa_qk_rope scheme.attention.kv_heads=3 model.num_kv_heads=6",
    "gqa_qk_rope +scheme.window=20",
    "path +scheme.convolution=3",
    "selective_rope +scheme.convolution=4",
    "qk_rope +scheme.rescale=yarn +scheme.factor=3",
    "q_rope +scheme.rescale=yarn +scheme.factor=3",
    "rotary_pct_25 +scheme.rescale=yarn +scheme.factor=3",
    "p_rope_25 +scheme.rescale=yarn +scheme.factor=3",
    "hope +scheme.rescale=yarn +scheme.factor=3",
    "qk_rope_learned +scheme.rescale=yarn +scheme.factor=3",
    "qk_rope_learned_base +scheme.rescale=yarn +scheme.factor=3",
    "xpos +scheme.rescale=yarn +scheme.factor=3",
    "vo_rope +scheme.rescale=yarn +scheme.factor=3",
    "linear_qk_rope +scheme.rescale=yarn +scheme.factor=3",
    "qk_rope +scheme.attention.output_gate=head",
    "sink_nope +scheme.attention.output_gate=head",
    "shared_kv_qkvo_rope +scheme.attention.output_gate=head",
    "qk_rope +scheme.attention.output_gate=channel",
    "sink_nope +scheme.attention.output_gate=channel",
    "shared_kv_qkvo_rope +scheme.attention.output_gate=channel",
]


@pytest.mark.slow
@pytest.mark.parametrize("row", OPTIONS)
def test_options_keep_the_promises_of_their_scheme(row, monkeypatch):
    monkeypatch.setattr("posbench.verify.random_model.LENGTH", 80)
    name, *words = row.split()
    certificate = certify(certificate_config(name, [ONE_LAYER, *words]))
    assert not failures(certificate) and certificate.defined and certificate.measured == certificate.promised


@pytest.mark.parametrize(
    "name", ["repo", *(pytest.param(name, marks=pytest.mark.slow) for name in ("path", "grape_ap"))]
)
def test_heads_may_have_the_usual_width(name):
    words = [ONE_LAYER, "model.head_dim=null", "model.num_kv_heads=null"]
    assert not failures(certify(certificate_config(name, words)))


@pytest.mark.parametrize("sites", SUBSETS, ids=lambda sites: "".join(sites) or "none")
def test_a_rotary_scheme_is_relative_if_and_only_if_its_rotations_come_in_pairs(sites):
    scheme = SchemeConfig("subset", "rotary", {"sites": list(sites), "base": 10000.0})
    random_model = RandomModel.build(replace(certificate_config("nope", [ONE_LAYER]), scheme=scheme))
    with torch.no_grad():
        measured = relativity(measures.shift(random_model))
    assert measured == ("relative" if sites in [(), ("q", "k"), ("v", "o"), tuple("qkvo")] else "absolute")
    assert random_model.promises_relative == (measured == "relative")


# What has gone wrong in public code, and the certificate that must notice.


def turn_with(**broken):
    """Return `rotary.turn` with one change."""

    def turn(x, rotation, inverse=False):
        cos, sin = rotation.cos.to(x.dtype), rotation.sin.to(x.dtype)
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
        return (
            pos.to(dtype)[..., None] * rotary.inverse_frequencies(self.shape.head_dim, self.base).to(dtype)
        ).double()

    return angles


def scaled_bias(self, q, k, gates, at):
    """Return ALiBi's bias divided by sqrt(D), like the product."""
    return lambda b, h, i, j: torch.exp2(self.exponents[h]) * -at.distance(b, i, j) / self.shape.head_dim**0.5


Rotary, Alibi = rotary.Rotary, alibi.Alibi
FAULTS = {
    "the inverse negates the cosine too": (rotary, "turn", turn_with(negate_cos=True), "fp64 trip offset"),
    "pairs interleaved": (rotary, "turn", turn_with(interleaved=True), "fp64 offset"),
    "a temperature in the cosine and sine": (rotary, "turn", turn_with(temperature=1.1), "norm fp64 offset"),
    "o not inverted": (Rotary, "o", lambda self, x, pos: rotary.turn(x, pos), "shift offset fp64"),
    "o left out": (Rotary, "o", lambda self, x, pos: x, "shift offset fp64"),
    "v rotated twice": (Rotary, "v", lambda self, x, pos: rotary.turn(rotary.turn(x, pos), pos), "shift trip fp64"),
    "positions in bfloat16": (Rotary, "angles", angles_in(torch.bfloat16), "fp64"),
    "angles in float32": (Rotary, "angles", angles_in(torch.float32), "fp64 fp32"),
    "half the angle": (Rotary, "angles", lambda self, *at: angles_in(torch.float64)(self, *at) / 2, "fp64"),
    "a base that is not used": (Rotary, "frequencies", lambda self, device=None: 1e5 ** (-torch.arange(8) / 8), "fp64"),
    "slopes reversed": (alibi, "exponents", lambda H: torch.arange(-H, 0.0), "fp64"),
    "a bias that is scaled": (Alibi, "bias", scaled_bias, "fp64"),
}


# One for each certificate is fast.
FAST = (
    "the inverse negates",
    "pairs interleaved",
    "a temperature",
    "o left out",
    "angles in float32",
    "a bias that is",
)
marked = [pytest.param(fault, marks=[] if fault.startswith(FAST) else pytest.mark.slow) for fault in FAULTS]


@pytest.mark.parametrize("fault", marked)
def test_a_fault_is_noticed(fault, monkeypatch):
    owner, name, broken, noticed_by = FAULTS[fault]
    monkeypatch.setattr(owner, name, broken)
    row = "alibi" if owner in (alibi, Alibi) else "qkvo_rope"
    assert failures(certify(certificate_config(row, [ONE_LAYER]))) >= set(noticed_by.split())


@pytest.mark.parametrize("name, pair", [("qk_rope", 0), ("vo_rope", 7), ("q_rope", 7)])
def test_a_pair_that_bfloat16_leaves_as_it_came_is_noticed(name, pair, monkeypatch):
    turn = rotary.turn

    def broken(x, rotation, inverse=False):
        unturned = torch.arange(x.shape[-1]) % (x.shape[-1] // 2) == pair
        return torch.where(unturned & (x.dtype == torch.bfloat16), x, turn(x, rotation, inverse))

    monkeypatch.setattr(rotary, "turn", broken)
    assert failures(certify(certificate_config(name, [ONE_LAYER]))) == {"bf16"}


def zeros_for(kernel):
    return lambda q, *rest: torch.zeros_like(kernel(q, *rest))


def forgetful(append):
    """Return a `KVCache.append` that drops keys and values of earlier pieces."""

    def broken(self, *new, window=None):
        return tuple(
            None if part is None else torch.cat((x[:, :, : -part.shape[2]] * 0, part), 2)
            for x, part in zip(append(self, *new, window=window), new, strict=True)
        )

    return broken


PATHS = {
    "fused": (kernels, "fused", zeros_for, ["nope", "qkvo_rope"]),
    "masked": (kernels, "masked", zeros_for, ["alibi"]),
    "blocks": (kernels, "blocks", zeros_for, ["alibi", "nope", "sinusoidal"]),
    "flex": (kernels, "flex", zeros_for, ["alibi"]),
    "pieces": (KVCache, "append", forgetful, ["alibi", "nope", "sinusoidal"]),
}


@pytest.mark.parametrize("path, name", [(path, name) for path, (*_, names) in PATHS.items() for name in names])
def test_a_broken_path_is_noticed_and_named(path, name, monkeypatch):
    owner, function, broken, _ = PATHS[path]
    monkeypatch.setattr(owner, function, broken(getattr(owner, function)))
    certificate = certify(certificate_config(name, [ONE_LAYER]))
    for numbers in ("fp32", "bf16"):
        assert not certificate[numbers].holds and certificate[numbers].worst_path.endswith(path)


def without_gradient(kernel):
    """Return a kernel whose bias gets no gradient."""

    def broken(q, k, v, scoring):
        return kernel(q, k, v, scoring._replace(bias=lambda *at: scoring.bias(*at).detach()))

    return broken


@pytest.mark.parametrize("name", ["t5", "fire", "cope", "fox"])
@pytest.mark.parametrize("path", ["masked", "short", "blocks"])
def test_a_way_that_gives_a_learned_bias_no_gradient_is_noticed_and_named(path, name, monkeypatch):
    monkeypatch.setattr(kernels, path, without_gradient(getattr(kernels, path)))
    with torch.no_grad():
        error, worst = gradients(RandomModel.build(certificate_config(name, [ONE_LAYER])))
    assert error > SLOPE and worst.startswith(f"{path}, ")


@pytest.mark.parametrize("scale", [0.0, 0.9999, 1.0])
def test_a_wrong_gradient_is_told_from_the_kinks_of_a_piecewise_linear_bias(scale):
    config = replace(certificate_config("nope", [ONE_LAYER]), scheme=trial("Kinked", scale=scale))
    assert failures(certify(config)) == ({"grad"} if scale < 1 else set())


def test_a_scheme_that_is_absolute_beyond_the_training_length_is_asked_there():
    with torch.no_grad():
        drift = measures.shift(RandomModel.build(certificate_config("fire", ["train.context_length=1024"])))
    assert relativity(drift) == "absolute"


@pytest.mark.parametrize(
    "name, noticed_by", [("LooksAhead", "future"), ("Boastful", "shift"), ("Modest", "shift"), ("Deaf", "future")]
)
def test_a_scheme_that_breaks_its_word_is_noticed(name, noticed_by):
    certificate = certify(replace(certificate_config("nope", [ONE_LAYER]), scheme=trial(name)))
    assert not certificate[noticed_by].holds
    assert not certificate.defined  # the reference has no such kind, and does not pretend to


def test_relative_is_measured_not_read_off_the_formula():
    certificate = certify(replace(certificate_config("nope", [ONE_LAYER]), scheme=trial("KeyBias")))
    assert certificate["shift"].holds and not certificate["fp32"].holds


# The paths that training takes, which `--compiled` adds.

FORMATS = {"fp32": (torch.float32, 2.0**-24), "bf16": (torch.bfloat16, 2.0**-8)}


def beyond(name, number_format):
    """Return the paths of a scheme whose errors are beyond the limit."""
    random_model, (dtype, rounding) = RandomModel.build(certificate_config(name)), FORMATS[number_format]
    narrow = copy.deepcopy(random_model.narrow)
    narrow.compute_dtype = dtype
    errors = dict(training_errors(random_model, narrow, dtype, rounding, compiled=False))
    assert len(errors) >= len(list(narrow.parameters()))
    return {path: error for path, error in errors.items() if not error <= ROUNDINGS[number_format]}


FURTHER = ("nope", "fire", "selective_rope", "dape", "qk_rope_learned", "linear_alibi")


@pytest.mark.parametrize("number_format", FORMATS)
@pytest.mark.parametrize(
    "name",
    ["qkvo_rope", "alibi", "t5", "fox", "gdn", *(pytest.param(name, marks=pytest.mark.slow) for name in FURTHER)],
)
def test_gradients_of_all_weights_are_those_of_float64(name, number_format):
    assert beyond(name, number_format) == {}


def narrow_kernel(monkeypatch, kernel):
    """Replace the CPU's kernels for biased attention, except in float64, which is the reference."""
    for path in ("masked", "short"):
        exact = getattr(kernels, path)
        monkeypatch.setattr(
            kernels,
            path,
            lambda q, *rest, exact=exact: exact(q, *rest) if q.dtype == torch.float64 else kernel(exact, q, *rest),
        )


@pytest.mark.parametrize("number_format", FORMATS)
def test_a_gradient_that_misses_a_term_is_noticed(number_format, monkeypatch):
    narrow_kernel(monkeypatch, lambda exact, q, k, v, *rest: exact(q, k, v.detach(), *rest))
    assert any("qkv" in path for path in beyond("alibi", number_format))


# What `posbench verify` and `posbench schemes` print.


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=80)


def trial_words(name):
    """Return the overrides for a scheme of `trials.py`."""
    return ["nope", f"scheme.name={name.lower()}", f"scheme.kind={trial(name).kind}"]


@pytest.mark.slow
def test_verify_takes_names_and_overrides_and_prints_a_row_each(console):
    assert verify(["vo_rope", "cope", "model.num_layers=1"], console)
    lines = console.file.getvalue().splitlines()
    for name in ("vo_rope", "cope"):
        row = next(line.split() for line in lines if line.split()[:1] == [name])
        assert row[1] == "rel" and row[-1] == "ok" and len(row) == 12
    assert lines[-1] == "2 schemes: all checks passed" and max(map(len, lines)) <= 80


LINE = 1 + Path(trials.__file__).read_text().splitlines().index("        slope = self.log_a.float().exp()")
FAILED = {
    "Modest": "shift is 0, must be above 0.001 (promised absolute, measured relative)",
    "Deaf": "there is no NumPy reference of this scheme",
    "Rounds": f"trials.py, line {LINE}: your hook rounds to float32: use x.to(self.w.dtype)",
    "RoundsAngles": "numbers of each token round, so compute and return float64 in gate (x.double())",
    "RootOfNegative": "the logits are NaN",
}


@pytest.mark.parametrize("name", FAILED)
def test_verify_fails_with_the_reason(name, console):
    assert not verify([*trial_words(name), ONE_LAYER], console)
    output = " ".join(console.file.getvalue().split())
    assert f"FAIL {name.lower()}: " in output and FAILED[name] in output
    assert output.endswith(f"1 of 1 scheme failed: {name.lower()}")
    assert name != "RootOfNegative" or output.count("FAIL") == 1


def test_an_error_in_a_later_scheme_keeps_the_results_of_those_before_it(console):
    path = Path(trials.__file__)
    refuses(
        r"return G of 1 or 2 \(here shape\.num_heads=6 and shape\.num_kv_heads=2",
        verify,
        ["nope", f"{path}:OfKeysToo", "alibi", ONE_LAYER],
        console,
    )
    assert "\nnope " in console.file.getvalue() and "1 scheme: all checks passed" in console.file.getvalue()


def test_queries_that_round_to_float32_are_refused_by_their_line(console):
    words = [*trial_words("RoundsQueries"), ONE_LAYER]
    refuses(r"trials\.py, line \d+: your hook rounds to float32", verify, words, console)


def test_a_scheme_for_text_only_passes_and_is_marked(console):
    assert verify([*trial_words("Bump"), ONE_LAYER], console)
    output = " ".join(console.file.getvalue().split())
    assert "Bump is for text only: its hooks take positions [T]" in output
    assert next(line for line in console.file.getvalue().splitlines() if line.startswith("bump ")).endswith(" text")
    assert output.endswith("1 scheme: all checks passed")


@pytest.mark.slow
def test_schemes_are_listed_with_their_promises(console, tmp_path):
    (tmp_path / "scheme").mkdir()
    for name, row in {
        "turns": "kind: interleaved\nlayers: [qk_rope, pair]",
        "pair": "kind: combined\nof: [qk_rope, vo_rope]",
    }.items():
        (tmp_path / "scheme" / f"{name}.yaml").write_text(f"# By turns.\nname: {name}\n{row}\n")
    list_schemes(console, tmp_path)
    output = console.file.getvalue()
    assert all(f"\n{name}" in output for name in choices("scheme"))
    assert f"kinds: {', '.join(SCHEMES)}" in " ".join(output.split())
    groups = ("no position", "nope", "rotations", "qk_rope", "biases", "alibi", "added", "earlier", "canon_nope")
    assert [output.index(f"\n{row}") for row in groups] == sorted(output.index(f"\n{row}") for row in groups)
    assert re.search(r"\nturns +relative +By turns\.", output)
    assert verify(["turns", f"--config-dir={tmp_path}"], console)


class RowZero(Scheme):
    """The bias of the first sequence for all of them."""

    def bias(self, q, k, gates, at):
        scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).transpose(-1, -2)
        return lambda b, h, i, j: scores[0, h, i, j].clone()

    reads_keys = True


class Deaf(Scheme):
    """A scheme whose queries and values send no gradient back."""

    def q(self, x, pos):
        return x.detach()

    v = q


class FarAbsolute(rotary.Rotary):
    """Relative up to a thousand tokens."""

    def prepare(self, pos, length):
        return super().prepare(pos.clamp(max=1000), length)


@pytest.mark.parametrize("cls, broken", [(RowZero, "batch"), (Deaf, "grad"), (FarAbsolute, "shift")])
def test_a_scheme_of_ones_own_that_is_wrong_fails(cls, broken, monkeypatch):
    name = cls.__name__.lower()
    monkeypatch.setitem(SCHEMES, name, cls)
    config = certificate_config("qk_rope" if cls is FarAbsolute else "nope", [ONE_LAYER])
    config = replace(config, scheme=replace(config.scheme, name=name, kind=name))
    assert broken in failures(certify(config))
