"""`posbench train` as an application of Hydra, and sweeps: every job is composed and checked before the first runs.

Hydra calls a `SweepJob` for one run, and a launcher calls it for each job of a sweep, in this process or in another;
what it returns there, an `Outcome`, comes back to the sweeper. A job whose `train.branch_tokens` names shorter runs is
followed by them: all trunks are trained, then all branches.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import hydra
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, RunMode
from joblib import effective_n_jobs
from omegaconf import DictConfig, OmegaConf, open_dict
from rich.console import Console

from posbench.catalogue.choices import conf_dir
from posbench.composition.compose import (
    VERSION_BASE,
    explained,
    hydra_word,
    no_option,
    register,
    session,
    typed,
    with_experiment,
)
from posbench.config import Config, ConfigError
from posbench.config.units import count_of
from posbench.system.console import SWEEP_CLOCK, Say, SweepClock, plain_table
from posbench.system.signals import Stopped

_FLAGS_WITH_VALUES = {"-c", "--cfg", "-i", "--info", "-p", "--package", "-cp", "--config-path", "-cn", "--config-name"}
_FLAGS_WITH_VALUES |= {"-cd", "--config-dir", "--experimental-rerun"}
_MULTIRUN = {"-m", "--multirun"}
_FLAGS = _FLAGS_WITH_VALUES | _MULTIRUN | {"-r", "--run", "--resolve", "-h", "--hydra-help", "--version"}
_HYDRA_WRITES = ("hydra.output_subdir=", "hydra/job_logging=", "hydra/hydra_logging=", "hydra/launcher=submitit")


# ---------------------------------------------------------------- the application


def run_application(
    program: str,
    words: Sequence[str],
    job: Callable[[Config], object],
    say: Say,
    is_finished: Callable[[Path], bool] = lambda folder: False,
) -> list[Outcome]:
    """Run `job` for the run that the words name, or for each run of a sweep, or print what `--cfg` and `--info` ask.

    In a sweep a job that fails does not keep the others from running. `say` receives what a sweep will run, which run
    begins, and each failure when it happens. `is_finished` says of a run folder that it needs no training.
    Returns: how each job of a sweep ended, or the single run.
    Raises: ConfigError for anything that is refused, where two jobs of a sweep would share a run folder; what the job
    of a single run raises, or all jobs of a sweep alike; Stopped for Ctrl-C outside of training.
    """
    task = SweepJob(job, say, is_finished)
    register()
    overrides: list[str] = []
    flags: list[str] = []  # Hydra refuses them among overrides
    own = [Path(value) for flag, value in pairwise(words) if flag in ("-cd", "--config-dir")]
    own += [Path(word.partition("=")[2]) for word in words if word.startswith("--config-dir=")]
    for before, word in pairwise(["", *with_experiment(words, *own)]):
        is_flag = word.startswith("-") or (before in _FLAGS_WITH_VALUES and "=" not in word)
        (flags if is_flag else overrides).append(word if is_flag else hydra_word(word))
    _check(overrides, flags)
    sys.argv = [program, *overrides, *flags]  # where Hydra reads them
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come to us, instead of Hydra's own print and exit
    try:
        with explained():
            hydra.main(version_base=VERSION_BASE, config_path=str(conf_dir()), config_name="config")(task)()
    except KeyboardInterrupt:
        raise Stopped(signal.SIGINT, "interrupted: run the same command again to resume") from None
    errors = {str(outcome.error): outcome.error for outcome in task.outcomes}
    error = errors.popitem()[1] if len(errors) == 1 else None
    if error is not None and not isinstance(error, JobFailed):
        raise error  # of the words, not of one job
    return task.outcomes


def _check(overrides: Sequence[str], flags: Sequence[str]) -> None:
    """Raises: ConfigError for flags that Hydra would refuse with its usage, and for folders that it would ignore."""
    names = {flag.partition("=")[0]: flag for flag in flags if flag.startswith("-")}
    if unknown := names.keys() - _FLAGS:
        raise ConfigError(no_option(names[unknown.pop()], _FLAGS))
    if names.keys() & _MULTIRUN and (shown := names.keys() & {"-c", "--cfg", "-i", "--info"}):
        raise ConfigError(f"{shown.pop()} shows the settings of one run: leave out -m")
    folders = [word for word in overrides if word.startswith(("hydra.run.", "hydra.sweep."))]
    if folders and not any(word.startswith(_HYDRA_WRITES) for word in overrides):
        raise ConfigError(f"{folders[0]} moves files of Hydra, which writes none here: runs_dir=FOLDER moves the runs")


# ---------------------------------------------------------------- one job


class JobFailed(Exception):
    """An error of one job of a sweep that was not a ConfigError, as text."""


@dataclass(frozen=True)
class Outcome:
    """How a job ended; `error` is None where it finished, `result` then what the job returned."""

    name: str
    error: Exception | None = None
    result: Any = None
    was_finished: bool = False  # before the sweep

    def __str__(self) -> str:
        return f"{self.name}: {self.error}"


@dataclass
class SweepJob:
    """What Hydra calls with the configuration of each job."""

    job: Callable[[Config], object]
    say: Say  # called with the name of each job as it begins, and with each failure
    is_finished: Callable[[Path], bool]  # whether a run folder needs no training
    work: Sequence[int] | None = None  # tokens that each job of a sweep trains on; None: one run, or another sweeper
    parallel: int = 1  # how many jobs of the sweep run at a time
    started: float = 0.0  # when the sweep began, in seconds since 1970
    outcomes: list[Outcome] = field(default_factory=list)  # of the jobs that ended

    def __call__(self, composed: DictConfig) -> Outcome:
        """Raises: Stopped and KeyboardInterrupt alone, which end a sweep: Hydra would print others in its own words."""
        name, was_finished = "", False
        try:
            config = typed(composed)
            name = run_name(config)
            was_finished = self.is_finished(Path(config.runs_dir, name))
            if self.work is not None:
                number = int(HydraConfig.get().job.num)
                clock = SweepClock.at(number, self.work, self.parallel, self.started)
                SWEEP_CLOCK.set(clock)
                self.say(f"run {number + 1} of {len(self.work)}: {name}{clock.left(0)}")
            outcome = Outcome(name, None, self.job(config), was_finished)
        except Exception as error:
            may_travel = self.work is None or isinstance(error, ConfigError)  # others may not survive pickling
            outcome = Outcome(name, error if may_travel else JobFailed(f"{type(error).__name__}: {error}"))
        finally:
            SWEEP_CLOCK.set(None)
        if self.work is None:
            self.outcomes.append(outcome)
        elif outcome.error is not None:
            self.say(str(outcome))
        return outcome


def run_name(config: Config) -> str:
    """`demo/vo_rope/seed=0`: the run folder below the runs folder."""
    return f"{config.experiment_name}/{config.scheme.name}/seed={config.seed}"


# ---------------------------------------------------------------- many jobs


class Job(NamedTuple):
    """The words of a job of a sweep, and what they compose to."""

    words: Sequence[str]
    config: Config


class PosbenchSweeper(Sweeper):
    """Composes and checks all jobs, refuses two jobs of one folder, then launches them."""

    def __init__(self, params: dict[str, str] | None) -> None:
        """Hydra's settings of a sweeper; `params` are read from the whole configuration (`swept_values`)."""

    def setup(self, *, hydra_context: HydraContext, task_function: Any, config: DictConfig) -> None:
        """Called by Hydra before `sweep`."""
        assert isinstance(task_function, SweepJob)
        self.task, self.master = task_function, config
        self.loader: ConfigLoader = hydra_context.config_loader
        self.launcher: Launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        """Run the jobs that the words `arguments` name, and the sweep of an experiment that they name.

        Raises: ConfigError before the first job, for what is refused.
        """
        if os.environ.get("WORLD_SIZE", "1") != "1":
            raise ConfigError("a sweep (-m) cannot run under torchrun: give each run its own torchrun")
        values = swept_values(self.master)
        trunks = [
            self._composed(words, number)
            for number, words in enumerate(dict.fromkeys(itertools.product(*values.values())))
        ]
        if not trunks:
            raise ConfigError(f"{' '.join(arguments)} matches nothing, so there is no run to train")
        words_of_branches = [[*trunk.words, *words] for trunk in trunks for words in trunk.config.branch_words()]
        branches = [self._composed(words, number) for number, words in enumerate(words_of_branches, len(trunks))]
        jobs = [*trunks, *branches]
        check_folders(jobs)
        finished = [self.task.is_finished(Path(job.config.runs_dir, run_name(job.config))) for job in jobs]
        tokens = [job.config.train.num_steps * job.config.train.tokens_per_step for job in jobs]
        self.task.work = [0 if done else count for done, count in zip(finished, tokens, strict=True)]
        together = len(jobs) if "submitit" in str(self.master.hydra.launcher) else 1
        self.task.parallel = effective_n_jobs(OmegaConf.select(self.master, "hydra.launcher.n_jobs", default=together))
        self.task.started = time.time()
        counted = f", {sum(finished)} of them already finished" if any(finished) else ""
        self.task.say(f"{count_of(len(jobs), 'run')}{counted}")
        for first, batch in ((0, trunks), (len(trunks), branches)):  # branches begin at checkpoints of the trunks
            if batch:
                returned = self.launcher.launch([list(job.words) for job in batch], initial_job_idx=first)
                self.task.outcomes += [job.return_value for job in returned]

    def _composed(self, words: Sequence[str], number: int) -> Job:
        composed = self.loader.load_sweep_config(self.master, list(words))
        with open_dict(composed):
            composed.hydra.job.num = composed.hydra.job.id = number
        HydraConfig.instance().set_config(composed)
        job = Job(words, typed(composed))
        OmegaConf.copy_cache(composed, self.master)  # what was looked up once is the same in all jobs
        return job


def check_folders(jobs: Sequence[Job]) -> None:
    """Raises: ConfigError where two jobs of different words have one run folder, with a way to name them apart."""
    job_of: dict[str, Job] = {}
    for job in jobs:
        other = job_of.setdefault(run_name(job.config), job)
        if other.words != job.words:
            one, two = (
                " ".join(word for word in a if word not in b)
                for a, b in ((other.words, job.words), (job.words, other.words))
            )
            raise ConfigError(
                f"two runs of this sweep would share the folder {run_name(job.config)}: {one} and {two}; give them "
                "different names, such as 'experiment_name=lr_${train.lr}' (with the quotes)"
            )


def show_outcomes(outcomes: Sequence[Outcome], console: Console) -> None:
    """One row a scheme and one column a seed, where there is more than one run; results are the runs' manifests."""
    if len(outcomes) < 2:
        return
    losses: dict[str, dict[str, str]] = {}
    for outcome in outcomes:
        row, _, seed = outcome.name.rpartition("/seed=")
        loss = "failed" if outcome.error else f"{outcome.result.loss:.4f}{'*' * outcome.was_finished}"
        losses.setdefault(row, {})[seed] = loss
    of_tasks = any("data.task" in outcome.result.identity for outcome in outcomes if outcome.error is None)
    seeds = list(dict.fromkeys(seed for by_seed in losses.values() for seed in by_seed))
    table = plain_table(f"loss, nats/{'answer' if of_tasks else 'token'}", *(f"seed {seed}" for seed in seeds))
    for row, by_seed in losses.items():
        table.add_row(row, *(by_seed.get(seed, "") for seed in seeds))
    console.print(table)
    failed = sum(outcome.error is not None for outcome in outcomes)
    before = sum(outcome.was_finished for outcome in outcomes)
    counts = {"trained": len(outcomes) - failed - before, "finished before (*)": before, "failed": failed}
    console.out(f"{len(outcomes)} runs: {', '.join(f'{count} {what}' for what, count in counts.items() if count)}")


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

    The default experiment's sweep is not taken: `posbench train -m seed=0,1` is two runs. So `hydra.sweeper.params`
    counts where the words name an experiment, or a part of it.
    """
    given: Any = OmegaConf.to_container(composed.hydra.overrides, resolve=False)
    words = [word.lstrip("+") for word in [*given["task"], *given["hydra"]]]
    takes_params = any(word.startswith(("experiment=", "hydra.sweeper.params")) for word in words)
    params = OmegaConf.select(composed, "hydra.sweeper.params") if takes_params else None
    swept = [hydra_word(f"{key}={value}") for key, value in (params or {}).items()]
    overrides: dict[str, Override] = {}
    for override in OverridesParser.create().parse_overrides([*swept, *given["task"]]):
        override.config_loader = GlobalHydra.instance().config_loader()
        overrides[override.get_key_element()] = override
    return overrides
