"""Certificates of short windows."""

import pytest


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Shorten windows to just over one piece: a definition's cost is quadratic in the length."""
    monkeypatch.setattr("posbench.verify.random_model.LENGTH", 80)
