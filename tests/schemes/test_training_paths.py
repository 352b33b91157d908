"""Gradients of every weight in the formats that runs use, and the compiled blocks that `verify --compiled` adds."""

import copy

import pytest
import torch

from posbench.attention import ways
from posbench.verify import certificate_config
from posbench.verify.certificates import ROUNDINGS
from posbench.verify.specimen import Specimen
from posbench.verify.training import training_errors

FORMATS = {"fp32": (torch.float32, 2.0**-24), "bf16": (torch.bfloat16, 2.0**-8)}


def beyond(name, how, compiled=False):
    """The paths of a scheme whose errors are beyond the limit."""
    specimen, (dtype, rounding) = Specimen.of(certificate_config(name)), FORMATS[how]
    narrow = copy.deepcopy(specimen.narrow)
    narrow.compute_dtype = dtype
    errors = dict(training_errors(specimen, narrow, dtype, rounding, compiled))
    assert len(errors) >= len(list(narrow.parameters()))
    return {path: error for path, error in errors.items() if not error <= ROUNDINGS[how]}


@pytest.mark.parametrize("how", FORMATS)
@pytest.mark.parametrize("name", ["nope", "qkvo_rope", "alibi", "t5", "fire", "fox", "qk_rope_learned", "linear_alibi"])
def test_gradients_of_all_weights_are_those_of_float64(name, how):
    assert beyond(name, how) == {}


def broken(monkeypatch, way):
    """The CPU's usual way of biased attention replaced, but for the float64 that it is held to."""
    whole = ways.masked

    def masked(q, k, v, bias, scale):
        return (whole if q.dtype == torch.float64 else way)(q, k, v, bias, scale)

    monkeypatch.setattr(ways, "masked", masked)
    return whole


@pytest.mark.parametrize("how", FORMATS)
def test_a_gradient_that_misses_a_term_is_noticed(how, monkeypatch):
    whole = broken(monkeypatch, lambda q, k, v, *rest: whole(q, k, v.detach(), *rest))
    assert any("qkv" in path for path in beyond("alibi", how))


def test_a_learned_bias_without_gradient_is_noticed(monkeypatch):
    whole = broken(monkeypatch, lambda q, k, v, bias, scale: whole(q, k, v, lambda *at: bias(*at).detach(), scale))
    assert set(beyond("t5", "fp32")) == {"eager gradient of scheme.table"}
