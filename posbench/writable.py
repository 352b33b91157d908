"""Whether a folder can be written to, asked before work whose result goes there."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile

from posbench.config import ConfigError


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
        raise ConfigError(f"the {what} cannot be written to {folder} ({why}): give another --output") from error
    finally:
        for place in missing:
            with suppress(OSError):
                place.rmdir()
