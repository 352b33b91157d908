"""`posbench train` as an application of Hydra: overrides, `-m` sweeps, `--cfg job`, launchers."""

from __future__ import annotations

import io
import os
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path

import hydra
from hydra.types import RunMode

from posbench.composition.choices import conf_dir
from posbench.composition.compose import composition, typed
from posbench.composition.explain import explained, several_values
from posbench.composition.session import VERSION_BASE, register, searchpath
from posbench.composition.sweep import params_of, settled
from posbench.composition.sweeper import JobFailed, Outcome, Task
from posbench.composition.words import Words, read_command, refuse_words
from posbench.config import Config, ConfigError
from posbench.machine.signals import Stopped, environment_number


def run_application(
    program: str,
    words: Sequence[str],
    job: Callable[[Config], object],
    say: Callable[[str], object],
    is_finished: Callable[[Path], bool] = lambda folder: False,
) -> list[Outcome]:
    """Run `job` for the run that the words name, or for each run of a sweep, or print what `--cfg` and `--info` ask.

    What Hydra would act on is composed and checked first. In a sweep a job that fails does not keep the others from
    running. `say` receives what a sweep will run, which run begins, each failure when it happens, and all of them again
    where the sweep is interrupted. `is_finished` says of a run folder that it needs no training.
    Returns: how each job of a sweep ended; nothing for a single run.
    Raises: ConfigError for anything that is refused, where two jobs of a sweep would share a run folder, and where
    every job of a sweep raised it; what the job of a single run raises; Stopped for Ctrl-C between two runs.
    """
    given, flags = read_command(program, words)
    with explained(given):
        overrides = given.parsed()
    composed = composition(given.only(settled(overrides)))
    refuse_words([f"{key}={value}" for key, value in params_of(composed, given).items()])
    task = Task(job, say, given, is_finished)
    if flags.multirun or (composed.hydra.mode == RunMode.MULTIRUN and not (flags.run or _shows(flags))):
        return _sweep(program, task)
    if several := [str(override.input_line) for override in overrides if override.is_sweep_override()]:
        raise ConfigError(several_values(several[0]))
    if _shows(flags):
        with redirect_stdout(io.StringIO()) as shown:
            _hydra(program, _asked(flags), task)
        sys.stdout.write(shown.getvalue())
    else:
        job(typed(composed, given))
    return []


def _sweep(program: str, task: Task) -> list[Outcome]:
    """Run a sweep. Returns and raises: as `run_application`."""
    if environment_number("WORLD_SIZE", 1) > 1:
        raise ConfigError(
            "a sweep (-m) cannot run under torchrun, because its runs would share one process group: give each run its "
            "own torchrun, or sweep with launch.nproc=..."
        )
    try:
        _hydra(program, ["--multirun"], task)
    except (Stopped, KeyboardInterrupt) as interrupted:
        for outcome in _failed(task):
            task.say(f"posbench: {outcome}")
        if isinstance(interrupted, KeyboardInterrupt) and (task.outcomes or task.has_workers):
            where = "while several runs were training" if task.has_workers else "between two runs"
            raise Stopped(signal.SIGINT, f"interrupted {where}: give the same command again to resume") from None
        raise
    failed = _failed(task)
    alike = len(failed) == len(task.outcomes) and len({str(outcome.error) for outcome in failed}) == 1
    if alike and failed[0].error is not None and not isinstance(failed[0].error, JobFailed):
        raise failed[0].error  # of the words, not of one job
    return task.outcomes


def _failed(task: Task) -> list[Outcome]:
    return [outcome for outcome in task.outcomes if outcome.error is not None]


def _hydra(program: str, flags: Sequence[str], task: Task) -> None:
    """Hand over to Hydra, whose `main` reads the command line and nothing else.

    Raises: ConfigError in plain words for Hydra's errors; OSError as it is.
    """
    register()
    words: Words = task.words
    sys.argv = [program, *flags, *words.overrides, *searchpath(words.folder)]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come to us, instead of Hydra's own print and exit
    application = hydra.main(version_base=VERSION_BASE, config_path=str(conf_dir()), config_name="config")(task)
    with explained(words):
        application()


def _shows(flags: Namespace) -> bool:
    """Whether something is to be printed and nothing run."""
    return bool(flags.cfg or flags.info or flags.hydra_help)


def _asked(flags: Namespace) -> list[str]:
    """The flags that say what to print, as Hydra takes them."""
    asked = {"--cfg": flags.cfg, "--info": flags.info, "--package": flags.package}
    switches = {"--hydra-help": flags.hydra_help, "--resolve": flags.resolve}
    pairs = [word for name, value in asked.items() if value is not None for word in (name, value)]
    return [*pairs, *(name for name, is_set in switches.items() if is_set)]
