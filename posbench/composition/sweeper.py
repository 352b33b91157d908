"""Hydra's sweeper as posbench has it: every job is composed and checked before the first of them runs.

A job whose `train.branch_tokens` names shorter runs is followed by them: all trunks are trained, then all branches.

A launcher calls the `Task` for each job, in this process or in another, and what it returns, an `Outcome`, comes back
to the sweeper: how each job ended is read from what launchers return.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from posbench.composition.compose import typed
from posbench.composition.inert import check_composed
from posbench.composition.progress import SweepProgress
from posbench.composition.sweep import branch_words, describe, jobs_of, names_of, params_of, run_name, swept_values
from posbench.composition.words import Words
from posbench.config import Config, ConfigError
from posbench.machine.signals import Stopped


class JobFailed(Exception):
    """A job's error that was not a ConfigError, as its process described it."""


@dataclass(frozen=True)
class Outcome:
    """How a job of a sweep ended; `error` is None where it finished, `result` then what the job returned."""

    name: str
    error: Exception | None = None
    result: Any = None

    def __reduce__(self) -> tuple[type[Outcome], tuple[str, Exception | None, Any]]:
        """Errors travel between processes as text: not every exception can be pickled and read again."""
        error = self.error
        if error is not None and not isinstance(error, ConfigError):
            error = JobFailed(_kind(error) + str(error))
        return Outcome, (self.name, error, self.result)

    def __str__(self) -> str:
        return f"{self.name}: {_kind(self.error)}{self.error}"


def _kind(error: Exception | None) -> str:
    return "" if error is None or isinstance(error, (ConfigError, JobFailed)) else f"{type(error).__name__}: "


def _process() -> tuple[str, int]:
    return socket.gethostname(), os.getpid()


@dataclass
class Task:
    """What a launcher calls for each job of a sweep. `say` is told which begins, and each failure when it happens."""

    job: Callable[[Config], object]
    say: Callable[[str], object]
    words: Words
    is_finished: Callable[[Path], bool] = lambda folder: False  # whether a run folder needs no training
    progress: SweepProgress = field(default_factory=SweepProgress)  # set by the sweeper
    home: tuple[str, int] = field(default_factory=_process)  # the sweep's own process
    said: set[str] = field(default_factory=set)
    outcomes: list[Outcome] = field(default_factory=list)  # of the jobs that ended, filled by the sweeper
    has_workers: bool = False  # whether jobs were handed to other processes, set by the sweeper

    def __call__(self, composed: DictConfig) -> Outcome:
        """Raises: Stopped and KeyboardInterrupt in the sweep's own process, to end the whole sweep."""
        name = "a job"
        with suppress(OmegaConfBaseException):  # of a value that refers to nothing: `typed` says so
            name = run_name(composed)
        if self.progress.to_train:
            self.say(self.progress.begins(int(HydraConfig.get().job.num), name))
        try:
            result = self.job(typed(composed, self.words))
        except Exception as error:
            return self._failed(Outcome(name, error))
        except Stopped as stopped:
            if _process() == self.home:
                raise
            return self._failed(Outcome(name, JobFailed(str(stopped))))  # one worker was stopped: the others go on
        return Outcome(name, result=result)

    def _failed(self, outcome: Outcome) -> Outcome:
        if str(outcome.error) not in self.said:
            self.said.add(str(outcome.error))
            self.say(f"{outcome.name}: {outcome.error}")
        return outcome


class PosbenchSweeper(Sweeper):
    """Composes all jobs, checks each, says what will run, refuses two jobs of one folder, then launches them."""

    def __init__(self, max_batch_size: int | None, params: dict[str, str] | None) -> None:
        """Hydra's settings of a sweeper; `params` are read from the whole configuration (`params_of`)."""
        self.max_batch_size = max_batch_size

    def setup(self, *, hydra_context: HydraContext, task_function: Any, config: DictConfig) -> None:
        """Called by Hydra before `sweep`."""
        assert isinstance(task_function, Task)
        self.task, self.master = task_function, config
        self.loader: ConfigLoader = hydra_context.config_loader
        self.launcher: Launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        """Run the jobs that the words `arguments` name, and the sweep of an experiment that they name.

        Raises: ConfigError before the first job, for what is refused.
        """
        values = swept_values(params_of(self.master, self.task.words), self.task.words.only(arguments), self.loader)
        trunks = jobs_of(values)
        if not trunks:
            none = " ".join(word for word in arguments if "," in word or "(" in word)
            raise ConfigError(f"{none} matches nothing, so there is no run to train: see the names in conf/")
        composed = [self._composed(words) for words in trunks]  # all of them, before a name is resolved
        named = [(words, names_of(job)) for words, job in zip(trunks, composed, strict=True)]
        branches = [
            [*words, *more]
            for words, job in zip(trunks, composed, strict=True)
            for more in branch_words(job, self.task.words)
        ]
        composed += [self._composed(words) for words in branches]
        named += [(words, names_of(job)) for words, job in zip(branches, composed[len(trunks) :], strict=True)]
        to_train = [not self.task.is_finished(_folder(job)) for job in composed]
        finished = len(to_train) - sum(to_train)
        self.task.say(describe(named) + (f"; {finished} of them already finished" if finished else ""))
        self.task.progress = SweepProgress(to_train, self._workers)
        with _removed_if_empty(Path(str(self.master.hydra.sweep.dir))):
            self._launch_all(trunks, 0)
            self._launch_all(branches, len(trunks))  # from checkpoints of the trunks, so after the last of them

    def _launch_all(self, jobs: Sequence[Sequence[str]], first: int) -> None:
        size = max(1, self._batch_size(len(jobs)))
        for start in range(0, len(jobs), size):
            self._launch(jobs[start : start + size], first + start)

    def _composed(self, words: Sequence[str]) -> DictConfig:
        composed = self.loader.load_sweep_config(self.master, list(words))
        check_composed(composed, self.task.words.given())
        return composed

    @property
    def _is_sequential(self) -> bool:
        return type(self.launcher).__name__ == "BasicLauncher"  # Hydra's own, which runs one job after another here

    @property
    def _workers(self) -> int | None:
        """How many jobs run side by side on this machine; None where a cluster decides."""
        if self._is_sequential:
            return 1
        if (jobs := OmegaConf.select(self.master, "hydra.launcher.n_jobs")) is None:
            return None
        return int(jobs) if jobs > 0 else os.cpu_count()

    def _batch_size(self, num_jobs: int) -> int:
        """Jobs a launch: one where they run one after another, so that how a job ended is known when the next is
        interrupted."""
        if self._is_sequential:
            return 1
        return num_jobs if self.max_batch_size is None else max(1, self.max_batch_size)

    def _launch(self, batch: Sequence[Sequence[str]], first: int) -> None:
        self.task.has_workers = not self._is_sequential
        try:
            returned = self.launcher.launch(batch, initial_job_idx=first)
        except Exception as error:
            if self._is_sequential:
                raise
            message = (
                f"{type(self.launcher).__name__} failed ({type(error).__name__}: {error}): give the same command again "
                "to resume, finished runs are skipped"
            )
            self.task.outcomes.append(Outcome(f"{len(batch)} runs", ConfigError(message)))
        else:
            self.task.outcomes += [job.return_value for job in returned]


def _folder(composed: DictConfig) -> Path:
    """The run folder of a job, of values that may yet be refused when it runs."""
    return Path(str(OmegaConf.select(composed, "runs_dir")), run_name(composed))


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
