"""Runs that meet with something at a chosen step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from posbench.training import loop


@pytest.fixture
def at_step(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`at_step(n, event)`: from now on runs call `event()` after their n-th step (0-based). The last call holds."""
    original = loop._Training._one_step

    def arrange(n: int, event: Callable[[], object]) -> None:
        def step(self: Any, number: int) -> torch.Tensor:
            result = original(self, number)
            if number == n:
                event()
            return result

        monkeypatch.setattr(loop._Training, "_one_step", step)

    return arrange


def files(folder: Path) -> dict[str, int]:
    """Every file and folder in it, itself too, with the time it was last changed."""
    return {str(path): path.stat().st_mtime_ns for path in [folder, *folder.rglob("*")]}
