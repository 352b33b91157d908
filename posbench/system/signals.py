"""Handle SIGINT and SIGTERM during training: the first asks for a stop, a second ends the process at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import NoReturn


class Stopped(BaseException):
    """The exception that ends training after a signal; the same command resumes it.

    `exit_status` is for the shell: 130 for Ctrl-C, 143 for SIGTERM.
    """

    # Not an Exception, so that it ends a whole sweep.

    def __init__(self, signal_number: int, message: str) -> None:
        super().__init__(message)
        self.exit_status = 128 + signal_number

    # Pickled by joblib, which would call the class with the message only.
    def __reduce__(self) -> tuple[type[Stopped], tuple[int, str]]:
        return Stopped, (self.exit_status - 128, str(self))


class StopSignals:
    """A context manager that catches the first SIGINT or SIGTERM, but only in the main thread.

    If `waits` is false (while text is prepared or code is compiled), the signal raises Stopped at once; if true, its
    number is stored in `received` for the training loop. A second signal within `echo_seconds` is ignored.
    """

    _NUMBERS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, name: str, echo_seconds: float = 0.0, speaks: bool = True) -> None:
        self.name, self.echo_seconds, self.speaks = name, echo_seconds, speaks
        self.waits = False
        self.received: int | None = None
        self._previous_handlers: dict[int, object] = {}
        self._since = 0.0

    def __enter__(self) -> StopSignals:
        # Python sets signal handlers only in the main thread.
        if threading.current_thread() is threading.main_thread():
            self._previous_handlers = {number: signal.signal(number, self._receive) for number in self._NUMBERS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def raise_if_received(self, moment: str) -> None:
        """Raise Stopped if a signal has arrived. Its message ends with `moment`, such as "before its next step"."""
        if self.received is not None:
            self.stop(self.received, moment)

    def stop(self, number: int, moment: str) -> NoReturn:
        """Raise Stopped for signal `number`, which may have reached another process of the run."""
        self.received = number
        raise Stopped(number, f"{self.name} stopped {moment}")

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            # A launcher may pass on a signal that the system has sent to all processes.
            if time.monotonic() - self._since < self.echo_seconds:
                return
            os._exit(128 + number)
        self.received, self._since = number, time.monotonic()
        if not self.waits:
            self.raise_if_received("before its next step: run the same command again to resume")
        if self.speaks:
            # Not print: a signal may arrive in the middle of one.
            os.write(2, b"stopping after this step, with a checkpoint; a second signal stops at once\n")


def is_worker() -> bool:
    """Return whether this process is one of several that torchrun or another launcher started."""
    # Some platforms set RANK=0 and WORLD_SIZE=1 for every command, which is one process.
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", 1)) > 1


def end_with(job: Callable[[], object]) -> NoReturn:
    """Run `job` and end the process with the exit status that it asks for, without the interpreter's shutdown."""
    # Threads of torch's process group may need the interpreter to release a last tensor, while the shutdown waits for
    # these threads.
    status = 0
    try:
        job()
    except SystemExit as ended:  # as Python counts: None is 0, text is 1
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
