"""Run `posbench train` as a Hydra application, for one run or a sweep. All jobs are checked before the first one runs.

In a sweep, a launcher calls the `SweepJob` for each job, in this process or another one, and returns its `Outcome`.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import hydra
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep, Sweep
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, RunMode
from joblib import effective_n_jobs
from omegaconf import DictConfig, OmegaConf, open_dict
from rich.console import Console

from posbench.catalogue.choices import conf_dir
from posbench.catalogue.own_files import explained
from posbench.composition.compose import (
    VERSION_BASE,
    checked_config,
    hydra_word,
    no_option,
    plain_errors,
    register,
    session,
    with_experiment,
)
from posbench.composition.setups import setups_named, with_setup
from posbench.config import Config, ConfigError
from posbench.config.units import count_of
from posbench.runs import INTERRUPTED, run_at, state_of
from posbench.runs.fingerprints import identity
from posbench.system.console import SWEEP_CLOCK, Say, SweepClock, plain_table, write_unread_output
from posbench.system.signals import CommandSignals, Stopped, ending_with_command, launch_number

MOST_SEED_COLUMNS = 6  # of the table of losses at the end of a sweep
_FLAGS_WITH_VALUES = {"-c", "--cfg", "-i", "--info", "-p", "--package", "-cp", "--config-path", "-cn", "--config-name"}
_FLAGS_WITH_VALUES |= {"-cd", "--config-dir", "--experimental-rerun"}
_MULTIRUN = {"-m", "--multirun"}
_FLAGS = _FLAGS_WITH_VALUES | _MULTIRUN | {"-r", "--run", "--resolve", "-h", "--hydra-help", "--version"}
_HYDRA_WRITES = ("hydra.output_subdir=", "hydra/job_logging=", "hydra/hydra_logging=", "hydra/launcher=submitit")


Stacks = Callable[[Sequence[Config], Say], list[list[int]]]  # which of several jobs run as one

# ---------------------------------------------------------------- the application


def run_application(program: str, words: Sequence[str], task: SweepJob) -> list[Outcome]:
    """Run `task` for one run or for each run of a sweep, or print what `--cfg` and `--info` ask for.

    In a sweep, the other jobs run even if one fails.

    Arguments: program, the command's name in Hydra's messages; words, overrides and flags; task, a new `SweepJob`.
    Raises: ConfigError for anything that is refused, and if two jobs would share a run folder; the error of a single
    run, or the one that all jobs of a sweep have in common; Stopped for Ctrl-C outside of training.
    """
    register()
    overrides: list[str] = []
    flags: list[str] = []  # kept apart because Hydra refuses flags among overrides
    folders = [Path(value) for flag, value in pairwise(words) if flag in ("-cd", "--config-dir")]
    folders += [Path(word.partition("=")[2]) for word in words if word.startswith("--config-dir=")]
    # A flag's value follows it as a word of its own.
    words = with_experiment(words, *folders)
    if not _MULTIRUN & {*words}:
        words = with_setup(words, setups_named(words, *folders))
    for previous_word, word in pairwise(["", *words]):
        is_flag = word.startswith("-") or (previous_word in _FLAGS_WITH_VALUES and "=" not in word)
        if is_flag:
            flags.append(word)
        else:
            overrides.append(hydra_word(word))
    _check(overrides, flags)
    sys.argv = [program, *overrides, *flags]  # Hydra reads its arguments from here
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises errors instead of printing them and exiting
    try:
        with plain_errors():
            hydra.main(version_base=VERSION_BASE, config_path=str(conf_dir()), config_name="config")(task)()
    except KeyboardInterrupt:
        raise Stopped(signal.SIGINT, "interrupted: run the same command again to resume") from None
    # If all outcomes are alike, there is one entry: the same error, or None if all jobs succeeded.
    errors = {str(outcome.error): outcome.error for outcome in task.outcomes}
    error = errors.popitem()[1] if len(errors) == 1 else None
    # All jobs failed alike, so the overrides are at fault.
    if error is not None and not isinstance(error, JobFailed):
        raise error
    return task.outcomes


def _check(overrides: Sequence[str], flags: Sequence[str]) -> None:
    # Raise ConfigError for flags that are unknown or do not go together, and for Hydra's own folders of runs.
    names = {flag.partition("=")[0]: flag for flag in flags if flag.startswith("-")}
    if unknown := names.keys() - _FLAGS:
        raise ConfigError(no_option(names[unknown.pop()], _FLAGS))
    if names.keys() & _MULTIRUN and (shown := names.keys() & {"-c", "--cfg", "-i", "--info"}):
        raise ConfigError(f"{shown.pop()} shows the settings of one run: leave out -m")
    folders = [word for word in overrides if word.startswith(("hydra.run.", "hydra.sweep."))]
    if folders and not any(word.startswith(_HYDRA_WRITES) for word in overrides):
        raise ConfigError(f"{folders[0]} is not supported: set runs_dir=FOLDER to choose where runs are written")


# ---------------------------------------------------------------- one job


class JobFailed(Exception):
    """An error of one run of a sweep, other than a ConfigError, as text."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one run (job) that has ended: its name, its result or its error."""

    name: str  # as from `run_name`; "" if the configuration was refused
    error: Exception | None = None  # None: the job succeeded
    result: Any = None  # what the job returned
    was_finished: bool = False  # True if the run was already finished before the sweep

    def __str__(self) -> str:
        return f"{self.name}: {self.error}"


@dataclass
class SweepJob:
    """The function that Hydra calls with the configuration of each job."""

    job: Callable[[Config], object]  # called with the configuration of each run
    say: Say  # called with what a sweep will run, the name of each job as it begins, and each failure
    is_finished: Callable[[Path], bool] = lambda folder: False  # returns True for run folders that need no training
    # Called with the configuration of each job of a sweep before the first one begins: raises ConfigError for one that
    # the job would refuse.
    check: Callable[[Config], None] = lambda config: None
    stacks: Stacks = lambda configs, say: []  # returns lists of numbers of jobs that run as one
    stacked_job: Callable[[Sequence[Config]], Sequence[Any]] | None = None  # runs such jobs: each one's result or error
    work: list[int] | None = None  # tokens that each job of a sweep trains on; None: one run, or another sweeper
    parallel: int = 1  # number of jobs of the sweep that run at the same time
    started: float = 0.0  # when the sweep began, in seconds since 1970
    numbers: Sequence[int] | None = None  # numbers in the sweep of the jobs that are launched
    # Folder that the command keeps locked while jobs in other processes are to go on. None: jobs run in the command's
    # process, or on other machines.
    lock_folder: Path | None = None
    command_pid: int = field(default_factory=os.getpid)  # the process that gives out the jobs
    outcomes: list[Outcome] = field(default_factory=list)  # one for each job that ended

    def __call__(self, composed: DictConfig) -> Outcome:
        """Run one job and return its outcome. Raises: Stopped and KeyboardInterrupt, which end a sweep."""
        # joblib runs a single job at a time in the command's own process.
        if self.lock_folder is None or os.getpid() == self.command_pid:
            return self._outcome(composed)
        write_unread_output()
        try:
            with ending_with_command("a run", self.lock_folder):
                return self._outcome(composed)
        # Raised, it would make joblib kill the other workers before they have saved their checkpoints.
        except Stopped as stopped:
            return Outcome("", JobFailed(str(stopped)))

    def _outcome(self, composed: DictConfig) -> Outcome:
        name, was_finished, is_stopped = "", False, False
        try:
            config = checked_config(composed)
            name = run_name(config)
            was_finished = self.is_finished(Path(config.runs_dir, name))
            # One run of a sweep: `work` is None otherwise.
            if self.work is not None:
                job_number = self._number()
                clock = SweepClock.at(job_number, self.work, self.parallel, self.started)
                SWEEP_CLOCK.set(clock)
                self.say(f"run {job_number + 1} of {len(self.work)}: {name}{clock.left(0)}")
            outcome = Outcome(name, None, self.job(config), was_finished)
        # Errors are part of the outcome, because Hydra would print them in its own words.
        except Exception as error:
            # Outcomes of a sweep may come from another process, so they are pickled, which other errors may not allow.
            is_picklable = self.work is None or isinstance(error, ConfigError)
            if not is_picklable:
                error = JobFailed(explained(error))
            outcome = Outcome(name, error)
        # A signal to one worker ends only its run.
        except Stopped as stopped:
            if os.getpid() == self.command_pid:
                raise
            # The command says it has stopped.
            outcome, is_stopped = Outcome(name, JobFailed(str(stopped))), True
        finally:
            SWEEP_CLOCK.set(None)
        # The sweeper collects the outcomes of a sweep.
        if self.work is None:
            self.outcomes.append(outcome)
        elif outcome.error is not None and not is_stopped:
            self.say(str(outcome))
        return outcome

    def _number(self) -> int:
        # Return the number of the current job in the whole sweep.
        number = int(HydraConfig.get().job.num)
        # None: all jobs are launched, and the launcher's numbers are the sweep's.
        if self.numbers is None:
            return number
        # A launcher counts on from the first of its jobs, but some of the sweep's between them may be left out.
        return self.numbers[number - self.numbers[0]]


def run_name(config: Config) -> str:
    """Return the run folder's path below the runs folder, such as `demo/vo_rope/seed=0`."""
    return f"{config.experiment_name}/{config.scheme.name}/seed={config.seed}"


# ---------------------------------------------------------------- many jobs


class Job(NamedTuple):
    """A run (job) of a sweep: its overrides, and the configuration that they make."""

    words: Sequence[str]
    config: Config


class _UntilStopped(list[list[str]]):
    """The words of jobs, of which a launcher takes no more after a signal."""

    def __init__(self, words: Sequence[list[str]], signals: CommandSignals) -> None:
        super().__init__(words)
        self._signals = signals

    def __iter__(self) -> Iterator[list[str]]:
        return itertools.takewhile(lambda words: self._signals.received is None, super().__iter__())


class PosbenchSweeper(Sweeper):
    """A sweeper that composes and checks all jobs, refuses two with the same folder, and launches them."""

    def __init__(self, params: dict[str, str] | None) -> None:
        """Ignore `params`, which Hydra passes; `swept_values` reads them from the whole configuration."""

    def setup(self, *, hydra_context: HydraContext, task_function: Any, config: DictConfig) -> None:
        """Store the function that runs a job, and create the launcher. Hydra calls this before `sweep`."""
        assert isinstance(task_function, SweepJob)
        self.signals: CommandSignals | None = None  # None: jobs run in this process, or on other machines
        # joblib would give each worker a second job in advance, which the worker had to refuse after a signal.
        if config.hydra.launcher.get("pre_dispatch") == "2*n_jobs":
            config.hydra.launcher.pre_dispatch = "n_jobs"
        self.task, self.master = task_function, config
        self.loader: ConfigLoader = hydra_context.config_loader
        self.launcher: Launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        """Run a job for each combination of values in `arguments` and in the sweep of an experiment that they name.

        Raises: ConfigError before the first job if a job is refused.
        """
        if launch_number("WORLD_SIZE", 1) != 1:
            raise ConfigError("a sweep (-m) cannot run under torchrun: give each run its own torchrun")
        values = swept_values(self.master)
        # As keys of a dict, so that equal combinations make one job.
        combinations = dict.fromkeys(itertools.product(*values.values()))
        setups: Any = OmegaConf.to_container(self.master.experiment.get("setups") or OmegaConf.create({}))
        self._check_factors(setups, combinations)
        trunks = [self._composed(with_setup(words, setups), number) for number, words in enumerate(combinations)]
        if not trunks:
            raise ConfigError(f"{' '.join(arguments)} matches nothing, so there is no run to train")
        branches: list[Job] = []
        trunk_of = {}  # number of a branch -> its trunk
        for trunk in trunks:
            for words in trunk.config.branch_words():
                number = len(trunks) + len(branches)
                branches.append(self._composed([*trunk.words, *words], number))
                trunk_of[number] = trunk
        jobs = [*trunks, *branches]
        check_folders(jobs)
        self.task.work = self._work(jobs)
        # joblib runs `n_jobs` at a time; a cluster (submitit) runs all of them.
        launcher = str(self.master.hydra.launcher)
        default_jobs = len(jobs) if "submitit" in launcher else 1
        self.task.parallel = effective_n_jobs(
            OmegaConf.select(self.master, "hydra.launcher.n_jobs", default=default_jobs)
        )
        self.task.started = time.time()
        self._announce(jobs, "run")
        with ExitStack() as context:
            # Jobs run in other processes of this machine.
            if "joblib" in launcher or "LocalLauncher" in launcher:
                # Not among temporary files, which may be deleted during a sweep of weeks.
                folder = Path(jobs[0].config.runs_dir, ".hydra").absolute()
                folder.mkdir(parents=True, exist_ok=True)
                self.task.lock_folder = Path(context.enter_context(TemporaryDirectory(prefix="sweep-", dir=folder)))
                self.signals = context.enter_context(CommandSignals("the sweep", self.task.lock_folder))
            self._run(dict(enumerate(trunks)))
            # Branches and arms begin at the trunks' checkpoints.
            failed = {outcome.name for outcome in self.task.outcomes if outcome.error is not None}
            begun = [trunk for trunk in trunks if run_name(trunk.config) not in failed]
            numbered_branches = {}
            for number, branch in enumerate(branches, len(trunks)):
                if trunk_of[number] in begun:
                    numbered_branches[number] = branch
                else:
                    error = JobFailed("not trained, because the run that it branches off failed")
                    self.task.outcomes.append(Outcome(run_name(branch.config), error))
            if numbered_branches:
                self._run(numbered_branches)
            # Arms can be composed only now, because each one's settings follow from its trunk's checkpoint.
            arms: list[Job] = []
            for trunk in begun:
                arms += [self._composed(words, len(jobs) + len(arms)) for words in words_of_arms(trunk)]
            if arms:
                check_folders(arms)
                self.task.work += self._work(arms)
                self._announce(arms, "arm")
                self._run(dict(enumerate(arms, len(jobs))))

    def _work(self, jobs: Sequence[Job]) -> list[int]:
        # The tokens that each job will train on: 0 if its run is finished.
        work = []
        for job in jobs:
            is_finished = self.task.is_finished(Path(job.config.runs_dir, run_name(job.config)))
            tokens = job.config.train.num_steps * job.config.train.tokens_per_step
            work.append(0 if is_finished else tokens)
        return work

    def _announce(self, jobs: Sequence[Job], noun: str) -> None:
        assert self.task.work is not None
        # These jobs are the last ones of `work`, in which finished runs have 0 tokens.
        num_finished = self.task.work[-len(jobs) :].count(0)
        line = count_of(len(jobs), noun)
        if num_finished:
            line += f", {num_finished} of them already finished"
        self.task.say(line)

    def _run(self, jobs: dict[int, Job]) -> None:
        # Run jobs, by their number in the sweep, and append their outcomes in this order.
        outcomes = self._stacked_outcomes(jobs)
        single = {number: job for number, job in jobs.items() if number not in outcomes}
        if single:
            outcomes |= self._launch(single)
        self.task.outcomes += [outcomes[number] for number in sorted(outcomes)]

    def _stacked_outcomes(self, jobs: dict[int, Job]) -> dict[int, Outcome]:
        # Run the jobs that can train as one, and return their outcomes by number; the others are left.
        unfinished = {n: job for n, job in jobs.items() if self.task.work and self.task.work[n]}
        if not unfinished:
            return {}
        numbers, configs = list(unfinished), [job.config for job in unfinished.values()]
        outcomes = {}
        for stack in self.task.stacks(configs, self.task.say):
            assert self.task.stacked_job is not None
            results = self.task.stacked_job([configs[place] for place in stack])
            for place, result in zip(stack, results, strict=True):
                name = run_name(configs[place])
                outcome = Outcome(name, None, result)
                if isinstance(result, Exception):
                    outcome = Outcome(name, result)
                    self.task.say(str(outcome))
                outcomes[numbers[place]] = outcome
        return outcomes

    def _launch(self, jobs: dict[int, Job]) -> dict[int, Outcome]:
        # Launch jobs, and return their outcomes by number.
        self.task.numbers = list(jobs)
        words = [list(job.words) for job in jobs.values()]
        try:
            returned = self.launcher.launch(self._until_stopped(words), initial_job_idx=next(iter(jobs)))
        # joblib has ended all workers, because one was killed.
        except BrokenProcessPool:
            self._raise_if_stopped()
            names = [run_name(job.config) for job in jobs.values()]
            begun = [name for name in names if state_of(run_at(Path(self.master.runs_dir, name))) == INTERRUPTED]
            self.task.say(f"a worker process was killed while these were trained: {', '.join(begun) or 'none'}")
            raise
        self._raise_if_stopped()
        return {number: job.return_value for number, job in zip(jobs, returned, strict=True)}

    def _until_stopped(self, words: list[list[str]]) -> Sequence[list[str]]:
        return words if self.signals is None else _UntilStopped(words, self.signals)

    def _raise_if_stopped(self) -> None:
        if self.signals is not None:
            self.signals.raise_if_received("with checkpoints: run the same command again to resume")

    def _check_factors(self, setups: Any, combinations: Iterable[Sequence[str]]) -> None:
        # Raise ConfigError for a factor whose two levels make the same run, such as a rate that `train.lr_of` replaces.
        if not setups:
            return
        # Each combination once, whatever its seed.
        without_seeds = dict[tuple[str, ...], None]()
        for combination in combinations:
            without_seeds[tuple(word for word in combination if not word.startswith("seed="))] = None
        for words in without_seeds:
            first = [word for levels in setups.values() for word in levels[0]]
            for name, (level, other_level) in setups.items():
                changed = [word for word in first if word not in level] + [*other_level]
                runs = [self._composed([*words, *level_words], 0).config for level_words in (first, changed)]
                if what_it_computes(runs[0]) == what_it_computes(runs[1]):
                    raise ConfigError(
                        f"the factor {name} of experiment.setups changes nothing of {runs[0].scheme.name}: "
                        f"{' '.join(level)} and {' '.join(other_level)} make the same run"
                    )

    def _composed(self, words: Sequence[str], number: int) -> Job:
        # Return the job of these overrides. Raises: ConfigError if its configuration, or the job, is refused.
        composed = self.loader.load_sweep_config(self.master, list(words))
        with open_dict(composed):
            composed.hydra.job.num = composed.hydra.job.id = number
        HydraConfig.instance().set_config(composed)
        job = Job(words, checked_config(composed))
        self.task.check(job.config)
        OmegaConf.copy_cache(composed, self.master)  # so that `${now:...}` is the same time in all jobs
        return job


def what_it_computes(config: Config) -> list[Any]:
    """Return the settings that decide what a run computes, with its text and tokenizer."""
    return [identity(config, {}), config.data.to_mapping(), config.to_mapping()["tokenizer"]]


def words_of_arms(trunk: Job) -> list[list[str]]:
    """Return the overrides of each arm: the run's own, except for what its checkpoint decides, and the arm's."""
    trunk_words = {}
    for word in trunk.words:
        key = word.partition("=")[0]
        # The checkpoint decides the scheme and the model, but not the scheme's learning rate.
        if key == "scheme.lr" or not key.startswith(("scheme", "model", "experiment_name")):
            trunk_words[key] = word
    words_of_arms = []
    for words in trunk.config.arm_words():
        # The last override of a key counts.
        by_key = trunk_words | {word.partition("=")[0]: word for word in words}
        words_of_arms.append(list(by_key.values()))
    return words_of_arms


def check_folders(jobs: Sequence[Job]) -> None:
    """Raise ConfigError if two jobs with different overrides have the same run folder."""
    job_of: dict[str, Job] = {}
    for job in jobs:
        first_job = job_of.setdefault(run_name(job.config), job)
        if first_job.words != job.words:
            words_of_first = " ".join(word for word in first_job.words if word not in job.words)
            words_of_job = " ".join(word for word in job.words if word not in first_job.words)
            raise ConfigError(
                f"two runs of this sweep would share the folder {run_name(job.config)}: {words_of_first} and "
                f"{words_of_job}; "
                "give them different names, such as 'experiment_name=lr_${train.lr}' (with the quotes)"
            )


def show_outcomes(outcomes: Sequence[Outcome], console: Console) -> None:
    """Print a table of losses, a row per scheme and a column per seed or the reverse, unless there is only one run."""
    import pandas as pd

    if len(outcomes) < 2:
        return
    losses: dict[str, dict[str, str]] = {}  # experiment and scheme ("" if it was refused) -> seed -> loss
    for outcome in outcomes:
        run_label, _, seed = outcome.name.rpartition("/seed=")
        loss = "failed" if outcome.error else f"{outcome.result.loss:.4f}"
        losses.setdefault(run_label, {})[f"seed {seed}"] = f"{loss}*" if outcome.was_finished else loss
    has_tasks = any("data.task" in outcome.result.identity for outcome in outcomes if outcome.error is None)
    frame = pd.DataFrame(losses).fillna("")  # a row per seed
    # Many seeds need more columns than a terminal has.
    if len(frame) <= max(MOST_SEED_COLUMNS, len(losses)):
        frame = frame.T
    table = plain_table(f"loss, nats/{'answer' if has_tasks else 'token'}", *frame)
    for cells in frame.itertuples():
        table.add_row(*cells)
    console.print(table)
    failed = sum(outcome.error is not None for outcome in outcomes)
    skipped = sum(outcome.was_finished for outcome in outcomes)
    counts = {"trained": len(outcomes) - failed - skipped, "finished before (*)": skipped, "failed": failed}
    console.out(f"{len(outcomes)} runs: {', '.join(f'{count} {state}' for state, count in counts.items() if count)}")


# ---------------------------------------------------------------- the values of a sweep


def sweep_of(words: Sequence[str]) -> dict[str, list[str]]:
    """Return {key: values} for each key that `posbench train -m WORDS` would sweep, also from the experiment's sweep.

    Values are as on the command line: `{"scheme": ["nope", "qk_rope"], "seed": ["0", "1"]}`. Raises: ConfigError if
    Hydra would refuse the words.
    """
    with session(words, RunMode.MULTIRUN) as composed:
        # Keys with one value, which every run has.
        fixed = {key for key, override in _overrides(composed).items() if not override.is_sweep_override()}
        values = swept_values(composed)
    swept = {}
    for key, words_of_key in values.items():
        if key not in fixed:
            swept[key] = [word.partition("=")[2] for word in words_of_key]
    return swept


def swept_values(composed: DictConfig) -> dict[str, list[str]]:
    """Return {key: overrides, one per value} of a sweep, such as `{"seed": ["seed=0", "seed=1"]}`.

    It needs the session of Hydra that `composed` belongs to, which expands `glob(*)`. Raises: ConfigError if several
    experiments are named; Hydra's errors.
    """
    overrides = _overrides(composed)
    if "experiment" in overrides and overrides["experiment"].is_sweep_override():
        raise ConfigError(
            f"{overrides['experiment'].input_line!r}: each experiment has its own sweep, so run them one after "
            "another: posbench train -m experiment=NAME"
        )
    values = {}
    for key, override in overrides.items():
        if override.is_sweep_override():
            _refuse_sweeps_of_sweeps(key, override)
            # Hydra escapes a colon in a value, which `my_scheme.py:Faded` has.
            values[key] = [f"{key}={value}".replace("\\:", ":") for value in override.sweep_string_iterator()]
        else:
            values[key] = [str(override.input_line)]
    return values


def _refuse_sweeps_of_sweeps(key: str, override: Override) -> None:
    # Hydra cannot take `range(0,2),1`, and says so in words about its own types.
    value: Any = override.value()
    if isinstance(value, IntervalSweep):
        raise ConfigError(f"{override.input_line}: a sweep takes single values: write {key}={value.start},{value.end}")
    if not isinstance(value, ChoiceSweep) or not any(isinstance(item, Sweep) for item in value.list):
        return
    listed: list[Any] = []
    for item in value.list:
        if isinstance(item, RangeSweep):
            listed += item.range()
        else:
            listed += item.list if isinstance(item, ChoiceSweep) else [item]
    values = ",".join(dict.fromkeys(map(str, listed)))
    raise ConfigError(f"{override.input_line}: write {key}={values}")


def _overrides(composed: DictConfig) -> dict[str, Override]:
    # Return {key: override} of the command line, and of the experiment's sweep for keys it does not have.
    by_origin: Any = OmegaConf.to_container(composed.hydra.overrides, resolve=False)
    words = [word.lstrip("+") for word in [*by_origin["task"], *by_origin["hydra"]]]
    # `hydra.sweeper.params` count only if the user names an experiment or sets them: otherwise these are the sweep of
    # the default experiment, but `posbench train -m seed=0,1` means two runs.
    takes_params = any(word.startswith(("experiment=", "hydra.sweeper.params")) for word in words)
    params: Any = {}
    if takes_params:
        params = OmegaConf.select(composed, "hydra.sweeper.params") or {}
    swept = [hydra_word(f"{key}={value}") for key, value in params.items()]
    overrides: dict[str, Override] = {}
    # The command line comes last, so it takes precedence.
    for override in OverridesParser.create().parse_overrides([*swept, *by_origin["task"]]):
        override.config_loader = GlobalHydra.instance().config_loader()  # expands `glob(*)`
        overrides[override.get_key_element()] = override
    return overrides
