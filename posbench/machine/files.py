"""Files: read as what somebody else may have put there, and written so that a reader sees all of one or none."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import yaml
from filelock import lock_descriptor

from posbench.config import ConfigError

MOST_SETTINGS = 1 << 26  # bytes of JSON, YAML and tokenizers: one of 260,000 entries has half of it
MOST_NUMBERS = 1 << 30  # bytes of metrics and windows


def open_regular(path: Path, flags: int, mode: int = 0o644) -> int:
    """`os.open` that waits for nobody. Raises: OSError, also where `path` is a pipe, a device or a folder."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not an ordinary file", str(path))
    return descriptor


def read_bytes(path: Path, most: int = MOST_SETTINGS) -> bytes:
    """All of an ordinary file. Raises: OSError, also for more than `most` bytes."""
    with os.fdopen(open_regular(path, os.O_RDONLY), "rb") as file:
        content = file.read(most + 1) if os.fstat(file.fileno()).st_size <= most else None
    if content is None or len(content) > most:
        raise OSError(errno.EFBIG, f"it is larger than {most >> 20} MiB, the limit for such a file", str(path))
    return content


def sum_of(path: Path, sync: bool = False) -> str:
    """The SHA-256 of an ordinary file, read in parts; `sync`: it is on the disk first. Raises: OSError."""
    with os.fdopen(open_regular(path, os.O_RDONLY), "rb") as file:
        if sync:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def parse_json(text: bytes) -> Any:
    """What JSON holds. Raises: ValueError, also where it is nested too deep."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def read_json(path: Path) -> Any:
    """`parse_json` of an ordinary file. Raises: OSError; ValueError."""
    return parse_json(read_bytes(path))


def parse_yaml(content: bytes) -> Any:
    """Plain data from YAML without aliases, which could stand for more than fits into memory, or for themselves.

    Raises: ValueError with what is wrong, and in which line.
    """
    try:
        return _PlainLoader(content).get_single_data()
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except yaml.MarkedYAMLError as error:
        place = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ValueError(place + " ".join(filter(None, (error.context, error.problem)))) from error
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError((str(error) or "it is not YAML").splitlines()[0]) from error


class _PlainLoader(yaml.SafeLoader):
    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise ValueError(f"an alias, *{self.peek_event().anchor}, is not allowed")
        return super().compose_node(parent, index)


def write_bytes(path: Path, content: bytes) -> None:
    """Write beside, sync, rename: `path` holds the old content or the new, whatever happens in between.

    A link that somebody put in the way is not followed: `path` itself is replaced, and the file beside it is a new one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        _write_beside(path, content)
    except FileNotFoundError:  # taken for a leftover in the moment before it was locked
        _write_beside(path, content)
    sync_folder(path.parent)


def _write_beside(path: Path, content: bytes) -> None:
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with beside.open("xb") as file:
            with suppress(OSError):  # a file system without locks
                lock_descriptor(file.fileno(), blocking=False)  # until it is closed
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Remove the files of `write_bytes` that were never renamed, `.*.tmp`: those that no living writer has locked."""
    for left in folder.glob(".*.tmp"):
        with suppress(OSError):
            descriptor = open_regular(left, os.O_RDWR)
            try:
                if lock_descriptor(descriptor, blocking=False):
                    left.unlink()
            finally:
                os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """`write_bytes` of text."""
    write_bytes(path, text.encode())


@contextmanager
def folder_beside(final: Path) -> Iterator[Path]:
    """A new folder beside `final` to write files into, `.<name>.tmp`; what is not published is removed with it.

    What a killed process left under that name goes first, so one process at a time may write to one `final`.
    """
    beside = final.with_name(f".{final.name}.tmp")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        yield beside
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def publish_folder(beside: Path, final: Path) -> None:
    """Rename a folder whose files are synced to `final`, in place of one that is there: all of it or nothing."""
    sync_folder(beside)
    if final.exists():
        shutil.rmtree(final)
    beside.rename(final)
    sync_folder(final.parent)


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, content: Any) -> None:
    """`write_text` of indented JSON."""
    write_text(path, json.dumps(content, indent=2, sort_keys=False, allow_nan=False) + "\n")


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """`content` as plain data with `seal`, the SHA-256 of all the rest."""
    plain = json.loads(json.dumps({key: value for key, value in content.items() if key != "seal"}, allow_nan=False))
    return {**plain, "seal": hashlib.sha256(_canonical(plain)).hexdigest()}


def has_its_seal(content: Mapping[str, Any]) -> bool:
    """Whether `content`, as read, is what `sealed` returned."""
    try:
        rest = _canonical({key: value for key, value in content.items() if key != "seal"})
    except ValueError:  # NaN or infinity, which are never written
        return False
    return content.get("seal") == hashlib.sha256(rest).hexdigest()


def _canonical(content: dict[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, allow_nan=False).encode()


def check_writable(folder: Path, what: str) -> None:
    """Make the folder and a file in it, and take both away again.

    Raises: ConfigError, naming `what` was to be written there.
    """
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigError(f"the {what} cannot be written to {folder} ({why}): name another folder") from error
    finally:
        for place in missing:
            with suppress(OSError):
                place.rmdir()


def check_format(file: Path, found: int, known: int) -> None:
    """Raises: ConfigError where `file` is of a format that this posbench does not read, newer or older."""
    if found != known:
        remedy = "upgrade posbench" if found > known else "read it with the posbench that wrote it, or train it again"
        raise ConfigError(f"{file} is of format {found}; this posbench reads format {known}: {remedy}")
