"""Which runs there are at a place, and which of them the words of a command name.

Runs lie in run folders and in packs, which need no folders. A word is a folder below `runs_dir`, a folder as given, or
the name of an experiment's folder; the error for one that names nothing says what there is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from posbench.config import ConfigError, nearest
from posbench.console import say_once
from posbench.machine.lock import is_locked
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
    folders, packs = _below(root, notice, set())
    packs += [pack for place in (root, *root.parents[:2]) for pack in packs_of(place)]
    runs = {run.path: run for run in reversed([*folders, *(run for pack in packs for run in _runs_of(pack, notice))])}
    return [runs[path] for path in sorted(runs) if root in (path, *path.parents)]


def folder_of(place: Path) -> Path:
    """The folder of the experiment that a pack holds; any other place as it is."""
    return opened(place).experiment if place.suffix == ".zip" and place.is_file() else place


def run_at(path: str | Path) -> Run:
    """The run stored at `path`, in a folder or in a pack."""
    place = Path(path)
    packs = [] if (place / "run.json").is_file() else packs_of(place.parent.parent)
    name = "/".join(place.parts[-2:])
    return next((PackedRun(place, pack) for pack in packs if name in pack.index["runs"]), Run(place))


def load_run(path: str | Path) -> Run:
    """The run at this place. Raises: ConfigError where there is none."""
    run = run_at(path)
    _ = run.manifest
    return run


def holds_runs(place: Path) -> bool:
    """Whether `place` is a folder, or one that a pack stands for."""
    return place.is_dir() or bool(find_runs(place))


def state_of(run: Run) -> str:
    """A run's status: its manifest's, but `interrupted` for one that says it runs while no process trains it.

    `unreadable` where the manifest is missing, torn, or of another format.
    """
    try:
        status = run.manifest.status
    except ConfigError:
        return UNREADABLE
    return INTERRUPTED if status == RUNNING and not is_locked(run.path) else status


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
        state = state_of(run)
        if run.path.parts[-2:] in packed or isinstance(run, PackedRun):
            state = "packed already"
        if state == FINISHED:
            runs.append(run)
        else:
            notice(f"{run.name} is {state}: skipped")
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


def _below(folder: Path, notice: Notice, visited: set[Path]) -> tuple[list[Run], list[Pack]]:
    """Runs and packs below `folder`. Links are followed, after the folders beside them; no folder is searched twice."""
    runs: list[Run] = []
    packs: list[Pack] = []
    try:
        place = folder.resolve()
        if place in visited or not folder.is_dir():
            return runs, packs
        visited.add(place)
        if (folder / "run.json").is_file():
            return [Run(folder)], packs
        inner = [child for child in folder.iterdir() if not child.name.startswith(".")]
    except OSError as error:
        if folder.name.startswith("seed="):
            return [Run(folder)], packs
        notice(f"skipped {folder}, which cannot be read: {error.strerror or error}")
        return runs, packs
    for child in sorted(inner, key=lambda child: (child.is_symlink(), child)):
        if child.suffix == ".zip" and child.is_file():
            packs.append(opened(child))
        found = _below(child, notice, visited)
        runs += found[0]
        packs += found[1]
    return runs, packs


def runs_named(names: Sequence[str], runs_dir: Path) -> list[Run]:
    """The runs that the words name, each once; all of `runs_dir` but pilots without a word. Raises: ConfigError."""
    if not names and not runs_dir.is_dir():
        raise ConfigError(f"{runs_dir}/ does not exist: train first with posbench train scheme=vo_rope")
    runs: list[Run] = []
    for name in names or [""]:
        place = _place(name, runs_dir)
        if place is None:
            paths = [run.path.relative_to(runs_dir) for run in find_runs(runs_dir)]
            known = sorted({str(place) for path in paths for place in (path, *path.parents[:2])})
            raise ConfigError(
                f"there is no run {name!r}, here or under {runs_dir}/{nearest(name, known)}: give a folder such as "
                f"{runs_dir}/demo/vo_rope/seed=0, or an experiment such as demo"
            )
        below = [run for run in find_runs(place) if names or not is_pilot(run.path.parent.parent)]
        if not below:
            raise ConfigError(f"{place} contains no runs: train one first (posbench train scheme=vo_rope)")
        runs.extend(run for run in below if run not in runs)
    return runs


def run_named(name: str, runs_dir: Path) -> Run:
    """The one run that the word names. Raises: ConfigError."""
    runs = runs_named([name], runs_dir)
    if not name or len(runs) > 1:
        listed = ", ".join(str(run.path) for run in runs[:3]) + (", ..." if len(runs) > 3 else "")
        raise ConfigError(f"{name!r} names {len(runs)} runs, but only one can be used: give its folder ({listed})")
    return runs[0]


def is_pilot(experiment: Path) -> bool:
    """Whether a folder is of pilots of `posbench tune`, `runs/demo-tune/lr=0.005`: taken only where they are named."""
    return experiment.parent.name.endswith("-tune") and experiment.name.startswith("lr=")


def experiment_named(name: str | None, runs_dir: Path) -> Path:
    """The experiment's folder; without a name the only one, but for `reference/` and pilots. Raises: ConfigError."""
    folders = _experiments(runs_dir)
    if name is not None:
        if (place := _place(name, runs_dir)) is None:
            raise _no_experiment(name, runs_dir, folders)
        return place
    candidates = [
        folder for folder in folders if "reference" not in folder.relative_to(runs_dir).parts and not is_pilot(folder)
    ]
    if len(candidates) > 1:
        listed = ", ".join(map(str, candidates))
        raise ConfigError(f"which experiment? {runs_dir}/ contains {listed}: posbench report EXPERIMENT")
    if not candidates:
        others = f" except {', '.join(map(str, folders))}" if folders else ""
        train = "train first with posbench train -m experiment=demo"
        raise ConfigError(f"{runs_dir}/ contains no runs{others}: {train}")
    return candidates[0]


def _place(name: str, runs_dir: Path) -> Path | None:
    """The folder of that name, below `runs_dir` or here; or the one experiment whose folder has that name."""
    if not name:
        return runs_dir
    if given := next((folder_of(place) for place in (runs_dir / name, Path(name)) if holds_runs(place)), None):
        return given
    experiments = [folder for folder in _experiments(runs_dir) if folder.name == name]
    return experiments[0] if len(experiments) == 1 else None


def _experiments(runs_dir: Path) -> list[Path]:
    folders = {run.path.parent.parent for run in find_runs(runs_dir)}
    return sorted(folder for folder in folders if folder.is_relative_to(runs_dir))


def _no_experiment(name: str, runs_dir: Path, folders: Sequence[Path]) -> ConfigError:
    from posbench.composition import choices  # Hydra is not imported where the name is found

    known = [str(folder.relative_to(runs_dir)) for folder in folders]
    remedy = nearest(name, known or choices("experiment"))
    if name in choices("experiment"):
        remedy = f": train it first with posbench train -m experiment={name}"
    listed = ", ".join(known) or "none"
    return ConfigError(f"there is no experiment {name!r} under {runs_dir}/ (experiments there: {listed}){remedy}")
