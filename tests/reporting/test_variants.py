"""What was read under other words of a scheme stands in the tables and pictures by length, beside the scheme."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fabricate import World, fabricate, write_evaluation

from posbench.reporting import spreadsheet
from posbench.reporting.findings import find
from posbench.reporting.plots import draw_all
from posbench.reporting.sections import lengths
from posbench.reporting.tables import DASH
from posbench.runs import Run, load_run

GAIN = 0.3  # nats a token, of YaRN at 512 tokens


@pytest.fixture
def folder(tmp_path: Path, world: Callable[..., World]) -> Path:
    """Two schemes of two seeds, read at 128 (the training length), 256 and 512; the rotary one rescaled at 512."""
    made = fabricate(tmp_path, world({"qk_rope": 0.0, "nope": 0.1}, seeds=(0, 1), lengths=(128, 256, 512)))
    for seed in (0, 1):
        run = load_run(made / "qk_rope" / f"seed={seed}")
        _read(run, ("rescale=yarn",), GAIN)
        for factor in (2, 4, 8):
            _read(run, (f"factor={factor}", "rescale=pi"), 0.05 * factor)
        _read(run, ("step=100",), 0.0)
    return made


def _read(run: Run, under: tuple[str, ...], gain: float) -> None:
    """Store the windows of `fixed` at 512 with a lower loss."""
    (result,) = [r for r in run.results()[0] if (r.protocol, r.length, r.reading.under) == ("fixed", 512, ())]
    rows = result.windows.assign(nll=result.windows["nll"] - gain * result.windows["targets"])
    write_evaluation(run, "fixed", 512, "test", rows, *under)


def test_rescaled_rows_stand_below_their_scheme_and_beyond_that_change_nothing(folder: Path, tmp_path: Path) -> None:
    findings = find(folder)
    rows = lengths.perplexity_table(findings, "fixed").rows
    names = ["qk_rope", "qk_rope · pi x2", "qk_rope · pi x4", "qk_rope · pi x8", "qk_rope · yarn", "nope"]
    assert [row[0] for row in rows] == names
    assert rows[4][1:3] == [DASH, DASH] and rows[4][3] != rows[0][3] != DASH
    yarn, plain = (findings.at("fixed", 512)[name] for name in ("qk_rope · yarn", "qk_rope"))
    assert yarn.loss.mean == pytest.approx(plain.loss.mean - GAIN)
    assert yarn.gap.mean == pytest.approx(-GAIN) and yarn.change.mean == pytest.approx(plain.change.mean - GAIN)
    assert findings.schemes == ["qk_rope", "nope"] and "qk_rope · yarn" not in findings.at("nonoverlapping", 512)
    table = spreadsheet.frames(findings)["table.csv"].set_index(["scheme", "protocol", "length"])
    assert table.loc[("qk_rope · yarn", "fixed", 512), "loss"] == pytest.approx(yarn.loss.mean)
    assert [note for note in findings.notes if "Not in these tables" in note] == [
        "Not in these tables: 2 results under step=100."
    ]


def test_a_picture_against_the_factor_where_several_were_read(folder: Path) -> None:
    findings = find(folder)
    figures = draw_all(findings)
    (axes,) = figures["factors-fixed"].get_axes()
    (line,) = [line for line in axes.get_lines() if line.get_label() == "qk_rope · pi"]
    there = findings.at("fixed", 512)
    names = ["qk_rope", *(f"qk_rope · pi x{factor}" for factor in (2, 4, 8))]
    assert np.array_equal(line.get_xdata(), [1, 2, 4, 8])
    assert np.allclose(np.asarray(line.get_ydata()), [there[name].perplexity for name in names])
    drawn = {line.get_label() for line in figures["perplexity-fixed"].get_axes()[0].get_lines()}
    assert {"qk_rope", "qk_rope · yarn"} <= drawn
    looks = findings.looks
    assert len({looks[row] for row in findings.rows}) == len(findings.rows)
    assert looks["qk_rope · yarn"].colour == looks["qk_rope"].colour
    section = lengths.extrapolation(findings, list(figures))[0]
    assert "factors-fixed" in [stem for stem, _ in section.pictures] and "without training again" in " ".join(
        section.words
    )
