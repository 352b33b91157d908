"""Curves that the site draws equal formulas by hand."""

import numpy as np
import pytest
from scheme_plots import curves_of

from posbench.composition.compose import compose
from posbench.model.decoder import build_model
from posbench.schemes.alibi import slopes

SMALL = ["model.d_model=64", "model.num_heads=4", "model.head_dim=16", "train.context_length=64"]
FREQUENCIES = 10000.0 ** (-np.arange(0, 16, 2) / 16)


def scheme(name):
    return build_model(compose([f"scheme={name}", "model=tiny", *SMALL]), 64).scheme.first


def test_alibis_curve_is_its_penalty_and_its_values_arrive_as_they_were():
    curves = curves_of(scheme("alibi"), 50)
    assert curves.value is None and curves.score is not None
    assert curves.score == pytest.approx(-np.outer(slopes(4).numpy(), curves.distances))


def test_of_a_rotation_equal_content_scores_the_sum_of_cosines():
    """Up to the sampling of contents: over 256 of them the mean square of a channel is 1 to about 0.1."""
    curves = curves_of(scheme("qk_rope"), 50)
    assert curves.score is not None and curves.value is None
    expected = 2 * (np.cos(np.outer(curves.distances, FREQUENCIES)) - 1).sum(1) / 4
    assert np.abs(curves.score - expected).max() < 0.3
    values = curves_of(scheme("vo_rope"), 50)
    assert values.score is None and values.value is not None
    assert np.abs(values.value - np.cos(np.outer(values.distances, FREQUENCIES)).mean(1)).max() < 0.1
