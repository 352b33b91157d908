"""Runs that meet with something at a chosen step."""


def after_step(n, event, phase="optimizer"):
    """Return an observer that calls `event()` after that phase of step `n` (0-based)."""

    def observe(happened, number, step):
        if (happened, number) == (phase, n):
            event()

    return observe


def files(folder):
    """Return the last modification of a folder and of every file and folder in it."""
    return {str(path): path.stat().st_mtime_ns for path in [folder, *folder.rglob("*")]}
