"""Fabricated experiments for tests that read them, and copies for tests that change them."""

import shutil
from pathlib import Path

import pytest

from tests.analysis.fabricate import World, comparison, fabricate

EFFECTS = {"qk_rope": 0.0, "qkvo_rope": 0.0002, "nope": 0.08, "alibi": 0.05}


@pytest.fixture(scope="session")
def experiment(tmp_path_factory):
    """Write runs of 4 schemes x 4 seeds with lengths and probes; qk_rope and qkvo_rope hardly differ."""
    return fabricate(
        tmp_path_factory.mktemp("fabricated"),
        World(EFFECTS, seeds=(0, 1, 2, 3), lengths=(128, 256, 512, 1024, 2048), probes=True),
    )


@pytest.fixture(scope="session")
def analysis(experiment):
    """Return the comparison of the whole experiment."""
    return comparison(experiment)


@pytest.fixture(scope="session")
def _losses_only(tmp_path_factory):
    world = World(EFFECTS, seeds=(0, 1, 2, 3), lengths=(256, 512))
    return fabricate(tmp_path_factory.mktemp("losses"), world)


@pytest.fixture
def experiment_copy(_losses_only, tmp_path):
    """Return a copy of the experiment with two lengths, which a test may change."""
    return Path(shutil.copytree(_losses_only, tmp_path / "runs" / "demo"))
