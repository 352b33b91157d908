"""A report by optimizer says how much each gap differs between the two optimizers."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

import posbench
from posbench.config import ConfigError
from posbench.runs import find_runs
from tests.analysis.fabricate import World, fabricate


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return two experiments: ALiBi leads QK by 0.35 nats with AdamW, which no run records, and by 0.05 with Muon."""
    monkeypatch.setattr("posbench.reporting.figures.draw_all", lambda c, sections: {})
    folders = []
    for n, (experiment, gap) in enumerate((("adam", 0.35), ("muon", 0.05))):
        world = World({"alibi": 0.0, "qk_rope": gap, "path": 0.2}, seeds=(0, 1, 2, 3), experiment=experiment)
        world.random = np.random.default_rng(n)  # equal noise in both would make the differences constant
        folders.append(fabricate(tmp_path, world))
    for run in find_runs(folders[1]):
        own = 96 if run.manifest.scheme == "path" else 0
        record = {"muon_share": 0.77, "own_matrices": own, "dtype": "float32"}
        identity = run.manifest.identity | {"train.optimizer": "muon", "train.momentum": 0.95, "train.ns_steps": 5}
        run.update_manifest(optimizer=record, identity=identity)
    return folders


def test_gaps_under_two_optimizers_are_subtracted_within_seeds(places: list[Path], tmp_path: Path) -> None:
    posbench.report(places, by="train.optimizer", output=tmp_path / "out", console=Console(file=io.StringIO()))
    page = (tmp_path / "out/report.md").read_text()
    assert "## Difference of gaps between two values of train.optimizer" in page
    assert "the gap under adamw minus the gap under muon, paired by seed" in page
    assert "path: AdamW trains matrices of its own under Muon too." in page
    table = pd.read_csv(tmp_path / "out/interaction.csv").set_index(["left", "right"])
    by_optimizer = [posbench.results(place).pivot(index="seed", columns="scheme", values="loss") for place in places]
    adamw, muon = ((losses["qk_rope"] - losses["alibi"]).to_numpy() for losses in by_optimizer)
    row = table.loc[("alibi", "qk_rope")]
    assert row["difference"] == pytest.approx(np.mean(adamw - muon)) and row["difference"] == pytest.approx(
        0.3, abs=0.02
    )
    assert (row["first_gap"], row["second_gap"]) == pytest.approx((adamw.mean(), muon.mean()))
    assert row["p"] < 0.05 and row["seeds"] == 4


def test_runs_of_both_optimizers_do_not_share_a_table(places: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.optimizer"):
        posbench.report(places, output=tmp_path / "out", console=Console(file=io.StringIO()))
