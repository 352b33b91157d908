"""A token cache of its own for each test, and configurations in the words of the command line."""

import copy
from functools import cache as cached

import pytest

import posbench


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Return the cache folder of the test; it does not exist yet."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("POSBENCH_CACHE", str(folder))
    return folder


@cached
def _composed(*words):
    return posbench.compose(["data=files", "data.path=unset", "tokenizer=bytes", *words])


@pytest.fixture
def files():
    """Return a function that configures text files, with bytes as tokens unless another tokenizer is named."""

    def configure(*words, **paths):
        config = copy.deepcopy(_composed(*words))
        config.data.path = None
        for name, path in paths.items():
            setattr(config.data, name, [str(p) for p in path] if isinstance(path, list) else str(path))
        config.data.__post_init__()
        return config

    return configure


@pytest.fixture
def files_left(cache):
    """Return a function that lists the files in the cache, without lock files and empty folders."""
    return lambda: [str(path) for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"]
