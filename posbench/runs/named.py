"""The runs and the experiment that the words of a command name, or an error that says which there are.

A word is a folder as given, a folder below `runs_dir`, or the name of an experiment's folder. Everything here raises
ConfigError.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from posbench.config import ConfigError, nearest
from posbench.runs.finding import find_runs, folder_of, holds_runs
from posbench.runs.run import Run


def runs_named(names: Sequence[str], runs_dir: Path) -> list[Run]:
    """The runs that the words name, each once; all of `runs_dir` but pilots without a word."""
    if not names and not runs_dir.is_dir():
        raise ConfigError(f"{runs_dir}/ does not exist: train first with posbench train scheme=vo_rope")
    runs: list[Run] = []
    for name in names or [""]:
        place = _place(name, runs_dir)
        if place is None:
            raise _no_run(name, runs_dir)
        below = [run for run in find_runs(place) if names or not is_pilot(run.path.parent.parent)]
        if not below:
            raise ConfigError(f"{place} contains no runs: train one first (posbench train scheme=vo_rope)")
        runs.extend(run for run in below if run not in runs)
    return runs


def run_named(name: str, runs_dir: Path) -> Run:
    """The one run that the word names."""
    runs = runs_named([name], runs_dir)
    if not name or len(runs) > 1:
        listed = ", ".join(str(run.path) for run in runs[:3]) + (", ..." if len(runs) > 3 else "")
        raise ConfigError(f"{name!r} names {len(runs)} runs, but only one can be used: give its folder ({listed})")
    return runs[0]


def is_pilot(experiment: Path) -> bool:
    """Whether a folder is of pilots of `posbench tune`, `runs/demo-tune/lr=0.005`: taken only where they are named."""
    return experiment.parent.name.endswith("-tune") and experiment.name.startswith("lr=")


def experiment_named(name: str | None, runs_dir: Path) -> Path:
    """The experiment's folder; without a name that of the only one, `reference/` and pilots aside."""
    folders = _experiments(runs_dir)
    if name is not None:
        place = _place(name, runs_dir)
        if place is None:
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
    """The folder of that name, here or below `runs_dir`; or the one experiment whose folder has that name."""
    if not name:
        return runs_dir
    given = next((folder_of(place) for place in (Path(name), runs_dir / name) if holds_runs(place)), None)
    experiments = [folder for folder in _experiments(runs_dir) if folder.name == name]
    return given or (experiments[0] if len(experiments) == 1 else None)


def _experiments(runs_dir: Path) -> list[Path]:
    folders = {run.path.parent.parent for run in find_runs(runs_dir)}
    return sorted(folder for folder in folders if folder.is_relative_to(runs_dir))


def _no_run(name: str, runs_dir: Path) -> ConfigError:
    paths = [run.path.relative_to(runs_dir) for run in find_runs(runs_dir)]
    known = sorted({str(place) for path in paths for place in (path, *path.parents[:2])})
    return ConfigError(
        f"there is no run {name!r}, here or under {runs_dir}/{nearest(name, known)}: give a folder such as "
        f"{runs_dir}/demo/vo_rope/seed=0, or an experiment such as demo"
    )


def _no_experiment(name: str, runs_dir: Path, folders: Sequence[Path]) -> ConfigError:
    from posbench.composition import choices  # Hydra is not imported where the name is found

    known = [str(folder.relative_to(runs_dir)) for folder in folders]
    remedy = nearest(name, known or choices("experiment"))
    if name in choices("experiment"):
        remedy = f": train it first with posbench train -m experiment={name}"
    listed = ", ".join(known) or "none"
    return ConfigError(f"there is no experiment {name!r} under {runs_dir}/ (experiments there: {listed}){remedy}")
