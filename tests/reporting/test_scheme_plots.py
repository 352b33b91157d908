"""Curves that `posbench schemes --plot` draws equal formulas by hand; its files are written."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from posbench.composition.compose import compose
from posbench.model.decoder import build_model
from posbench.reporting.scheme_plots import curves_of, plot_schemes
from posbench.schemes import Scheme
from posbench.schemes.alibi import slopes

SMALL = ["model.d_model=64", "model.num_heads=4", "model.head_dim=16", "train.context_length=64"]
FREQUENCIES = 10000.0 ** (-np.arange(0, 16, 2) / 16)


def scheme(name: str) -> Scheme:
    return build_model(compose([f"scheme={name}", "model=tiny", *SMALL]), 64).scheme.first


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


@pytest.mark.slow
def test_pictures_and_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = ["nope", "alibi", "qk_rope", "vo_rope", "kerple", "t5"]  # of 45
    monkeypatch.setattr("posbench.reporting.scheme_plots.choices", lambda *_: drawn)
    output = StringIO()
    files = plot_schemes(tmp_path, [], Console(file=output, width=200))
    assert {file.name for file in files} == {"scores.svg", "values.svg"}
    scores = (tmp_path / "scores.svg").read_text(encoding="utf-8")
    assert all(f">{name}<" in scores for name in ("alibi", "qk_rope", "kerple")), "a panel each"
    assert "nothing to draw for" in output.getvalue()
