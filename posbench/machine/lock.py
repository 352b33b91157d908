"""One process a run folder, by a lock on `<folder>/.lock`.

The kernel releases the lock when the process ends, however that happens. The file names the process that holds it.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from posbench.config import ConfigError
from posbench.machine.files import read_json


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock `folder`, which is made where it is missing, for this process alone.

    Raises: ConfigError naming the process and host that hold the lock, or why the folder cannot be written.
    """
    path = folder / ".lock"
    lock = FileLock(path, thread_local=False, fallback_to_soft=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0.5)  # for a reader that asks `is_locked`, and a holder that is just leaving
    except Timeout:
        holder = holder_of(folder)
        raise ConfigError(
            f"{folder} is being trained by process {holder.get('process', '?')} on {holder.get('host', '?')} since "
            f"{holder.get('since', '?')}: wait for it, or stop it"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"cannot write to {folder} ({error.strerror or error}): choose another runs_dir=..."
        ) from error
    try:
        since = datetime.now(UTC).isoformat(timespec="seconds")
        path.write_text(json.dumps({"process": os.getpid(), "host": socket.gethostname(), "since": since}))
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is held: whoever opened it before sees that it is gone
        lock.release()


def is_locked(folder: Path) -> bool:
    """Whether a living process holds the lock of `folder`. Changes nothing; works in a folder that is read-only."""
    try:
        with (folder / ".lock").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # nobody has held it, or it is on a file system without locks
        pass
    return False


def holder_of(folder: Path) -> dict[str, object]:
    """Who the lock of `folder` says holds it: `process`, `host`, `since`; empty where it does not say."""
    with suppress(OSError, ValueError):
        return dict(read_json(folder / ".lock"))
    return {}
