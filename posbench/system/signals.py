"""Handle SIGINT, SIGTERM and SIGHUP during training: the first asks for a stop, a second ends the process at once.

A command that trains in other processes (workers) holds the lock of a folder for as long as they are to go on. A worker
stops, with a checkpoint, when nobody holds the lock: after a signal to the command, and if the command was killed.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from posbench.config import ConfigError
from posbench.system.files import is_locked, locked

SECONDS_BETWEEN_LOOKS = 0.2  # how often a worker looks whether its command goes on


@dataclass
class _Worker:
    """The state of this process as a worker of another posbench command."""

    has_command: bool = False  # True from its first job on
    folder: Path | None = None  # whose lock the command of the current job holds; None: there is no job
    was_told_to_stop: bool = False  # whether the current job has got its SIGTERM


_worker = _Worker()


class Stopped(BaseException):
    """The exception that ends training after a signal; the same command resumes it.

    `exit_status` is for the shell: 129 for SIGHUP, 130 for Ctrl-C, 143 for SIGTERM.
    """

    # Not an Exception, so it ends a whole sweep.

    def __init__(self, signal_number: int, message: str) -> None:
        super().__init__(message)
        self.exit_status = 128 + signal_number

    # Pickled by joblib, which would call the class with the message only.
    def __reduce__(self) -> tuple[type[Stopped], tuple[int, str]]:
        return Stopped, (self.exit_status - 128, str(self))


class StopSignals:
    """A context manager that catches the first SIGINT, SIGTERM or SIGHUP, but only in the main thread.

    If `waits` is false (while text is prepared or code is compiled), the signal raises Stopped at once; if true, its
    number is stored in `received` for the training loop. A second signal within `echo_seconds` is ignored.
    """

    def __init__(self, name: str, echo_seconds: float = 0.0, speaks: bool = True) -> None:
        self.name, self.echo_seconds, self.speaks = name, echo_seconds, speaks
        # The command of a worker speaks for it, and kills it after a second signal.
        if _worker.has_command:
            self.echo_seconds, self.speaks = math.inf, False
        self.waits = False
        self.received: int | None = None
        self._previous_handlers: dict[int, object] = {}
        self._since = 0.0

    def __enter__(self) -> StopSignals:
        # Python sets signal handlers only in the main thread.
        if threading.current_thread() is threading.main_thread():
            self._previous_handlers = {number: signal.signal(number, self._receive) for number in _numbers()}
        return self

    def __exit__(self, *_: object) -> None:
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
        # Nobody may read standard error any more.
        with suppress(OSError):
            if self.speaks:
                # Not print: a signal may arrive in the middle of one.
                os.write(2, b"stopping after this step, with a checkpoint; a second signal stops at once\n")


def _numbers() -> list[int]:
    # A terminal sends SIGINT and SIGHUP to workers too, but their command decides.
    if _worker.has_command:
        return [signal.SIGTERM]
    # nohup ignores SIGHUP.
    ignores_hangup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM] if ignores_hangup else [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


class CommandSignals(StopSignals):
    """StopSignals of a command whose work is done by workers, which are asked to stop by the first signal.

    A second signal kills them. Arguments: folder, whose lock the command holds.
    """

    def __init__(self, name: str, folder: Path, speaks: bool = True) -> None:
        super().__init__(name, speaks=speaks)
        self.waits = True
        self._folder, self._lock = folder, ExitStack()

    def __enter__(self) -> CommandSignals:
        self._lock.enter_context(locked(self._folder))
        super().__enter__()
        return self

    def __exit__(self, *details: object) -> None:
        super().__exit__(*details)
        self._lock.close()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            # Not `kill()`, which joblib's processes lack.
            for process in multiprocessing.active_children():
                assert process.pid is not None
                with suppress(ProcessLookupError):  # joblib kills the others too, once one has ended
                    os.kill(process.pid, signal.SIGKILL)
        super()._receive(number, frame)
        self._lock.close()


@contextmanager
def ending_with_command(name: str, folder: Path) -> Iterator[None]:
    """Run a job, in the context, of the command that holds the lock of `folder`. It stops when nobody holds the lock.

    From its first job on, this process is a worker: it ends with its parent, and for signals it relies on the command.
    Raises: Stopped, from the job.
    """
    if not _worker.has_command:
        _worker.has_command = True
        # Between jobs too: if an idle worker ended, joblib would kill the others in the middle of a step.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        threading.Thread(target=_watch, args=[os.getppid()], daemon=True).start()
    with StopSignals(name) as signals:
        if not is_locked(folder):
            signals.stop(signal.SIGTERM, "before its first step")
        _worker.folder, _worker.was_told_to_stop = folder, False
        try:
            yield
        finally:
            _worker.folder = None


def _watch(parent: int) -> None:
    # Stop the job of this worker, then the worker, when its command stops.
    while True:
        time.sleep(SECONDS_BETWEEN_LOOKS)
        folder = _worker.folder
        if folder is None and os.getppid() != parent:
            os._exit(128 + signal.SIGTERM)
        if folder is None or _worker.was_told_to_stop or is_locked(folder):
            continue
        # A second look, because reading the lock may have failed. Told once, so that a job can clean up undisturbed.
        time.sleep(SECONDS_BETWEEN_LOOKS)
        if not is_locked(folder):
            _worker.was_told_to_stop = True
            os.kill(os.getpid(), signal.SIGTERM)


def is_worker() -> bool:
    """Return whether this process is one of several that torchrun or another launcher started."""
    # Some platforms set RANK=0 and WORLD_SIZE=1 for every command, which is one process.
    return "RANK" in os.environ and launch_number("WORLD_SIZE", 1) > 1


def launch_number(name: str, default: int | None = None) -> int:
    """Return the whole number in a variable of a launcher, or the default if it is unset or empty.

    Raises: ConfigError for another text, or without a default.
    """
    text = os.environ.get(name, "").strip()
    if not text and default is not None:
        return default
    if not text.isdecimal():
        raise ConfigError(
            f"the environment variable {name}={text!r} must be a whole number, as torchrun sets it: correct it, or "
            "unset RANK and WORLD_SIZE to train in one process"
        )
    return int(text)


def end_with(job: Callable[[], object]) -> NoReturn:
    """Run `job` and end the process with the exit status it asks for, without the interpreter's shutdown."""
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
