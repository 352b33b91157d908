"""`launch.nproc`: the workers of one run, started by PyTorch's own elastic launcher (torchrun is made of it).

The configuration is composed once, here, and the workers read it from a file of this launch: no second Hydra runs, and
no other launch on the same run folder is mixed with it. A worker that dies ends the others, and its own error is shown.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, record

from posbench.config import Config, ConfigError
from posbench.console import say
from posbench.machine.signals import Stopped, end_with
from posbench.training.loop import Died

PATIENCE_SECONDS = 900  # for the checkpoint that a signal asks for
_STOPPED = (130, 143)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>
_OUR_ERRORS: dict[str, type[Exception]] = {"ConfigError": ConfigError, "Died": Died}


def launch(config: Config) -> None:
    """Train the run of `config` in `launch.nproc` processes on this machine, and wait for them.

    Raises: ConfigError, Died or RuntimeError with the message of the worker that failed first; Stopped after a signal.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from posbench import runs
    from posbench.data import prepare

    _check(config)
    prepare(config)  # once, before several processes would do it
    folder = runs.run_folder(config)
    # The cores are divided among the processes, as torchrun advises; a number that the user has set stays.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // config.launch.nproc)))
    for logger in ("", ".elastic", ".run", ".elastic.agent.server.api", ".elastic.multiprocessing.api"):
        logging.getLogger(f"torch.distributed{logger}").setLevel(logging.CRITICAL)  # our own message is shorter
    try:
        with tempfile.TemporaryDirectory(prefix="posbench-") as place, _handlers_restored():
            file = Path(place) / "config.yaml"
            file.write_text(yaml.safe_dump(config.to_mapping(), sort_keys=False), encoding="utf-8")
            settings = LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=config.launch.nproc,
                run_id=f"posbench-{os.getpid()}",
                rdzv_backend="c10d",
                rdzv_endpoint="localhost:0",
                local_addr="localhost",  # hosts need not be able to resolve their own name
                max_restarts=0,
                monitor_interval=0.5,
                shutdown_timeout=PATIENCE_SECONDS,
                logs_specs=DefaultLogsSpecs(log_dir=place),
            )
            elastic_launch(settings, sys.executable)("-m", "posbench.training.launch", str(file))
    except SignalException as error:
        number = signal.Signals(error.sigval)
        raise Stopped(number, f"{folder} stopped by {number.name}: give the same command again to resume") from None
    except ChildFailedError as error:
        raise _explained(error) from None


@contextmanager
def _handlers_restored() -> Iterator[None]:
    """The launcher leaves signal handlers of its own behind, which would catch the Ctrl-C of the sweep around it."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            with suppress(ValueError):  # outside the main thread none were set
                signal.signal(number, handler)


def _explained(error: ChildFailedError) -> BaseException:
    """The first failure, with the worker's own message.

    Times are in whole seconds, and one death causes others. So a signal that the launcher did not send comes first,
    then our own errors, then other errors (of lost connections, say), then the workers that the launcher ended.
    """

    def order(item: tuple[int, ProcessFailure]) -> tuple[int, int]:
        code = item[1].exitcode
        is_ours = any(f"{kind}: " in str(item[1].message) for kind in _OUR_ERRORS)
        return (3 if code == -signal.SIGTERM else 0 if code < 0 else 1 if is_ours else 2), item[1].timestamp

    rank, failure = min(error.failures.items(), key=order)
    code = failure.exitcode
    if code in _STOPPED:
        return Stopped(code - 128, "stopped: give the same command again to resume")
    if code < 0:
        return RuntimeError(
            f"process {rank} of the run was killed by signal {failure.signal_name()} (pid {failure.pid}), and the "
            "others were ended: give the same command again to resume from the last checkpoint"
        )
    message: Any = failure.message
    message = str(message["message"] if isinstance(message, dict) else message)
    kind, _, text = message.partition(": ")
    if kind in _OUR_ERRORS:
        return _OUR_ERRORS[kind](text)
    return RuntimeError(f"process {rank} of the run failed (exit status {code}): {message}")


def _check(config: Config) -> None:
    import torch

    from posbench.machine.device import choose_device
    from posbench.model import check_scheme
    from posbench.training.processes import check_divides

    nproc = config.launch.nproc
    device = choose_device(config.train)
    if device.is_cuda and nproc > torch.cuda.device_count():
        raise ConfigError(
            f"launch.nproc={nproc} processes need a GPU each, and this machine has {torch.cuda.device_count()}: lower "
            "launch.nproc, or set train.device=cpu"
        )
    if device.is_cuda and device.torch.index:
        raise ConfigError(
            f"train.device={config.train.device} is one GPU, and launch.nproc={nproc} processes need a GPU each: set "
            "train.device=auto, and CUDA_VISIBLE_DEVICES to choose among the GPUs"
        )
    check_divides(config, nproc)
    check_scheme(config)


@record
def _work(file: str) -> None:
    from posbench.composition import checked
    from posbench.scheme_file import name_files
    from posbench.training.run import train

    if sys.platform == "linux":  # no worker survives a launcher that is killed itself
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
    mapping = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    try:
        name_files(mapping["scheme"])  # of the words that the launching process was given
        train(checked(mapping))
    except Stopped as stopped:
        if os.environ.get("RANK") == "0":
            say(str(stopped))
        raise SystemExit(stopped.exit_status) from None


if __name__ == "__main__":
    if not os.environ.get("POSBENCH_TRACEBACK"):
        sys.excepthook = lambda kind, error, trace: None  # the launcher prints it, once
    end_with(lambda: _work(sys.argv[1]))
