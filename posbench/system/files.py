"""Write files so that a reader sees either the old or the new content, and lock run folders."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from posbench.config import ConfigError

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # of the file system, of the user's quota, of a limit on files


def read_json(path: Path) -> Any:
    """Return the content of a JSON file. Raises: OSError if it cannot be read; ValueError if it is not JSON."""
    return json.loads(path.read_bytes())


def write_bytes(path: Path, content: bytes) -> None:
    """Write `content` next to `path`, sync it to disk and rename it to `path`. Create missing folders.

    Raises: OSError with the name of the file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # A random name, so that two processes that write the same file do not mix.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            # Synced before the rename: after a power cut the name must not point to an empty file.
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error  # writing names no file
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def explained(error: OSError) -> str:
    """Return a sentence on an error of a file: its name, the reason and, for a full disk, a remedy."""
    reason = error.strerror or str(error)
    if error.errno not in DISK_FULL:
        return f"{error.filename}: {reason}" if error.filename else str(error)
    file = error.filename or "a file"
    return f"{file} cannot be written ({reason}): make room and give the same command again; what was stored is intact"


def write_text(path: Path, text: str) -> None:
    """Write `text` in UTF-8 as `write_bytes` does."""
    write_bytes(path, text.encode())


def write_json(path: Path, content: Any) -> None:
    """Write indented JSON to `path`. Raises: ValueError for NaN or infinity, which JSON cannot express."""
    write_text(path, json.dumps(content, indent=2, sort_keys=False, allow_nan=False) + "\n")


@contextmanager
def folder_beside(final: Path) -> Iterator[Path]:
    """Create a folder `.<name>.tmp` next to `final`, yield it, and at the end remove it if it remains."""
    temporary = final.with_name(f".{final.name}.tmp")
    # A killed process may have left it, so only one process at a time may write to one `final`.
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def publish_folder(temporary: Path, final: Path) -> None:
    """Rename `temporary`, whose files are synced to disk, to `final`, replacing an existing folder."""
    sync_folder(temporary)
    # A folder that is not empty cannot be replaced by a rename.
    if final.exists():
        shutil.rmtree(final)
    temporary.rename(final)
    sync_folder(final.parent)


def sync_folder(folder: Path) -> None:
    """Sync `folder`, so that renames in it survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sum_of(path: Path, sync: bool = False) -> str:
    """Return a file's SHA-256 in hex; if `sync`, force it to disk first. Raises: OSError if it cannot be read."""
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock `folder` for this process during the context. Create the folder if it is missing.

    Raises: ConfigError naming the process and host that hold the lock, or why the folder cannot be written.
    """
    # The kernel releases the lock when the process ends, for whatever reason.
    path = folder / ".lock"
    lock = FileLock(path, thread_local=False, fallback_to_soft=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0.5)  # `is_locked` may hold it for a moment, and so may a process that is ending
    except Timeout:
        holder = {}
        with suppress(OSError, ValueError):
            holder = read_json(path)
        raise ConfigError(
            f"{folder} is being trained by process {holder.get('process', '?')} on {holder.get('host', '?')} since "
            f"{holder.get('since', '?')}: wait for it, or stop it"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"cannot write to {folder} ({error.strerror or error}): choose another runs_dir=..."
        ) from error
    try:
        # Another process reads this for the message above.
        since = datetime.now(UTC).isoformat(timespec="seconds")
        path.write_text(json.dumps({"process": os.getpid(), "host": socket.gethostname(), "since": since}))
        yield
    finally:
        path.unlink(missing_ok=True)  # removed while locked, so that a process that waits for it sees it is gone
        lock.release()


def is_locked(folder: Path) -> bool:
    """Return whether a living process holds the lock of `folder`. Works in read-only folders."""
    try:
        with (folder / ".lock").open("rb") as file:
            # A shared lock, so that processes that only ask do not exclude each other.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no process has locked it yet, or the file system has no locks
        pass
    return False
