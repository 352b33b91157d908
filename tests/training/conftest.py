"""Runs that meet with something at a chosen step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from posbench.training.step import Observer, TrainingStep


def after_step(n: int, event: Callable[[], object], phase: str = "optimizer") -> Observer:
    """Return an observer that calls `event()` after that phase of step `n` (0-based)."""

    def observe(happened: str, number: int, step: TrainingStep) -> None:
        if (happened, number) == (phase, n):
            event()

    return observe


def files(folder: Path) -> dict[str, int]:
    """Return the last modification of a folder and of every file and folder in it."""
    return {str(path): path.stat().st_mtime_ns for path in [folder, *folder.rglob("*")]}
