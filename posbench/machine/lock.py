"""One process a run folder: the lock a trainer holds, who holds it, and whether anybody does.

`<folder>/.lock` is locked by filelock, which asks the kernel (flock), so that the lock ends with its holder however
that ends; what the file says is the holder. A `.lock` that nobody holds is a dead process's, and is taken over.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout, lock_descriptor

from posbench.config import ConfigError
from posbench.machine.files import open_regular, read_json

_PATIENCE_SECONDS = 0.5  # outlasts a reader that asks `is_held`, and a holder that is just leaving
_ATTEMPTS = 10  # where the folder goes away with its last holder
_LOOKS = 2  # of a reader: what holds it for a moment may be another reader
_SECONDS_BETWEEN = 0.05


@contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Hold `folder` for this process alone, made if it is not there; what was made and stays empty is removed.

    Raises: ConfigError naming the holder's process and host, or why the folder cannot be written.
    """
    created = [place for place in (folder, *folder.parents) if not place.exists()]
    path = folder / ".lock"
    lock = FileLock(path, timeout=_PATIENCE_SECONDS, thread_local=False, fallback_to_soft=False)
    try:
        _acquire(lock, path)
        _write_holder(path)
    except Timeout:
        holder = holder_of(folder)
        raise ConfigError(
            f"{folder} is being trained by process {holder.get('process', '?')} on {holder.get('host', '?')} since "
            f"{holder.get('since', '?')}: wait for it, or stop it"
        ) from None
    except OSError as error:
        lock.release()
        raise ConfigError(
            f"cannot write to {folder} ({error.strerror or error}): choose another runs_dir=..."
        ) from error
    try:
        yield
    finally:
        path.unlink(
            missing_ok=True
        )  # while it is held: whoever waits for it sees that its file is gone, and opens anew
        lock.release()
        with suppress(OSError):
            for place in created:
                place.rmdir()


def is_held(folder: Path) -> bool:
    """Whether a living process holds `folder`. Changes nothing, and works in a folder that cannot be written."""
    try:
        descriptor = open_regular(folder / ".lock", os.O_RDONLY)
    except OSError:
        return False
    try:
        for _ in range(_LOOKS):
            if lock_descriptor(descriptor, blocking=False):
                return False
            time.sleep(_SECONDS_BETWEEN)
        return True
    except OSError:  # a file system without locks: nobody can hold it
        return False
    finally:
        os.close(descriptor)


def _acquire(lock: FileLock, path: Path) -> None:
    """Raises: Timeout where another process holds it; OSError."""
    for attempt in range(_ATTEMPTS):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock.acquire()
            return
        except FileNotFoundError:
            if attempt == _ATTEMPTS - 1:
                raise
            time.sleep(_SECONDS_BETWEEN)


def _write_holder(path: Path) -> None:
    """Say in the locked file who holds it. On a full disk it is held all the same, without a name."""
    descriptor = open_regular(path, os.O_RDWR)
    try:
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
            since = datetime.now(UTC).isoformat(timespec="seconds")
            holder = {"process": os.getpid(), "host": socket.gethostname(), "since": since}
            os.pwrite(descriptor, json.dumps(holder).encode(), 0)
    finally:
        os.close(descriptor)


def holder_of(folder: Path) -> dict[str, object]:
    """Who the lock of `folder` says holds it: `process`, `host`, `since`; empty where it does not say."""
    try:
        holder = read_json(folder / ".lock")
    except (OSError, ValueError):
        return {}
    return holder if isinstance(holder, dict) else {}
