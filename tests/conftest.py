"""A run small enough to train in a second: a byte-level model on a few thousand random words.

Nothing here depends on chance: property tests draw the same examples every time, and generators begin with TEST_SEED,
which is 0. `make torture` draws others.
"""

import gc
import logging
import os
import random
import re
from functools import cache as cached
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "5000")  # as the command line does, before torch is imported

import numpy as np
import pytest
import torch
from hypothesis import settings
from omegaconf import OmegaConf

from posbench.composition.compose import compose
from posbench.config import Config

# A busy machine is no failure. What failed on this machine is not replayed: write it down with @example.
settings.register_profile("posbench", deadline=None, database=None, derandomize=True)
settings.register_profile("torture", deadline=None, database=None, max_examples=5000, print_blob=True)
settings.load_profile("posbench")


def pytest_configure():
    """Read packs and pages from the repository, wherever pytest was started."""
    os.chdir(Path(__file__).parents[1])


def pytest_collection_finish():
    """Exempt imported modules from garbage collection, which training runs at every start."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _same_everywhere(monkeypatch, tmp_path_factory):
    """Begin each test with the same generators, and without what a user's shell has set."""
    seed = int(os.environ.get("TEST_SEED", "0"))
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    monkeypatch.setenv("POSBENCH_CACHE", str(tmp_path_factory.getbasetemp() / "posbench-cache"))
    for name in ("POSBENCH_TRACEBACK", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _usual_logging():
    """Undo what `posbench train --info` leaves: a level for all loggers, and a handler to this test's closed stdout."""
    root = logging.getLogger()
    level, handlers = root.level, [*root.handlers]
    yield
    root.setLevel(level)
    for handler in set(root.handlers) - set(handlers):
        root.removeHandler(handler)


def write_documents(folder, count=12, words=300):
    """Write `count` text files of `words` random words each, the same every time."""
    folder.mkdir(parents=True, exist_ok=True)
    chosen = random.Random(0)
    vocabulary = ["".join(chosen.choices("etaoinshr", k=chosen.randint(2, 7))) for _ in range(80)]
    for n in range(count):
        (folder / f"{n}.txt").write_text(" ".join(chosen.choices(vocabulary, k=words)), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def documents(tmp_path_factory):
    return write_documents(tmp_path_factory.mktemp("documents"))


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def small_run(documents, cache, runs):
    """Return the overrides of a run of 12 steps on the CPU, under `runs`."""
    return [
        "model=tiny",
        "data=files",
        f"data.path={documents}/*.txt",
        f"data.cache_dir={cache}",
        "data.validation_fraction=0.2",
        "data.test_fraction=0.2",
        "tokenizer=bytes",
        "train.context_length=32",
        "train.batch_size=4",
        "train.steps=12",
        "train.optimizer=adamw",
        "train.lr=5e-3",
        "train.log_every=3",
        "train.checkpoint_every=4",
        "train.validate_every=6",
        "train.validation_tokens=256",
        "train.dtype=float32",
        "train.device=cpu",
        "train.compile=false",
        "evaluation.protocols=[fixed]",
        "tracking=none",
        f"runs_dir={runs}",
    ]


@pytest.fixture
def words(documents, cache, tmp_path):
    """Return the overrides of a run of 12 steps on the CPU, under `tmp_path/runs`."""
    return small_run(documents, cache, tmp_path / "runs")


@cached
def _composed(words):
    return compose(words)


# What changes one value needs no Hydra, which takes a quarter of a second.
_VALUE = re.compile(r"(train|evaluation|model|data|tracking)\.\w+=|seed=|experiment_name=")


@pytest.fixture
def config(documents, cache, tmp_path):
    """Return a function that composes the config of a run of 12 steps, with overrides."""

    def configure(*overrides):
        plain = [word for word in overrides if _VALUE.match(word)]
        extra = [word for word in overrides if word not in plain]
        mapping = _composed((*small_run(documents, cache, Path("runs")), *extra)).to_mapping()
        changed = OmegaConf.merge(mapping, {"runs_dir": str(tmp_path / "runs")}, OmegaConf.from_dotlist(plain))
        return Config.from_mapping(OmegaConf.to_container(changed))

    return configure
