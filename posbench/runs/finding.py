"""Which runs there are at a place: run folders, and the runs of packed experiments, which need no folders."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from posbench.config import ConfigError
from posbench.machine.files import read_bytes
from posbench.machine.lock import is_held
from posbench.runs.manifest import RUNNING
from posbench.runs.packed import Pack
from posbench.runs.run import PACK, Run

INTERRUPTED, UNREADABLE = "interrupted", "unreadable"  # never written: what `state_of` finds besides


def find_runs(folder: str | Path) -> list[Run]:
    """Every run at or under `folder`, in the order of their names. What lies in a packed experiment is all in its pack.

    A place inside a packed experiment, such as `runs/reference/demo_cpu/alibi`, is a folder here as any other.
    """
    root = Path(folder)
    pack = _pack_of(root)
    if pack is not None:
        return [run for run in pack.runs() if root in (run.path, *run.path.parents)]
    return sorted(_below(root), key=lambda run: run.path)


def run_at(path: str | Path) -> Run:
    """The run that a stored path names: the one door by which a row of a table becomes a run again."""
    place = Path(path)
    pack = _pack_of(place)
    return pack.run(place) if pack is not None else Run(place)


def load_run(path: str | Path) -> Run:
    """The run at this place. Raises: ConfigError where there is none."""
    run = run_at(path)
    _ = run.manifest
    return run


def holds_runs(place: Path) -> bool:
    """Whether `place` is a folder, or one within a packed experiment."""
    return place.is_dir() or (_pack_of(place) is not None and bool(find_runs(place)))


def state_of(run: Run) -> str:
    """What has become of a run: its manifest's status, but `interrupted` for one that says it runs and nobody trains.

    `unreadable` where the manifest is missing, torn, or of another format.
    """
    try:
        status = run.manifest.status
    except ConfigError:
        return UNREADABLE
    return INTERRUPTED if status == RUNNING and not is_held(run.path) else status


def _pack_of(place: Path) -> Pack | None:
    """The packed experiment that `place` is, or that it lies in as a scheme or a run would."""
    folders = [folder for folder in (place, *place.parents[:2]) if (folder / PACK).is_file()]
    return _opened(folders[0]) if folders else None


def _opened(folder: Path) -> Pack:
    try:
        return _pack(folder, read_bytes(folder / PACK))
    except OSError:
        return Pack(folder)


@lru_cache(maxsize=4)
def _pack(folder: Path, content: bytes) -> Pack:
    """One object for one `pack.json`: what it has read and checked is not read again for every run."""
    return Pack(folder)


def _below(folder: Path) -> Iterator[Run]:
    if (folder / PACK).is_file():
        yield from _opened(folder).runs()
    elif (folder / "run.json").is_file():
        yield Run(folder)
    elif folder.is_dir():
        for child in folder.iterdir():
            if child.is_dir() and not child.is_symlink() and not child.name.startswith("."):
                yield from _below(child)
