"""Fabricated experiments for tests that read them, and copies for tests that change them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from fabricate import World, comparison, fabricate

from posbench.reporting.comparison import Comparison

EFFECTS = {"qk_rope": 0.0, "qkvo_rope": 0.0002, "nope": 0.08, "alibi": 0.05}


@pytest.fixture(scope="session")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4 schemes x 4 seeds with lengths and probes; qk_rope and qkvo_rope differ by less than can be seen."""
    return fabricate(tmp_path_factory.mktemp("fabricated"), World(EFFECTS, seeds=(0, 1, 2, 3)))


@pytest.fixture(scope="session")
def found(experiment: Path) -> Comparison:
    """What it says."""
    return comparison(experiment)


@pytest.fixture(scope="session")
def _losses_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    world = World(EFFECTS, seeds=(0, 1, 2, 3), lengths=(256, 512), probes=False)
    return fabricate(tmp_path_factory.mktemp("losses"), world)


@pytest.fixture
def own(_losses_only: Path, tmp_path: Path) -> Path:
    """The same schemes and seeds with two lengths, for a test to change."""
    return Path(shutil.copytree(_losses_only, tmp_path / "runs" / "demo"))
