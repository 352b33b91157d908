"""A scheme that is defined up to some length: a learned table ends, and nothing is made up beyond it."""

import pytest
import torch

from posbench.composition import compose
from posbench.config import ConfigError, SchemeConfig
from posbench.model import build_model, check_scheme
from posbench.schemes import SCHEMES, Scheme, Shape, build_scheme
from posbench.schemes.learned import Learned
from posbench.verify import MODEL, VOCAB, certificate_config, certify, random_tokens

LEARNED = {"name": "learned", "kind": "learned"}
NOPE = {"name": "nope", "kind": "nope"}


def test_a_learned_table_adds_its_rows_and_begins_with_the_deviation_of_the_embeddings():
    scheme = Learned(Shape(48, 4, 4, 12, context_length=500, embedding_std=0.5))
    x = torch.zeros(2, 3, 48)
    assert torch.equal(scheme.embed(x, torch.tensor([7, 8, 499]))[1], scheme.table[[7, 8, 499]])
    assert scheme.longest == 500 and scheme.table.std().item() == pytest.approx(0.5, rel=0.02)


def test_the_table_is_drawn_from_the_seed():
    one, same, other = (build_model(compose(["scheme=learned", *MODEL, f"seed={n}"]), VOCAB) for n in (3, 3, 4))
    assert torch.equal(one.scheme.table, same.scheme.table) and not torch.equal(one.scheme.table, other.scheme.table)


def test_every_position_must_lie_within_the_length_and_any_length_is_within_none():
    model = build_model(certificate_config("learned"), VOCAB)
    assert model(random_tokens(28), offset=100).isfinite().all()
    with pytest.raises(ConfigError, match="defined up to 128 tokens, and this window reaches position 128"):
        model(random_tokens(29), offset=100)
    assert Scheme(Shape(48, 4, 4, 12)).longest is None


def test_a_scheme_made_of_others_is_defined_as_far_as_all_of_them():
    shape = Shape(48, 4, 4, 12, context_length=64)
    assert build_scheme(SchemeConfig("both", "combined", {"of": [NOPE, LEARNED]}), shape).longest == 64
    assert build_scheme(SchemeConfig("both", "interleaved", {"layers": [NOPE, NOPE]}), shape).longest is None


class Ends(Scheme):
    """At position 99, whatever it is trained on."""

    longest = 100

    def prepare(self, pos, length):
        assert int(pos.max()) < 100
        return pos


def test_certificates_stay_within_the_length(monkeypatch):
    monkeypatch.setitem(SCHEMES, "nope", Ends)
    row = certify(certificate_config("nope"))
    assert row.holds and row.longest == 100
    monkeypatch.setattr(Ends, "longest", 50)
    with pytest.raises(ConfigError, match="defined up to 50 tokens, too few to be certified"):
        certify(certificate_config("nope"))


def test_training_beyond_it_is_refused(monkeypatch):
    monkeypatch.setitem(SCHEMES, "nope", Ends)
    check_scheme(compose(["scheme=nope", *MODEL, "train.context_length=100"]))
    with pytest.raises(ConfigError, match=r"defined up to 100 tokens and train\.context_length=128 is longer"):
        check_scheme(compose(["scheme=nope", *MODEL]))
