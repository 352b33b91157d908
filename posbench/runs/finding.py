"""Which runs there are at a place: run folders, and the runs of packed experiments, which need no folders."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from posbench.config import ConfigError
from posbench.console import say_once
from posbench.machine.lock import is_held
from posbench.runs.manifest import RUNNING
from posbench.runs.packed import Pack
from posbench.runs.packed_run import PackedRun, runs_of
from posbench.runs.run import PACK, Run

INTERRUPTED, UNREADABLE = "interrupted", "unreadable"  # never written: what `state_of` finds besides


def find_runs(folder: str | Path, notice: Callable[[str], object] = say_once) -> list[Run]:
    """Every run at or under `folder`, in the order of their names. What lies in a packed experiment is all in its pack.

    A place inside a packed experiment, such as `runs/reference/demo_cpu/alibi`, is a folder here as any other. A folder
    that may not be read is skipped, and `notice` told so; `seed=<n>` is a run all the same, whose manifest says why.
    """
    root = Path(folder)
    pack = _pack_of(root)
    if pack is not None:
        return [run for run in runs_of(pack) if root in (run.path, *run.path.parents)]
    return sorted(_below(root, notice, set()), key=lambda run: run.path)


def run_at(path: str | Path) -> Run:
    """The run that a stored path names: the one door by which a row of a table becomes a run again."""
    place = Path(path)
    pack = _pack_of(place)
    return PackedRun(place, pack) if pack is not None else Run(place)


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
    folders = [folder for folder in (place, *place.parents[:2]) if _holds_pack(folder)]
    return _opened(folders[0]) if folders else None


def _holds_pack(folder: Path) -> bool:
    try:
        return (folder / PACK).is_file()
    except OSError:  # it may not be read
        return False


def _opened(folder: Path) -> Pack:
    try:
        return _pack(folder, (folder / PACK).read_bytes())
    except OSError:
        return Pack(folder)


@lru_cache(maxsize=4)
def _pack(folder: Path, content: bytes) -> Pack:
    """One object for one `pack.json`: what it has read and checked is not read again for every run."""
    return Pack(folder)


def _below(folder: Path, notice: Callable[[str], object], visited: set[Path]) -> list[Run]:
    """The runs below `folder`. Links are followed, after the folders beside them; no folder is searched twice."""
    try:
        place = folder.resolve()
        if place in visited:
            return []
        visited.add(place)
        if (folder / PACK).is_file():
            return list(runs_of(_opened(folder)))
        if (folder / "run.json").is_file():
            return [Run(folder)]
        inner = [child for child in folder.iterdir() if not child.name.startswith(".") and child.is_dir()]
    except OSError as error:
        if folder.name.startswith("seed="):
            return [Run(folder)]
        if folder.exists():
            notice(f"skipped {folder}, which cannot be read: {error.strerror or error}")
        return []
    inner.sort(key=lambda child: (child.is_symlink(), child))
    return [run for child in inner for run in _below(child, notice, visited)]
