"""One process a run folder: the lock a trainer holds, who holds it, and whether anybody does.

`<folder>/.lock` is locked with flock(2), so the kernel lets go of it however its holder ends; what it says is the
holder. A `.lock` that nobody holds is a dead process's, and is taken over.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from posbench.config import ConfigError
from posbench.machine.files import open_regular, read_json

_ATTEMPTS, _SECONDS_BETWEEN = 10, 0.05  # outlast a reader that asks `is_held`, and a holder that is just leaving


@contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Hold `folder` for this process alone, made if it is not there; what was made and stays empty is removed.

    Raises: ConfigError naming the holder's process and host, or why the folder cannot be written.
    """
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    lock = folder / ".lock"
    try:
        descriptor = _acquire(lock)
        with suppress(OSError):  # a full disk: held all the same, without a name
            os.ftruncate(descriptor, 0)
            since = datetime.now(UTC).isoformat(timespec="seconds")
            holder = {"process": os.getpid(), "host": socket.gethostname(), "since": since}
            os.pwrite(descriptor, json.dumps(holder).encode(), 0)
    except BlockingIOError:
        held = _holder(lock)
        raise ConfigError(
            f"{folder} is being trained by process {held.get('process', '?')} on {held.get('host', '?')} since "
            f"{held.get('since', '?')}: wait for it, or stop it"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"cannot write to {folder} ({error.strerror or error}): choose another runs_dir=..."
        ) from error
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)  # while it is held: `_acquire` sees when it got a file that is gone
        os.close(descriptor)
        with suppress(OSError):
            for place in made:
                place.rmdir()


def is_held(folder: Path) -> bool:
    """Whether a living process holds `folder`. Changes nothing, and works in a folder that cannot be written."""
    try:
        descriptor = open_regular(folder / ".lock", os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _acquire(lock: Path) -> int:
    """A descriptor of the locked file. Raises: BlockingIOError where another process holds it; OSError."""
    for attempt in range(_ATTEMPTS):
        with suppress(FileNotFoundError):  # the folder went away with its last holder
            lock.parent.mkdir(parents=True, exist_ok=True)
            descriptor = open_regular(lock, os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(descriptor), lock.stat()):
                    return descriptor
            except BlockingIOError:
                if attempt == _ATTEMPTS - 1:
                    os.close(descriptor)
                    raise
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
        time.sleep(_SECONDS_BETWEEN)
    raise OSError(f"{lock} is replaced again and again")


def _holder(lock: Path) -> dict[str, object]:
    try:
        held = read_json(lock)
    except (OSError, ValueError):
        return {}
    return held if isinstance(held, dict) else {}
