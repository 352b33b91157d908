"""Find the runs below a folder, and the runs that names on a command line mean."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from posbench.config import ConfigError, nearest
from posbench.runs.manifest import FINISHED, RUNNING
from posbench.runs.pack import PackedRun, experiment_in, free_name, open_pack, packs_of, write_pack
from posbench.runs.run import Run
from posbench.system.console import Say, say_once
from posbench.system.files import is_locked

INTERRUPTED, UNREADABLE = "interrupted", "unreadable"  # never written to a manifest; `state_of` returns them

SUBJECTS = "subjects"  # folder of models that were not trained here (`posbench.evaluation.subjects`)
LAST_SUBJECTS = "last.json"  # in that folder: names of the subjects of the last `posbench eval`
REFERENCE = Path(__file__).resolve().parents[2] / "runs" / "reference"  # exists in a checkout only


class NothingTrained(ConfigError):
    """There are no runs yet: neither of this name nor of a similar one."""


def find_runs(folder: str | Path, notice: Say = say_once) -> list[Run]:
    """Return every run at or below `folder`, sorted by path, including runs in packs.

    The pack `runs/demo.zip` is read as if it were the folder `runs/demo`. Runs of `posbench tune` in `runs/demo-tune`
    are found only if `folder` is that folder or inside it.
    """
    root, runs, visited = folder_of(Path(folder)), {}, set()
    # Packs of this folder and of those around it: `runs/demo/alibi` may be in `runs/demo.zip`. A run is at most three
    # folders below its experiment: lr=<rate>/<scheme>/seed=<n>.
    packs = list(chain.from_iterable(map(packs_of, (root, *root.parents[:3]))))

    for name, folders, files in os.walk(root, followlinks=True):
        path = Path(name)
        if "run.json" in files:
            runs[path] = Run(path)
        # There are no runs inside a run; and a link may lead back up. Without `folders`, `os.walk` goes no deeper.
        if "run.json" in files or path.resolve() in visited:
            folders.clear()
            continue
        visited.add(path.resolve())
        packs += [open_pack(path / file) for file in files if file.endswith(".zip") and (path / file).is_file()]
        # The runs of a search would be mixed with those of its experiment.
        holds_search_runs = path.name.endswith("-tune") and path != root
        folders[:] = [f for f in folders if not f.startswith(".") and not (holds_search_runs and f.startswith("lr="))]
    for pack in packs:
        try:
            # The folder's run wins over the packed one.
            runs = {run.path: run for run in pack.runs if root in (run.path, *run.path.parents)} | runs
        except ConfigError as error:
            notice(f"skipped: {error}")
    return [runs[path] for path in sorted(runs)]


def folder_of(path: Path) -> Path:
    """Return the experiment's folder if `path` is a pack (`runs/demo` for `runs/demo.zip`), else `path`."""
    if path.suffix == ".zip" and path.is_file():
        return open_pack(path).experiment
    return path


def run_at(path: str | Path) -> Run:
    """Return the run at `path`, in a folder or a pack; nothing is read, and the run need not exist."""
    path = Path(path)
    if not (path / "run.json").is_file():
        # A run in a pack is named from its experiment, two folders up, or three in a search's pack:
        # <experiment>/<scheme>/seed=<n>, and <experiment>-tune/lr=<rate>/<scheme>/seed=<n>.
        for folder in path.parents[1:3]:
            name = path.relative_to(folder).as_posix()
            for pack in packs_of(folder):
                if name in pack.index["runs"]:
                    return PackedRun(path, pack)
    return Run(path)


def search_folder(experiment: Path) -> Path:
    """Return the folder of an experiment's runs at several rates, `lr=<rate>/<scheme>/seed=<n>`."""
    return experiment.with_name(f"{experiment.name}-tune")


def load_run(path: str | Path) -> Run:
    """Return the run at `path`, after reading its manifest. Raises: ConfigError if no run is stored there."""
    run = run_at(path)
    # Reading it raises the error if there is none.
    _ = run.manifest
    return run


def state_of(run: Run) -> str:
    """Return the status in a run's manifest (`run.json`), INTERRUPTED or UNREADABLE."""
    try:
        status = run.manifest.status
    except ConfigError:
        return UNREADABLE
    # The manifest says `running`, but no process trains it.
    if status == RUNNING and not is_locked(run.path):
        return INTERRUPTED
    return status


def pack_experiment(experiment: Path, output: Path | None, notice: Say, weights: bool = False) -> Path:
    """Write the finished runs in the folder `experiment` to a new zip file, and return its path.

    Arguments: output, by default `free_name`; weights, True to include the last weights, rounded to bfloat16.
    Raises: ConfigError if the folder has no finished run to pack, a run is not in `experiment/<scheme>/seed=<n>`, or
    the output exists.
    """
    is_own = output is None or output.with_suffix("") == experiment
    folder = experiment if is_own or output is None else experiment_in(output)
    output = output or free_name(experiment)
    if output.suffix != ".zip" or output.exists():
        reason = "is not the name of a zip file"
        if output.exists():
            reason = "exists, and packs are never rewritten"
        raise ConfigError(f"{output} {reason}: name a new one, such as {free_name(experiment_in(output))}")
    # Runs in an earlier pack of the experiment are left out.
    packed_runs = chain.from_iterable(pack.runs for pack in packs_of(folder))
    packed = {run.path.relative_to(folder).as_posix() for run in packed_runs}
    runs = {}
    for run in find_runs(experiment, notice):
        state, name = state_of(run), run.path.relative_to(experiment).as_posix()
        if name in packed or isinstance(run, PackedRun):
            state = "packed already"
        if state == FINISHED:
            runs[name] = run
        else:
            notice(f"{run.name} is skipped: {state}")
    if not runs:
        raise ConfigError(f"{experiment} has no finished run to pack: train one first")
    # Runs of a search are one folder deeper, in their rate's.
    folders_deep = 3 if experiment.name.endswith("-tune") else 2
    for name, run in runs.items():
        # Other names are from a folder above an experiment, or inside one.
        if name.count("/") != folders_deep - 1:
            raise ConfigError(f"{run.path} is not a run of {experiment}: give the folder of one experiment")
    write_pack(output, experiment, runs, notice, weights)
    return output


def runs_named(names: Sequence[str], runs_dir: Path) -> list[Run]:
    """Return the runs that `names` mean, without duplicates, or all runs below `runs_dir`.

    Raises: ConfigError if a name matches nothing.
    """
    runs: dict[Run, None] = {}
    for folder in [place_named(name, runs_dir) for name in names] or [runs_dir]:
        runs_below = find_runs(folder)
        if not runs_below:
            raise ConfigError(no_runs(folder, runs_dir))
        runs |= dict.fromkeys(runs_below)
    return list(runs)


def no_runs(folder: Path, runs_dir: Path) -> str:
    """Return the error message for a `folder` without runs: the cause, and the command that trains a run."""
    remedy = f"posbench train scheme=vo_rope{_runs_dir_word(runs_dir)}"
    # Only a folder that the user named can be misspelt; the default one is made by the first run.
    if folder == runs_dir and _runs_dir_word(runs_dir) and not folder.exists():
        return f"there is no folder {folder}: correct --runs-dir, or train a run there ({remedy})"
    return f"{folder} contains no runs: train one first ({remedy})"


def _runs_dir_word(runs_dir: Path) -> str:
    # The override to add to a command, or "" for the default folder.
    if runs_dir == Path("runs"):
        return ""
    return f" {shlex.quote(f'runs_dir={runs_dir}')}"


def run_named(name: str, runs_dir: Path) -> Run:
    """Return the only run that `name` means. Raises: ConfigError if it means no run, or several."""
    runs = runs_named([name], runs_dir)
    if len(runs) > 1:
        raise ConfigError(f"{name!r} names {len(runs)} runs: give the folder of one, such as {runs[0].path}")
    return runs[0]


def only_experiment(runs_dir: Path) -> Path:
    """Return the folder of the only experiment in `runs_dir`, not counting `reference/` and `subjects/`.

    Raises: NothingTrained if there are no experiments; ConfigError if there are several.
    """
    folders = {run.experiment_folder for run in find_runs(runs_dir)}
    # Neither is an experiment of the user's.
    not_counted = {runs_dir / "reference", runs_dir / SUBJECTS}
    experiments = sorted(folder for folder in folders if not not_counted & {folder, *folder.parents})
    if len(experiments) != 1:
        if not experiments:
            raise NothingTrained(_no_experiments(runs_dir))
        raise ConfigError(f"name an experiment, such as {experiments[0].name} ({_how_to_list(runs_dir)})")
    return experiments[0]


def _no_experiments(runs_dir: Path) -> str:
    is_missing = bool(_runs_dir_word(runs_dir)) and not runs_dir.exists()
    cause = f"{runs_dir}/ contains no runs"
    if is_missing:
        cause = f"there is no folder {runs_dir}"
    return f"{cause}: train first with posbench train -m experiment=demo{_runs_dir_word(runs_dir)}"


def _how_to_list(runs_dir: Path) -> str:
    return f"posbench ls --runs-dir {shlex.quote(str(runs_dir))} lists those in {runs_dir}/"


def place_named(name: str, runs_dir: Path) -> Path:
    """Return the folder, of a run or of several, that `name` on the command line means.

    It is the first of these that exists: a folder below `runs_dir`, a path, the only experiment below `runs_dir` whose
    folder has this name, or a reference experiment. Raises: ConfigError if none exists, or NothingTrained if no name is
    similar.
    """
    # An experiment that has only a pack, or only a search, counts too.
    for folder in (runs_dir / name, Path(name)):
        if folder.is_dir() or find_runs(folder) or find_runs(search_folder(folder)):
            return folder_of(folder)
    runs = find_runs(runs_dir)
    experiments = sorted({run.experiment_folder for run in runs})
    matches = [experiment for experiment in experiments if experiment.name == name]
    if len(matches) == 1:
        return matches[0]
    if find_runs(REFERENCE / name) or find_runs(search_folder(REFERENCE / name)):
        return folder_of(REFERENCE / name)
    # For the error: everything that the name could have meant.
    known = {folder.relative_to(runs_dir) for run in runs for folder in (run.path, *run.path.parents[:2])}
    references = {run.experiment_folder.relative_to(REFERENCE) for run in find_runs(REFERENCE)}
    hint = nearest(name, sorted(map(str, known | references)))
    # A name that resembles no experiment may be one that the user has yet to train, so callers can tell it apart.
    is_misspelt = nearest(name, [experiment.name for experiment in experiments], cutoff=0.75)
    error = ConfigError if is_misspelt else NothingTrained
    remedy = _how_to_list(runs_dir) if experiments else _no_experiments(runs_dir)
    raise error(f"there is no run or experiment {name!r} in the working directory or in {runs_dir}/{hint} ({remedy})")
