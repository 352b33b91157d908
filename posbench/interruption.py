"""SIGINT and SIGTERM while a run is made: the first asks for a stop, a second ends the process at once."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType


class Stopped(BaseException):
    """Training was asked to stop, and the same command goes on with it. No Exception, so that it ends a whole sweep.

    `exit_status` is the shell's: 130 for Ctrl-C, 143 for SIGTERM."""

    def __init__(self, signal_number: int, message: str) -> None:
        super().__init__(message)
        self.exit_status = 128 + signal_number


class StopSignals:
    """A context that catches the first SIGINT or SIGTERM. Outside the main thread it is deaf.

    While `waits` is false the signal raises Stopped where it arrives, as while text is prepared; while it is true the
    signal's number is left in `received` for the loop to see.
    """

    _NUMBERS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, name: str) -> None:
        self.name = name
        self.waits = False
        self.received: int | None = None
        self._before: dict[int, object] = {}

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
            os._exit(128 + number)
        self.received = number
        if not self.waits:
            self.raise_if_received("before its next step: give the same command again to go on")
        os.write(2, b"stopping after this step, with a checkpoint; a second signal stops at once\n")
