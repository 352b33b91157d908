"""Gaps at the shared learning rate beside those at each scheme's own, and where they disagree."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from fabricate import World, fabricate
from shown import in_markdown

from posbench.reporting.findings import find
from posbench.reporting.sections.ranked import ranked
from posbench.reporting.sections.rates import rates
from posbench.reporting.spreadsheet import frames
from posbench.runs import Run

SCHEMES = {"qk_rope": 0.0, "nope": 0.08, "alibi": 0.05}
RATES = "{qk_rope: 0.005, nope: 0.01, alibi: 0.0025}"


@pytest.fixture
def tuned(world: Callable[..., World], tmp_path: Path) -> Path:
    """An experiment at rate 0.005, which is the best for qk_rope; nope is the best of all at its own rate."""
    words = ("model=tiny", "experiment=demo", "train.context_length=256", "train.lr=0.005")
    options = {"seeds": (0, 1, 2), "lengths": (), "seed_sd": 0.0, "noise_sd": 0.0005}
    folder = fabricate(tmp_path, world(SCHEMES, overrides=words, **options))
    own = {"nope": -0.05, "alibi": 0.04}
    fabricate(tmp_path, world(own, experiment="demo-own", overrides=(*words, f"train.lr_of={RATES}"), **options))
    (tmp_path / "demo-tune").mkdir()
    rows = ["qk_rope,0.0025,3.1", "qk_rope,0.005,3.0", "qk_rope,0.01,3.2", "nope,0.005,3.1", "nope,0.01,2.95"]
    lines = [
        "scheme,lr,loss,status",
        *(f"{row},finished" for row in rows),
        "alibi,0.0025,3.0,finished",
        "alibi,0.005,,died",
    ]
    (tmp_path / "demo-tune" / "rates.csv").write_text("\n".join(lines) + "\n")
    return folder


def test_gaps_at_own_rates_stand_beside_those_at_the_shared_one(tuned: Path) -> None:
    findings = find(tuned)
    own = findings.rates
    assert own is not None and own.rates == {"qk_rope": 0.005, "nope": 0.01, "alibi": 0.0025}
    gaps = {scheme: m.gap.mean for scheme, m in own.measurements.items()}
    assert gaps["nope"] == pytest.approx(-0.05, abs=0.005) and gaps["alibi"] == pytest.approx(0.04, abs=0.005)
    assert own.measurements["qk_rope"].losses == findings.at("validation")["qk_rope"].losses, "not trained twice"
    assert own.best("nope") == 0.01 and own.gain("nope") == pytest.approx(0.15) and own.is_at_edge("nope")
    assert own.best("alibi") == 0.0025 and not own.is_at_edge("qk_rope") and own.gain("qk_rope") == 0
    section = rates(findings)
    assert section is not None
    words = " ".join(section.words)
    assert "At own rates, by loss: nope > qk_rope > alibi (3 seeds)" in words
    assert "Of 3 pairs 2 are significantly reversed: " in words and "nope and qk_rope" in words
    cells = {row[0]: row for row in section.tables[0].rows}
    assert cells["nope"][1] == "0.01 (edge)" and cells["nope"][3] == "0.01" and cells["alibi"][2] == "inf"


def test_it_is_said_above_the_losses_for_which_schemes_no_other_rate_was_tried(tuned: Path) -> None:
    file = tuned.with_name("demo-tune") / "rates.csv"
    shutil.rmtree(tuned.with_name("demo-own"))
    rows = file.read_text().splitlines()
    said = []
    for without in (("qk_rope", "nope", "alibi"), ("nope", "alibi"), ("nobody",)):
        file.write_text("\n".join(row for row in rows if not row.startswith(without)) + "\n")
        said.append(ranked(find(tuned)))
    assert said[0].endswith("No other was tried (`posbench tune`), so gaps may be due to the rate.")
    assert said[1].endswith("Others were tried (`posbench tune`) only for qk_rope; other gaps may be due to the rate.")
    assert "learning rate" not in said[2]


def test_without_runs_at_own_rates_the_pilots_stand_alone(tuned: Path, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "demo-own")
    section = rates(find(tuned))
    assert section is not None and section.tables[0].headers == [
        "scheme",
        "best rate\nof pilots",
        "gain over\nshared",
    ]
    (tmp_path / "demo-tune" / "rates.csv").write_text("scheme,lr\nnope,x\n")
    findings = find(tuned)
    assert rates(findings) is None and any("rates.csv cannot be read" in note for note in findings.notes)


def test_runs_of_another_text_are_not_taken_for_own_rates(tuned: Path, tmp_path: Path) -> None:
    from fabricate import change_fingerprints

    for seed in (0, 1, 2):
        change_fingerprints(Run(tmp_path / "demo-own" / "alibi" / f"seed={seed}"), data="0ther")
    findings = find(tuned)
    assert findings.rates is not None and set(findings.rates.measurements) == {"qk_rope", "nope"}
    assert any(note.startswith("At its own rate, alibi seed 0 is left out: differs") for note in findings.notes)


def test_the_report_holds_them(tuned: Path) -> None:
    findings = find(tuned)
    assert "Each scheme at its own learning rate" in in_markdown(findings)
    table = frames(findings)["rates.csv"]
    columns = ["scheme", "lr", "is_shared", "is_own", "pilot_loss", "loss", "gap", "gap_low", "gap_high"]
    assert list(table) == columns and len(table) == 7
