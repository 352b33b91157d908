"""One fabricated experiment for all tests that only read it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from fabricate import World, fabricate
from hypothesis import settings
from rich.console import Console

from posbench.reporting import report
from posbench.reporting.findings import Findings, find

settings.register_profile("unhurried", deadline=None)  # the machine that runs these may have other work
settings.load_profile("unhurried")
EFFECTS = {"qk_rope": 0.0, "qkvo_rope": 0.0002, "nope": 0.08, "alibi": 0.05}


@pytest.fixture(scope="session")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4 schemes x 4 seeds; qk_rope and qkvo_rope differ by less than can be seen."""
    return fabricate(tmp_path_factory.mktemp("fabricated"), World(EFFECTS, seeds=(0, 1, 2, 3)))


@pytest.fixture(scope="session")
def losses_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same schemes and seeds, with their validation losses alone."""
    return fabricate(tmp_path_factory.mktemp("losses"), World(EFFECTS, seeds=(0, 1, 2, 3), lengths=(), probes=False))


@pytest.fixture(scope="session")
def losses(losses_only: Path) -> Findings:
    """What those say."""
    return find(losses_only)


@pytest.fixture
def own(losses_only: Path, tmp_path: Path) -> Path:
    """A copy of that one, for a test to change."""
    return Path(shutil.copytree(losses_only, tmp_path / "runs" / "demo"))


@pytest.fixture
def pair(losses_only: Path, tmp_path: Path) -> Path:
    """Two runs of it, qk_rope and nope with seed 2, for a test to change."""
    for scheme in ("qk_rope", "nope"):
        shutil.copytree(losses_only / scheme / "seed=2", tmp_path / "runs" / "demo" / scheme / "seed=2")
    return tmp_path / "runs" / "demo"


@pytest.fixture(scope="session")
def _probed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    effects = {"qk_rope": 0.0, "nope": 0.08, "alibi": 0.05}
    return fabricate(tmp_path_factory.mktemp("probed"), World(effects, seeds=(0, 1, 2, 3), lengths=(512, 1024)))


@pytest.fixture
def probed(_probed: Path, tmp_path: Path) -> Path:
    """Three schemes with probes and two lengths, for a test to change."""
    return Path(shutil.copytree(_probed, tmp_path / "runs" / "demo"))


@pytest.fixture
def world() -> Callable[..., World]:
    """A small world: two lengths, no probes."""
    return lambda effects, **options: World(effects, **{"lengths": (256, 512), "probes": False, **options})


@pytest.fixture(scope="session")
def findings(experiment: Path) -> Findings:
    """What it says."""
    return find(experiment)


@pytest.fixture(scope="session")
def written(experiment: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of its report."""
    target = tmp_path_factory.mktemp("report")
    with (target / "terminal.txt").open("w", encoding="utf-8") as file:
        report(experiment, output=target, console=Console(file=file, width=100))
    return target
