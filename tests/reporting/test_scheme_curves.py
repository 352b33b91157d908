"""What `posbench schemes --plot` draws: the curves against formulas by hand, and the files."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from posbench.composition import compose
from posbench.model import build_model
from posbench.reporting.scheme_curves import curves_of, long_term_decay, similarity
from posbench.reporting.scheme_plots import plot_schemes
from posbench.schemes import Scheme
from posbench.schemes.alibi import slopes

SMALL = ["model.d_model=64", "model.num_heads=4", "model.head_dim=16", "train.context_length=64"]
FREQUENCIES = 10000.0 ** (-np.arange(0, 16, 2) / 16)


def scheme(name: str) -> Scheme:
    return build_model(compose([f"scheme={name}", "model=tiny", *SMALL]), 64).scheme


def test_alibis_curve_is_its_penalty_and_its_values_arrive_as_they_were() -> None:
    curves = curves_of(scheme("alibi"), 50)
    assert curves.value is None and curves.score is not None
    assert curves.score == pytest.approx(-np.outer(slopes(4).numpy(), curves.distances))


def test_of_a_rotation_equal_content_scores_the_sum_of_cosines() -> None:
    """Up to the sampling of contents: over 256 of them the mean square of a channel is 1 to about 0.1."""
    curves = curves_of(scheme("qk_rope"), 50)
    assert curves.score is not None and curves.value is None
    expected = 2 * (np.cos(np.outer(curves.distances, FREQUENCIES)) - 1).sum(1) / 4
    assert np.abs(curves.score - expected).max() < 0.3
    values = curves_of(scheme("vo_rope"), 50)
    assert values.score is None and values.value is not None
    assert np.abs(values.value - np.cos(np.outer(values.distances, FREQUENCIES)).mean(1)).max() < 0.1


def test_of_what_is_added_positions_are_as_alike_as_their_sines() -> None:
    cosines = similarity(scheme("sinusoidal"), 30).score
    assert cosines is not None
    frequencies = 10000.0 ** (-np.arange(0, 64, 2) / 64)
    assert cosines[0] == pytest.approx(np.cos(np.outer(np.arange(31), frequencies)).mean(1))
    assert similarity(scheme("qk_rope"), 30).score is None


def test_the_long_term_decay_is_roformers() -> None:
    distances, decay = long_term_decay(FREQUENCIES.tolist(), longest=64)
    assert (distances[0], decay[0]) == (0, 1)

    def by_hand(d: int) -> float:
        sums = [abs(sum(np.exp(1j * d * w) for w in FREQUENCIES[: j + 1])) for j in range(8)]
        return float(np.mean(sums) / 4.5)

    for d in (1, 2, 5):
        assert decay[distances == d] == pytest.approx(by_hand(d))
    slower = long_term_decay((1e6 ** (-np.arange(0, 16, 2) / 16)).tolist(), longest=64)[1]
    assert slower[distances > 4].mean() > decay[distances > 4].mean(), "a larger base forgets later"


@pytest.mark.slow
def test_pictures_and_curves_of_every_scheme_and_of_what_a_run_has(tmp_path: Path) -> None:
    said = StringIO()
    files = plot_schemes(tmp_path, [], Console(file=said, width=200))
    names = {file.name for file in files}
    assert {"scores.svg", "scores.png", "values.svg", "added.svg", "long-term-decay.svg", "curves.csv"} <= names
    curves = pd.read_csv(tmp_path / "curves.csv")
    drawn = set(curves["scheme"])
    assert {"alibi", "qk_rope", "vo_rope", "sinusoidal"} <= drawn and "nope" not in drawn
    assert "nothing to draw for" in said.getvalue() and "nope" in said.getvalue()
    assert set(curves["what"]) == {"score", "value", "similarity"}
