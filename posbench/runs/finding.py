"""Which runs there are at a place, and which of them the words of a command name.

Runs lie in run folders and in packs, which need no folders. A word is a folder below `runs_dir`, a folder as given, or
the name of an experiment's folder; the error for one that names nothing says what there is.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from posbench.config import ConfigError, nearest
from posbench.runs.manifest import FINISHED, RUNNING
from posbench.runs.pack import RATES, PackedRun, experiment_in, free_name, opened, packs_of, write_pack
from posbench.runs.run import Run
from posbench.system.console import Say, say_once
from posbench.system.files import is_locked

INTERRUPTED, UNREADABLE = "interrupted", "unreadable"  # never written: what `state_of` finds besides

LISTED = 6  # experiments in a message
REFERENCE = Path(__file__).resolve().parents[2] / "runs" / "reference"  # in a checkout


def find_runs(folder: str | Path, notice: Say = say_once) -> list[Run]:
    """Every run at or under `folder`, in the order of their names. A pack is read as the folder of its experiment.

    So `runs/demo`, `runs/demo.zip`, `runs/demo/alibi` and `runs` name runs of `runs/demo.zip` and `runs/demo.2.zip`
    too; where a run is there twice, the folder is taken. Links are followed. Packs that cannot be read are skipped
    with a message by `notice`. Pilots of `posbench tune`, in `runs/demo-tune`, are found by that folder's name alone.
    """
    root, runs, seen = folder_of(Path(folder)), {}, set()
    packs = [pack for place in (root, *root.parents[:3]) for pack in packs_of(place)]

    for name, folders, files in os.walk(root, followlinks=True):
        place = Path(name)
        if "run.json" in files:
            runs[place] = Run(place)
        if "run.json" in files or place.resolve() in seen:  # a link may lead back up
            folders.clear()
            continue
        seen.add(place.resolve())
        packs += [opened(place / file) for file in files if file.endswith(".zip")]
        has_pilots = place.name.endswith("-tune") and place != root
        folders[:] = [f for f in folders if not f.startswith(".") and not (has_pilots and f.startswith("lr="))]
    for pack in packs:
        try:
            runs = {run.path: run for run in pack.runs if root in (run.path, *run.path.parents)} | runs
        except ConfigError as error:
            notice(f"skipped: {error}")
    return [runs[path] for path in sorted(runs)]


def folder_of(place: Path) -> Path:
    """The folder of the experiment that a pack holds; any other place as it is."""
    return opened(place).experiment if place.suffix == ".zip" and place.is_file() else place


def run_at(path: str | Path) -> Run:
    """The run stored at `path`, in a folder or in a pack."""
    place = Path(path)
    above = [] if (place / "run.json").is_file() else place.parents[1:3]
    packs = [(pack, place.relative_to(folder).as_posix()) for folder in above for pack in packs_of(folder)]
    return next((PackedRun(place, pack) for pack, name in packs if name in pack.index["runs"]), Run(place))


def search_folder(experiment: Path) -> Path:
    """Return the folder that holds an experiment's runs at several learning rates, in `lr=<rate>/<scheme>/seed=<n>`."""
    return experiment.with_name(f"{experiment.name}-tune")


def load_run(path: str | Path) -> Run:
    """The run at this place. Raises: ConfigError where there is none."""
    run = run_at(path)
    _ = run.manifest
    return run


def state_of(run: Run) -> str:
    """A run's status: its manifest's, but `interrupted` for one that says it runs while no process trains it.

    `unreadable` where the manifest is missing, torn, or of another format.
    """
    try:
        status = run.manifest.status
    except ConfigError:
        return UNREADABLE
    return INTERRUPTED if status == RUNNING and not is_locked(run.path) else status


def pack_experiment(experiment: Path, output: Path | None, notice: Say, weights: bool = False) -> Path:
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
        raise ConfigError(f"{output} {why}: name a new one, such as {free_name(experiment_in(output))}")
    folder = experiment_in(output)
    packed = {run.path.relative_to(folder).as_posix() for pack in packs_of(folder) for run in pack.runs}
    runs = {}
    for run in find_runs(experiment, notice):
        state, name = state_of(run), run.path.relative_to(experiment).as_posix()
        if name in packed or isinstance(run, PackedRun):
            state = "packed already"
        if state == FINISHED:
            runs[name] = run
        else:
            notice(f"{run.name} is {state}: skipped")
    if not runs:
        raise ConfigError(f"{experiment} has no finished run to pack: train one first")
    depth = 3 if experiment.name.endswith("-tune") else 2
    if strange := next((run for name, run in runs.items() if name.count("/") != depth - 1), None):
        raise ConfigError(f"{strange.path} does not lie in {experiment}: give the folder of one experiment")
    write_pack(output, runs, notice, weights)
    return output


def runs_named(names: Sequence[str], runs_dir: Path) -> list[Run]:
    """The runs that the words name, each once; all of `runs_dir` without a word. Raises: ConfigError."""
    runs: dict[Run, None] = {}
    for place in [place_named(name, runs_dir) for name in names] or [runs_dir]:
        below = find_runs(place)
        if not below:
            raise ConfigError(f"{place} contains no runs: train one first (posbench train scheme=vo_rope)")
        runs |= dict.fromkeys(below)
    return list(runs)


def rates_of(run: Run) -> list[str]:
    """The tables that `posbench tune` left for the run's experiment, and for its trunk's where it is a branch: CSV.

    That in the experiment's folder first, then those in its packs, the newest first.
    """
    experiment = run.path.parents[1]
    tables: list[str | None] = []
    tokens = [run.manifest.identity.get(f"train.{name}") for name in ("tokens", "trunk_tokens")]
    trunk = run.config.trunk_name if tokens[0] != tokens[1] else None  # a configuration needs Hydra: read for branches
    for folder in (experiment, experiment.with_name(trunk or experiment.name)):
        if (file := folder / RATES).is_file():
            tables.append(file.read_text(encoding="utf-8"))
        tables += [pack.index.get("rates") for pack in reversed(packs_of(folder))]
    return list(filter(None, tables))


def run_named(name: str, runs_dir: Path) -> Run:
    """The one run that the word names. Raises: ConfigError."""
    first, *others = runs_named([name], runs_dir)
    if others:
        raise ConfigError(f"{name!r} names {len(others) + 1} runs: give the folder of one, such as {first.path}")
    return first


def only_experiment(runs_dir: Path) -> Path:
    """The only experiment in `runs_dir`, but for `reference/`. Raises: ConfigError for none or several."""
    places = {run.path.parents[1] for run in find_runs(runs_dir)}
    ours = sorted(place for place in places if runs_dir / "reference" not in place.parents)
    if len(ours) != 1:
        listed = ", ".join(map(str, ours)) or "no runs: train first with posbench train -m experiment=demo"
        raise ConfigError(f"which experiment? {runs_dir}/ contains {listed}")
    return ours[0]


def place_named(name: str, runs_dir: Path) -> Path:
    """Return the folder of that name, below `runs_dir` or here, or the one experiment whose folder has that name.

    Reference experiments are found from any working directory. Raises: ConfigError with the nearest name that there is.
    """
    for place in (runs_dir / name, Path(name)):
        if place.is_dir() or find_runs(place) or find_runs(search_folder(place)):
            return folder_of(place)
    runs = [run.path for run in find_runs(runs_dir)]
    experiments = sorted({run.parents[1] for run in runs})
    named = [experiment for experiment in experiments if experiment.name == name]
    if len(named) == 1:
        return named[0]
    if find_runs(REFERENCE / name) or find_runs(search_folder(REFERENCE / name)):
        return folder_of(REFERENCE / name)
    known = [str(place.relative_to(runs_dir)) for place in (*experiments, *sorted({run.parent for run in runs}), *runs)]
    references = sorted({str(run.path.parents[1].relative_to(REFERENCE)) for run in find_runs(REFERENCE)})
    listed = ", ".join(known[: len(experiments)][:LISTED]) or "none: train first with posbench train -m experiment=demo"
    listed += f" and {len(experiments) - LISTED} more, which posbench ls lists" if len(experiments) > LISTED else ""
    hint = nearest(name, [*known, *references])
    raise ConfigError(
        f"there is no run or experiment {name!r}, here or under {runs_dir}/{hint} (experiments there: {listed})"
    )
