"""SIGINT and SIGTERM while a run is made: the first asks for a stop, a second ends the process at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import NoReturn

from posbench.config import ConfigError


class Stopped(BaseException):
    """Training was asked to stop, and the same command goes on with it. No Exception, so that it ends a whole sweep.

    `exit_status` is the shell's: 130 for Ctrl-C, 143 for SIGTERM."""

    def __init__(self, signal_number: int, message: str) -> None:
        super().__init__(message)
        self.exit_status = 128 + signal_number

    def __reduce__(self) -> tuple[type[Stopped], tuple[int, str]]:
        return Stopped, (self.exit_status - 128, str(self))


class StopSignals:
    """A context that catches the first SIGINT or SIGTERM. Outside the main thread it is deaf.

    Where a launcher passes on what the system sends to all processes, a worker hears one signal twice: a second within
    `echo_seconds` is taken for the first.

    While `waits` is false the signal raises Stopped where it arrives, as while text is prepared; while it is true the
    signal's number is left in `received` for the loop to see.
    """

    _NUMBERS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, name: str, echo_seconds: float = 0.0, speaks: bool = True) -> None:
        self.name, self.echo_seconds, self.speaks = name, echo_seconds, speaks
        self.waits = False
        self.received: int | None = None
        self._before: dict[int, object] = {}
        self._since = 0.0

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._receive) for number in self._NUMBERS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def raise_if_received(self, where: str) -> None:
        """Raises: Stopped, saying `where` in its message, once a signal has come."""
        if self.received is not None:
            raise Stopped(self.received, f"{self.name} stopped {where}")

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            if time.monotonic() - self._since < self.echo_seconds:
                return
            os._exit(128 + number)
        self.received, self._since = number, time.monotonic()
        if not self.waits:
            self.raise_if_received("before its next step: give the same command again to go on")
        if self.speaks:
            os.write(2, b"stopping after this step, with a checkpoint; a second signal stops at once\n")


def is_worker() -> bool:
    """Whether this process is one of several that a launcher started: ours, torchrun, or another.

    Some platforms set RANK=0 and WORLD_SIZE=1 for everything: that is one process, which may launch others.
    """
    return "RANK" in os.environ and environment_number("WORLD_SIZE", 1) > 1


def environment_number(name: str, default: int) -> int:
    """What a launcher has set: a number of processes (WORLD_SIZE) or of one of them (LOCAL_RANK).

    Raises: ConfigError where it is no number that could be."""
    text = os.environ.get(name, str(default))
    if not (text.isascii() and text.isdecimal()) or (name == "WORLD_SIZE" and int(text) < 1):
        raise ConfigError(
            f"{name}={text!r} in the environment is no number of processes or of one of them: launchers such as "
            "torchrun set it, else take it away (unset RANK WORLD_SIZE LOCAL_RANK)"
        )
    return int(text)


def end_with(job: Callable[[], object]) -> NoReturn:
    """Run `job` and end the process with its exit status at once, without the interpreter's own farewell.

    For one process of several: threads of its process group may want the interpreter to let go of a last tensor, which
    is then gone, while its end waits for them, for ever.
    """
    status = 0
    try:
        job()
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
