"""Which runs there are at a place: run folders, and the runs in packs, which need no folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from posbench.config import ConfigError
from posbench.console import say_once
from posbench.machine.lock import is_held
from posbench.runs.manifest import FINISHED, RUNNING
from posbench.runs.pack import Pack, PackedRun, experiment_in, free_name, opened, packs_of, write_pack
from posbench.runs.run import Run

INTERRUPTED, UNREADABLE = "interrupted", "unreadable"  # never written: what `state_of` finds besides
Notice = Callable[[str], object]


def find_runs(folder: str | Path, notice: Notice = say_once) -> list[Run]:
    """Every run at or under `folder`, in the order of their names. A pack is read as the folder of its experiment.

    So `runs/demo`, `runs/demo.zip`, `runs/demo/alibi` and `runs` name runs of `runs/demo.zip` and `runs/demo.2.zip`
    too; where a run is there twice, the folder is taken. What may not be read is skipped, and `notice` told so; a
    folder `seed=<n>` is a run all the same, whose manifest says why.
    """
    root = folder_of(Path(folder))
    packed = [run for place in (root, *root.parents[:2]) for pack in packs_of(place) for run in _runs_of(pack, notice)]
    runs: dict[Path, Run] = {}
    for run in [*_below(root, notice, set()), *packed]:
        if root in (run.path, *run.path.parents):
            runs.setdefault(run.path, run)
    return sorted(runs.values(), key=lambda run: run.path)


def folder_of(place: Path) -> Path:
    """The folder of the experiment that a pack holds; any other place as it is."""
    return opened(place).experiment if place.suffix == ".zip" and place.is_file() else place


def run_at(path: str | Path) -> Run:
    """The run stored at `path`, in a folder or in a pack."""
    place = Path(path)
    if not (place / "run.json").is_file():
        for pack in packs_of(place.parent.parent):
            if "/".join(place.parts[-2:]) in pack.index["runs"]:
                return PackedRun(place, pack)
    return Run(place)


def load_run(path: str | Path) -> Run:
    """The run at this place. Raises: ConfigError where there is none."""
    run = run_at(path)
    _ = run.manifest
    return run


def holds_runs(place: Path) -> bool:
    """Whether `place` is a folder, or one that a pack stands for."""
    return place.is_dir() or bool(find_runs(place))


def state_of(run: Run) -> str:
    """What has become of a run: its manifest's status, but `interrupted` for one that says it runs and nobody trains.

    `unreadable` where the manifest is missing, torn, or of another format.
    """
    try:
        status = run.manifest.status
    except ConfigError:
        return UNREADABLE
    return INTERRUPTED if status == RUNNING and not is_held(run.path) else status


def pack_experiment(experiment: Path, output: Path | None, notice: Notice, weights: bool = False) -> Path:
    """Write the finished runs of an experiment's folder to a zip that did not exist, and return its path.

    Arguments: output, by default the first of `<experiment>.zip`, `<experiment>.2.zip` and so on that is free; what
    lies in a pack of these already is left out. Notice is told what is left out, and why. weights, whether the last
    weights go with them, rounded to bfloat16.
    Raises: ConfigError where there is no run, one lies elsewhere than in `experiment/<scheme>/seed=<n>`, or the output
    exists.
    """
    output = output or free_name(experiment)
    if output.suffix != ".zip" or output.exists():
        why = "exists, and packs are never rewritten" if output.exists() else "is not the name of a zip file"
        raise ConfigError(f"{output} {why}: name a new one, such as {free_name(output.with_suffix(''))}")
    packed = {run.path.parts[-2:] for pack in packs_of(experiment_in(output)) for run in pack.runs}
    runs = []
    for run in find_runs(experiment, notice):
        try:
            state, why = state_of(run), ""
            _ = run.manifest, run.config, run.evaluated()
        except ConfigError as error:
            state, why = UNREADABLE, f" ({error})"
        if run.path.parts[-2:] in packed or isinstance(run, PackedRun):
            state = "packed already"
        if state == FINISHED:
            runs.append(run)
        else:
            notice(f"{run.name} is {state}: skipped{why}")
    if not runs:
        raise ConfigError(f"{experiment} has no finished run to pack: train one first")
    if strange := next((run for run in runs if run.path.parents[1] != experiment), None):
        raise ConfigError(f"{strange.path} does not lie in {experiment}: give the folder of one experiment")
    write_pack(output, runs, notice, weights)
    return output


def _runs_of(pack: Pack, notice: Notice) -> list[Run]:
    try:
        return pack.runs
    except ConfigError as error:
        notice(f"skipped: {error}")
        return []


def _below(folder: Path, notice: Notice, visited: set[Path]) -> list[Run]:
    """The runs below `folder`. Links are followed, after the folders beside them; no folder is searched twice."""
    try:
        place = folder.resolve()
        if place in visited or not folder.is_dir():
            return []
        visited.add(place)
        if (folder / "run.json").is_file():
            return [Run(folder)]
        inner = [child for child in folder.iterdir() if not child.name.startswith(".")]
    except OSError as error:
        if folder.name.startswith("seed="):
            return [Run(folder)]
        if folder.exists():
            notice(f"skipped {folder}, which cannot be read: {error.strerror or error}")
        return []
    inner.sort(key=lambda child: (child.is_symlink(), child))
    runs = [run for child in inner for run in _below(child, notice, visited)]
    zips = [opened(child) for child in inner if child.suffix == ".zip" and child.is_file()]
    return runs + [run for pack in zips for run in _runs_of(pack, notice)]
