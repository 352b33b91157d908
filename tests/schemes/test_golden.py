"""Every scheme has one golden loss: in nats, of a fixed small decoder in float64 on fixed tokens.

Certificates check a scheme's properties; this checks that it has not changed since it was added.
"""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from posbench.catalogue.choices import choices
from posbench.model.decoder import build_model
from posbench.verify import VOCAB, certificate_config, random_tokens, randomise

FILE = Path(__file__).with_name("golden.json")
GOLDEN = json.loads(FILE.read_text())


def golden(scheme):
    model = build_model(certificate_config(scheme), VOCAB)
    randomise(model)
    tokens = random_tokens()[:, : model.scheme.longest and model.scheme.longest - 5]
    with torch.no_grad():
        return model.double().nll(tokens[:, :-1], tokens[:, 1:], offset=5).mean().item()


@pytest.mark.parametrize("scheme", choices("scheme"))
def test_the_golden_value_of_every_scheme(scheme):
    value = golden(scheme)
    if scheme not in GOLDEN:
        pytest.fail(
            f"conf/scheme/{scheme}.yaml has no golden value yet. Once `posbench verify {scheme}` says what it should, "
            f'add\n\n  "{scheme}": {value!r}\n\nto tests/schemes/{FILE.name}, so that nobody changes it unawares.',
            pytrace=False,
        )
    if not abs(value - GOLDEN[scheme]) <= 1e-9:
        pytest.fail(
            f"{scheme} now computes something else: {value!r} nats instead of {GOLDEN[scheme]!r}.\n"
            "If that is meant, runs of before and after are not comparable: say so in the changelog and\n"
            f"write the new value to tests/schemes/{FILE.name}. If not, something this scheme uses has changed.",
            pytrace=False,
        )


def test_golden_values_tell_the_schemes_apart_and_name_no_other():
    assert set(GOLDEN) <= set(choices("scheme"))
    assert all(later - earlier > 1e-6 for earlier, later in pairwise(sorted(GOLDEN.values())))
