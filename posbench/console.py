"""What is shown to a person: results on standard output, and lines about the work on standard error."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from rich.console import Console


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Nobody reads any more (`| head -1`): showing results ends, quietly, and work goes on."""
        if not self.stderr:
            super().on_broken_pipe()
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


def console(**options: Any) -> Console:
    """rich's console for text as it is: no markup, no highlighting. `.out(line)` prints a line without wrapping it.

    Arguments: options, of rich's `Console`, such as `stderr=True` for lines about work.
    """
    return _Console(markup=False, highlight=False, emoji=False, **options)


def say(text: str) -> None:
    """Print a line to standard error."""
    console(stderr=True).out(text.rstrip())


@cache
def say_once(text: str) -> None:
    """`say`, the first time in this process."""
    say(text)
