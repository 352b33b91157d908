"""wandb as a fresh machine has it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from posbench.tracking import connection


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No setting of the machine is seen, and wandb's own folders are the test's."""
    for name in os.environ:
        if name.startswith("WANDB_"):
            monkeypatch.delenv(name)
    for name in ("CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / "of-wandb"))
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setattr(connection.Process, "offline_because", None)
    monkeypatch.setattr(connection.Process, "said", set())
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
