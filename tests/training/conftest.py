"""Runs that meet with something at a chosen step."""

import time


def after_step(n, event, phase="optimizer"):
    """Return an observer that calls `event()` after that phase of step `n` (0-based)."""

    def observe(happened, number, step):
        if (happened, number) == (phase, n):
            event()

    return observe


def files(folder):
    """Return the last modification of a folder and of every file and folder in it."""
    return {str(path): path.stat().st_mtime_ns for path in [folder, *folder.rglob("*")]}


def until(condition, seconds=600):
    """Wait until the condition holds."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds
        time.sleep(0.05)


def crash():
    raise RuntimeError("the machine is on fire")
