"""Lines for a person, on standard error: text that others may have written is shown, and not obeyed."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from functools import cache
from typing import IO

UNREAD = 141  # the exit status of a shell's own commands whose output nobody reads any more (128 + SIGPIPE)


def inert(text: str) -> str:
    """`text` without what a terminal would obey or be misled by: ESC is shown as `\\x1b`, right-to-left marks alike."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def say(text: str) -> None:
    """Print a line to standard error, if anybody reads it."""
    try:
        sys.stderr.write(inert(text.rstrip()) + "\n")
        sys.stderr.flush()
    except BrokenPipeError:
        to_nobody(sys.stderr)


@cache
def say_once(text: str) -> None:
    """`say`, the first time in this process."""
    say(text)


def to_nobody(stream: IO[str]) -> None:
    """Have what is still written to `stream`, whose reader is gone, go nowhere: work does not end with its reader."""
    with suppress(OSError, ValueError):  # no file of the system's
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
