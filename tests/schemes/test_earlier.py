"""Hooks read the rows before each token: as a convolution does, never across a document's border, in pieces too."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from posbench.config import SchemeConfig
from posbench.model.decoder import build_model
from posbench.schemes import Shape, build_scheme
from posbench.schemes.earlier import EarlierRows
from posbench.verify import VOCAB, certificate_config, certify, random_tokens
from tests.refusals import refuses
from tests.rows import assert_same_gradients, difference, random
from tests.schemes.trials import trial

H, HKV, D, C, T = 6, 2, 16, 48, 40
SHAPE = Shape(C, H, HKV, D, num_layers=2, context_length=128)


def test_canon_is_torchs_depthwise_convolution_with_its_gradients_and_its_initial_weights():
    scheme = build_scheme(SchemeConfig("mine", "canon", {"sites": ["hidden", "q", "k", "v", "o"]}), SHAPE)[0]
    bound = torch.nn.Conv1d(C, C, 4, groups=C).weight.abs().max().item()
    for weight in scheme.parameters():
        assert 0.45 < weight.abs().max() < 0.5 and weight.std().item() == pytest.approx(12**-0.5, rel=0.15)
        assert bound <= 0.5
    scheme = scheme.double()
    for site, heads in (("hidden", None), ("q", H), ("k", HKV), ("v", HKV), ("o", H)):
        weight = getattr(scheme, f"{site}_weight")
        x = random(2, T, C) if heads is None else random(2, heads, T, D)
        rows = x if heads is None else x.transpose(1, 2).flatten(2)  # [B, T, channels]
        kernel = weight.reshape(rows.shape[-1], 1, 4).flip(-1)  # torch's last tap is the current token
        theirs = rows + F.conv1d(F.pad(rows.mT, (3, 0)), kernel, groups=rows.shape[-1]).mT
        theirs = theirs if heads is None else theirs.unflatten(2, (heads, D)).transpose(1, 2)
        ours = scheme.call_hook(site, x, None, EarlierRows())
        assert difference(ours, theirs) < 1e-14
        assert_same_gradients(ours, theirs, [weight], 1e-12)


def test_smear_and_key_offset_by_hand():
    smear = build_scheme(SchemeConfig("mine", "smear"), SHAPE).double()[0]
    torch.nn.init.normal_(smear.w)
    torch.nn.init.constant_(smear.s, 0.7)
    e = random(1, T, C)
    gate = torch.sigmoid(F.rms_norm(e, (C,))[:, 1:, :24] @ smear.w[0])[..., None]
    expected = torch.cat((e[:, :1], e[:, 1:] + 0.7 * gate * e[:, :-1]), 1)
    assert difference(smear.call_hook("embed", e, None, EarlierRows()), expected) < 1e-6  # of an epsilon
    options = {"sites": ["q", "k"], "fraction": 0.5}
    offset, plain = (
        build_scheme(SchemeConfig("mine", kind, options), SHAPE)[0] for kind in ("key_offset", "partial_rotary")
    )
    k, pos = random(1, HKV, T, D), plain.prepare(torch.arange(T), T)
    ours, expected = offset.call_hook("k", k, pos, EarlierRows()), plain.k(k, pos).clone()
    expected[:, :, 1:, D // 2 :] = k[:, :, :-1, D // 2 :]
    assert torch.equal(ours[:, :, 1:], expected[:, :, 1:]) and not ours[:, :, 0, D // 2 :].any()
    assert torch.equal(offset.call_hook("q", k, pos, EarlierRows()), plain.q(k, pos))


def test_the_short_convolution_of_the_guide_is_certified(tmp_path, monkeypatch):
    example = Path(__file__).parents[2] / "docs" / "short_convolution.py"
    (tmp_path / "mine.py").write_text(example.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    scheme = SchemeConfig("mine", "mine.py:ShortConvolution")
    certificate = certify(replace(certificate_config("nope", ["model.num_layers=1"]), scheme=scheme))
    assert certificate.holds and certificate.measured == "relative" and not certificate.text_only


@pytest.mark.parametrize(
    "name, says",
    [
        ("BackTooFar", r"earlier\(2\) must be between 0 and looks_back=1: set looks_back = 2 in the scheme's class"),
        ("BackFirst", r"BackFirst\.k\(self, x, earlier, pos\) must be k\(self, x, pos, earlier\)"),
    ],
)
def test_a_hook_that_reads_further_than_it_says_is_refused(name, says):
    config = replace(certificate_config("nope"), scheme=trial(name))
    refuses(says, lambda: build_model(config, VOCAB)(random_tokens(9)))
