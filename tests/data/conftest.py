"""A token cache of its own for each test, and configurations in the words of the command line."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache as cached
from pathlib import Path

import pytest
from hypothesis import settings

import posbench
from posbench.config import Config

settings.register_profile("posbench", deadline=None)  # a busy machine is no failure
settings.load_profile("posbench")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the cache folder of the test; it does not exist yet."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("POSBENCH_CACHE", str(folder))
    return folder


@cached
def _composed(*words: str) -> Config:
    return posbench.compose(["data=files", "data.path=unset", "tokenizer=bytes", *words])


@pytest.fixture
def files() -> Callable[..., Config]:
    """Return a function that configures text files, with bytes as tokens unless another tokenizer is named."""

    def configure(*words: str, **paths: object) -> Config:
        config = copy.deepcopy(_composed(*words))
        config.data.path = None
        for name, path in paths.items():
            setattr(config.data, name, [str(p) for p in path] if isinstance(path, list) else str(path))
        config.data.__post_init__()
        return config

    return configure


@pytest.fixture
def files_left(cache: Path) -> Callable[[], list[str]]:
    """Return a function that lists the files in the cache, without lock files and empty folders."""
    return lambda: [str(path) for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"]
