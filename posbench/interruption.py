"""SIGINT and SIGTERM while training: the first asks the loop to stop after its step, a second stops at once."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType


class Stopped(BaseException):
    """Training was asked to stop and left a checkpoint. No Exception, so that it ends a whole sweep.

    `exit_status` is the shell's: 130 for Ctrl-C, 143 for SIGTERM."""

    def __init__(self, signal_number: int, message: str) -> None:
        super().__init__(message)
        self.exit_status = 128 + signal_number


class StopSignals:
    """A context in which `received` is the first signal's number, or None. Outside the main thread it is deaf."""

    _NUMBERS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
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

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            os._exit(128 + number)
        self.received = number
