"""Certificates of short windows."""

import pytest


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Of more than one piece and no more: a definition takes the square of their length."""
    monkeypatch.setattr("posbench.verify.specimen.LENGTH", 80)
