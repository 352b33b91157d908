"""`posbench train` as an application of Hydra, and sweeps: every job is composed and checked before the first runs.

Hydra calls a `Task` for one run, and a launcher calls it for each job of a sweep, in this process or in another; what
it returns there, an `Outcome`, comes back to the sweeper. A job whose `train.branch_tokens` names shorter runs is
followed by them: all trunks are trained, then all branches.
"""

from __future__ import annotations

import itertools
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import hydra
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from posbench.composition import (
    GROUPS,
    VERSION_BASE,
    conf_dir,
    explained,
    hydra_word,
    parse,
    read_words,
    register,
    session,
    typed,
)
from posbench.config import Config, ConfigError
from posbench.machine.signals import Stopped
from posbench.units import duration

_FLAGS_WITH_VALUES = {"-c", "--cfg", "-i", "--info", "-p", "--package", "-cp", "--config-path", "-cn", "--config-name"}
_FLAGS_WITH_VALUES |= {"--experimental-rerun"}


# ---------------------------------------------------------------- the application


def run_application(
    program: str,
    words: Sequence[str],
    job: Callable[[Config], object],
    say: Callable[[str], object],
    is_finished: Callable[[Path], bool] = lambda folder: False,
) -> list[Outcome]:
    """Run `job` for the run that the words name, or for each run of a sweep, or print what `--cfg` and `--info` ask.

    In a sweep a job that fails does not keep the others from running. `say` receives what a sweep will run, which run
    begins, each failure when it happens, and all of them again where the sweep is interrupted. `is_finished` says of a
    run folder that it needs no training.
    Returns: how each job of a sweep ended, or the single run, whose outcome has no name.
    Raises: ConfigError for anything that is refused, where two jobs of a sweep would share a run folder, and where
    every job of a sweep raised it; what the job of a single run raises; Stopped for Ctrl-C between two runs.
    """
    task = Task(job, say, is_finished)
    register()
    sys.argv = [program, *_argv(words)]  # where Hydra reads them
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come to us, instead of Hydra's own print and exit
    application = hydra.main(version_base=VERSION_BASE, config_path=str(conf_dir()), config_name="config")(task)
    try:
        with explained():
            application()
    except (Stopped, KeyboardInterrupt) as interrupted:
        for outcome in _failed(task):
            task.say(f"posbench: {outcome}")
        if isinstance(interrupted, KeyboardInterrupt) and (task.outcomes or task.has_workers):
            where = "while several runs were training" if task.has_workers else "between two runs"
            raise Stopped(signal.SIGINT, f"interrupted {where}: give the same command again to resume") from None
        raise
    if task.error is not None:
        raise task.error
    failed = _failed(task)
    alike = len(failed) == len(task.outcomes) and len({str(outcome.error) for outcome in failed}) == 1
    if alike and failed[0].error is not None and not isinstance(failed[0].error, JobFailed):
        raise failed[0].error  # of the words, not of one job
    return task.outcomes


def _argv(words: Sequence[str]) -> list[str]:
    """The words as Hydra's command line takes them: overrides first, then flags, which it refuses among overrides."""
    remaining, folder = read_words(words)
    overrides: list[str] = []
    flags = [f"--config-dir={folder.absolute()}"] if folder else []
    for before, word in pairwise(["", *remaining]):
        is_flag = word.startswith("-") or (before in _FLAGS_WITH_VALUES and "=" not in word)
        (flags if is_flag else overrides).append(word)
    return [*overrides, *flags]


def _failed(task: Task) -> list[Outcome]:
    return [outcome for outcome in task.outcomes if outcome.error is not None]


# ---------------------------------------------------------------- one job


class JobFailed(Exception):
    """A job's error that was not a ConfigError, as its process described it."""


@dataclass(frozen=True)
class Outcome:
    """How a job of a sweep ended; `error` is None where it finished, `result` then what the job returned."""

    name: str
    error: Exception | None = None
    result: Any = None
    was_finished: bool = False  # before the sweep

    def __reduce__(self) -> tuple[type[Outcome], tuple[str, Exception | None, Any, bool]]:
        """Errors travel between processes as text: not every exception can be pickled and read again."""
        error = self.error
        if error is not None and not isinstance(error, ConfigError):
            error = JobFailed(_kind(error) + str(error))
        return Outcome, (self.name, error, self.result, self.was_finished)

    def __str__(self) -> str:
        return f"{self.name}: {_kind(self.error)}{self.error}"


def _kind(error: Exception | None) -> str:
    return "" if error is None or isinstance(error, (ConfigError, JobFailed)) else f"{type(error).__name__}: "


def _process() -> tuple[str, int]:
    return socket.gethostname(), os.getpid()


@dataclass
class Task:
    """What Hydra calls with the configuration of each job."""

    job: Callable[[Config], object]
    say: Callable[[str], object]  # is told which job begins, and each failure when it happens
    is_finished: Callable[[Path], bool]  # whether a run folder needs no training
    progress: Progress | None = None  # of a sweep, set by the sweeper; None: one run, or another sweeper's job
    home: tuple[str, int] = field(default_factory=_process)  # the sweep's own process
    said: set[str] = field(default_factory=set)
    error: Exception | None = None  # what the job of a single run raised
    outcomes: list[Outcome] = field(default_factory=list)  # of the jobs that ended, filled by the sweeper
    has_workers: bool = False  # whether jobs were handed to other processes, set by the sweeper

    def __call__(self, composed: DictConfig) -> Outcome:
        """Raises: Stopped and KeyboardInterrupt in the sweep's own process, to end the whole sweep."""
        if self.progress is None:
            try:
                outcome = Outcome("", result=self.job(typed(composed)))
                self.outcomes.append(outcome)
                return outcome
            except Exception as error:
                if HydraConfig.get().mode == RunMode.MULTIRUN:  # a job of another sweeper
                    raise
                self.error = error  # raised when Hydra is done, which would print it in words of its own
                return Outcome("", error)
        number = int(HydraConfig.get().job.num)
        name = self.progress.names[number]
        self.say(self.progress.begins(number))
        try:
            was_finished = not self.progress.to_train[number]
            return Outcome(name, result=self.job(typed(composed)), was_finished=was_finished)
        except Exception as error:
            return self._failed(Outcome(name, error))
        except Stopped as stopped:
            if _process() == self.home:
                raise
            return self._failed(Outcome(name, JobFailed(str(stopped))))  # one worker was stopped: the others go on

    def _failed(self, outcome: Outcome) -> Outcome:
        if str(outcome.error) not in self.said:
            self.said.add(str(outcome.error))
            self.say(f"{outcome.name}: {outcome.error}")
        return outcome


@dataclass
class Progress:
    """How far a sweep is: which run of how many begins, and about how long the rest takes.

    Arguments: names, of the runs in their order; to_train, for each whether it has to be trained (false: it is finished
    already); workers, how many are trained side by side, None where that is not known (a cluster decides).
    """

    names: Sequence[str]
    to_train: Sequence[bool]
    workers: int | None = 1
    clock: Callable[[], float] = time.time  # one that all processes of a machine share
    began: float = field(init=False)

    def __post_init__(self) -> None:
        self.began = self.clock()

    def begins(self, number: int) -> str:
        """`run 7 of 33: demo/vo_rope/seed=0, about 12 min left`, for the run of that number (0-based).

        By the mean time of the runs trained so far: nothing is said of it until one of them has ended.
        """
        line = f"run {number + 1} of {len(self.names)}: {self.names[number]}"
        ended = sum(self.to_train[:number]) - ((self.workers or 1) - 1)
        if self.workers is None or ended < 1:
            return line
        left = (self.clock() - self.began) / ended * (sum(self.to_train) - ended)
        return f"{line}, about {duration(max(1, left))} left"


# ---------------------------------------------------------------- many jobs


class Job(NamedTuple):
    """The words of a job of a sweep, and what they compose to."""

    words: Sequence[str]
    config: Config

    @property
    def names(self) -> tuple[str, str, int]:
        """What names its run folder: experiment, scheme, seed."""
        return self.config.experiment_name, self.config.scheme.name, self.config.seed

    @property
    def name(self) -> str:
        """`demo/vo_rope/seed=0`: the run folder below the runs folder."""
        return "{}/{}/seed={}".format(*self.names)


class PosbenchSweeper(Sweeper):
    """Composes and checks all jobs, says what will run, refuses two jobs of one folder, then launches them."""

    def __init__(self, max_batch_size: int | None, params: dict[str, str] | None) -> None:
        """Hydra's settings of a sweeper; `params` are read from the whole configuration (`swept_values`)."""
        self.max_batch_size = max_batch_size

    def setup(self, *, hydra_context: HydraContext, task_function: Any, config: DictConfig) -> None:
        """Called by Hydra before `sweep`."""
        assert isinstance(task_function, Task)
        self.task, self.master = task_function, config
        self.loader: ConfigLoader = hydra_context.config_loader
        self.launcher: Launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )
        self.is_sequential = config.hydra.runtime.choices["hydra/launcher"] == "basic"  # one after another, here

    def sweep(self, arguments: list[str]) -> None:
        """Run the jobs that the words `arguments` name, and the sweep of an experiment that they name.

        Raises: ConfigError before the first job, for what is refused.
        """
        if os.environ.get("WORLD_SIZE", "1") != "1":
            raise ConfigError(
                "a sweep (-m) cannot run under torchrun, because its runs would share one process group: give each run "
                "its own torchrun"
            )
        values = swept_values(self.master)
        trunks = [
            self._composed(words, number)
            for number, words in enumerate(dict.fromkeys(itertools.product(*values.values())))
        ]
        if not trunks:
            none = " ".join(word for word in arguments if "," in word or "(" in word)
            raise ConfigError(f"{none} matches nothing, so there is no run to train: see the names in conf/")
        words_of_branches = [[*trunk.words, *words] for trunk in trunks for words in trunk.config.branch_words()]
        branches = [self._composed(words, number) for number, words in enumerate(words_of_branches, len(trunks))]
        jobs = [*trunks, *branches]
        to_train = [not self.task.is_finished(Path(job.config.runs_dir, job.name)) for job in jobs]
        finished = len(jobs) - sum(to_train)
        self.task.say(describe(jobs) + (f"; {finished} of them already finished" if finished else ""))
        self.task.progress = Progress([job.name for job in jobs], to_train, self._workers)
        self.task.has_workers = not self.is_sequential
        with _removed_if_empty(Path(str(self.master.hydra.sweep.dir))):
            self._launch(trunks, 0)
            self._launch(branches, len(trunks))  # from checkpoints of the trunks, so after the last of them

    def _composed(self, words: Sequence[str], number: int) -> Job:
        composed = self.loader.load_sweep_config(self.master, list(words))
        with open_dict(composed):
            composed.hydra.job.num = composed.hydra.job.id = number
        HydraConfig.instance().set_config(composed)
        job = Job(words, typed(composed))
        OmegaConf.copy_cache(composed, self.master)  # what was looked up once is the same in all jobs
        return job

    @property
    def _workers(self) -> int | None:
        """How many jobs run side by side on this machine; None where a cluster decides."""
        if self.is_sequential:
            return 1
        if (jobs := OmegaConf.select(self.master, "hydra.launcher.n_jobs")) is None:
            return None
        return int(jobs) if jobs > 0 else os.cpu_count()

    def _launch(self, jobs: Sequence[Job], first: int) -> None:
        """In batches: of one job where they run one after another, so that its end is known when the next is
        interrupted."""
        size = 1 if self.is_sequential else self.max_batch_size or max(1, len(jobs))
        for start in range(0, len(jobs), size):
            batch = [list(job.words) for job in jobs[start : start + size]]
            try:
                returned = self.launcher.launch(batch, initial_job_idx=first + start)
            except Exception as error:
                if self.is_sequential:
                    raise
                message = (
                    f"{type(self.launcher).__name__} failed ({type(error).__name__}: {error}): give the same command "
                    "again to resume, finished runs are skipped"
                )
                self.task.outcomes.append(Outcome(f"{len(batch)} runs", ConfigError(message)))
            else:
                self.task.outcomes += [job.return_value for job in returned]


@contextmanager
def _removed_if_empty(folder: Path) -> Iterator[None]:
    """Remove the folder that launchers make for their files, and the one above, where nothing was written to them."""
    made = [place for place in (folder, folder.parent) if not place.exists()]
    try:
        yield
    finally:
        for place in made:
            with suppress(OSError):
                place.rmdir()


# ---------------------------------------------------------------- what a sweep would run


def sweep_of(words: Sequence[str]) -> dict[str, list[str]]:
    """The values of each key that `posbench train -m WORDS` would sweep.

    Those in the words, and those of an experiment that they name.

    Returns: key -> its values as words of the command line, `{"scheme": ["nope", "qk_rope"], "seed": ["0", "1"]}`.
    Raises: ConfigError for what Hydra would refuse.
    """
    with session(words, RunMode.MULTIRUN) as composed:
        fixed = {key for key, override in _overrides(composed).items() if not override.is_sweep_override()}
        values = swept_values(composed)
    return {key: [word.partition("=")[2] for word in of_key] for key, of_key in values.items() if key not in fixed}


def swept_values(composed: DictConfig) -> dict[str, list[str]]:
    """Key -> its words, one a value, `{"seed": ["seed=0", "seed=1"]}`; the last word of a key decides.

    Within the session of Hydra that `composed` belongs to, which lists the choices that a `glob(*)` stands for.
    Raises: ConfigError where several experiments are named; Hydra's errors.
    """
    overrides = _overrides(composed)
    if "experiment" in overrides and overrides["experiment"].is_sweep_override():
        raise ConfigError(
            f"{overrides['experiment'].input_line!r}: each experiment has its own sweep, so run one after another: "
            "posbench train -m experiment=NAME"
        )
    return {
        key: [f"{key}={value}".replace("\\:", ":") for value in override.sweep_string_iterator()]
        if override.is_sweep_override()
        else [str(override.input_line)]
        for key, override in overrides.items()
    }


def _overrides(composed: DictConfig) -> dict[str, Override]:
    """The overrides of a sweep by their keys: those of `hydra.sweeper.params`, then the words.

    The default experiment's sweep is not taken: `posbench train -m seed=0,1` is two runs. So where the words name no
    experiment, only what they say of `hydra.sweeper.params` themselves counts.
    """
    said: Any = OmegaConf.to_container(composed.hydra.overrides, resolve=False)
    words: list[str] = said["task"]
    given = [word.lstrip("+").partition("=")[0] for word in said["hydra"]]
    names_experiment = any(word.lstrip("+").startswith("experiment=") for word in words)
    takes_all = names_experiment or composed.hydra.job.config_name != "config"
    params = {
        key: value
        for key, value in (OmegaConf.select(composed, "hydra.sweeper.params") or {}).items()
        if takes_all or f"hydra.sweeper.params.{key}" in given or "hydra.sweeper.params" in given
    }
    overrides: dict[str, Override] = {}
    for override in parse([*(hydra_word(f"{key}={value}") for key, value in params.items()), *words]):
        override.config_loader = GlobalHydra.instance().config_loader()
        overrides[override.get_key_element()] = override
    return overrides


def describe(jobs: Sequence[Job]) -> str:
    """`22 runs: 11 schemes x 2 seeds`. Raises: ConfigError where two jobs of different words have one run folder."""
    first_of: dict[tuple[str, str, int], Job] = {}
    for job in jobs:
        if first_of.setdefault(job.names, job).words != job.words:
            raise _clash(first_of[job.names], job)
    counts = [len(set(values)) for values in zip(*first_of, strict=True)]
    named = [
        f"{count} {what}{'s' * (count > 1)}"
        for count, what in zip(counts, ("experiment", "scheme", "seed"), strict=True)
        if count > 1 or what != "experiment"
    ]
    total = len(first_of)
    return f"{total} run{'s' * (total > 1)}: {(' x ' if math.prod(counts) == total else ', ').join(named)}"


def _clash(one: Job, other: Job) -> ConfigError:
    """The refusal of two jobs of one run folder, with a way to name them apart."""
    changed = [word for word in other.words if word not in one.words]
    keys = [word.partition("=")[0] for word in changed]
    setting, before = "experiment_name", one.config.experiment_name
    if all(key.startswith("scheme.") for key in keys):
        setting, before = "scheme.name", one.config.scheme.name
    name = "_".join([before, *(f"{key.rpartition('.')[2]}_${{{key}}}" for key in keys)])
    remedy = f"give them different names, such as '{setting}={name}' (with the quotes)"
    if any(key in GROUPS for key in keys):
        remedy = "give each its own command, with experiment_name=... to name it"
    return ConfigError(
        f"two runs of this sweep would share the folder {one.name}: "
        f"{' '.join(word for word in one.words if word not in other.words)} and {' '.join(changed)}; {remedy}"
    )
