"""Two finished and evaluated runs of two seeds, trained once for all tests of run folders and packs."""

import shutil
from pathlib import Path

import pytest
from rich.console import Console

from posbench.composition.compose import compose
from posbench.evaluation.command import evaluate_runs
from posbench.evaluation.request import Request
from posbench.runs import Run
from posbench.training import train
from tests.conftest import small_run

WORDS = ("evaluation.targets=16", "train.steps=4", "train.checkpoint_every=2", "scheme=vo_rope")


@pytest.fixture(scope="session")
def evaluate():
    """Score a run as `posbench eval` does, by default with the protocol `fixed`."""

    def score(run, **request):
        asked = Request(**{"device": "cpu", "dtype": "float32", "protocols": ("fixed",), **request})
        return [result for _, result in evaluate_runs([run], asked, Console(quiet=True))]

    return score


@pytest.fixture(scope="session")
def trained(documents, cache, tmp_path_factory, evaluate):
    runs = tmp_path_factory.mktemp("trained") / "runs"
    for seed in (0, 1):
        run = train(compose([*small_run(documents, cache, runs), *WORDS, f"seed={seed}"]))
        evaluate(run, lengths=(32, 64), protocols=("fixed", "validation"))
    evaluate(Run(runs / "demo/vo_rope/seed=0"), lengths=(64,), under=("base=1e2",))
    return runs


@pytest.fixture
def runs(trained, tmp_path):
    """Return a copy of the trained runs."""
    return Path(shutil.copytree(trained, tmp_path / "runs"))


@pytest.fixture
def run(runs):
    """Return the run of seed 0 in the copy."""
    return Run(runs / "demo/vo_rope/seed=0")
