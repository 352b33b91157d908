"""`launch.nproc`: the workers of one run, by PyTorch's own elastic launcher (what torchrun is made of).

The configuration is composed once, here; the workers read it from a file of this launch, so that no second Hydra runs
and no other launch on the same run folder is mixed with it. A worker that dies takes the others down, and its own error
is what is shown.
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
from posbench.machine.signals import Stopped, end_with

PATIENCE_SECONDS = 900  # for the checkpoint that a signal asks for
_STOPPED = (130, 143)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>


def launch(config: Config) -> None:
    """Train the run of `config` in `launch.nproc` processes on this machine, and wait for them.

    Raises: ConfigError, Died or RuntimeError with the first failed worker's own message; Stopped after a signal.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from posbench import runs
    from posbench.data import prepare
    from posbench.training.loop import Died

    _check(config)
    prepare(config)  # once, before there are several who would
    folder = runs.run_folder(config)
    # Threads are shared out, as torchrun asks; a number that the user has set stands.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // config.launch.nproc)))
    for noisy in ("", ".elastic", ".run", ".elastic.agent.server.api", ".elastic.multiprocessing.api"):
        noisy = f"torch.distributed{noisy}"
        logging.getLogger(noisy).setLevel(logging.CRITICAL)  # what it would print, we say shorter
    try:
        with tempfile.TemporaryDirectory(prefix="posbench-") as place, _signals_given_back():
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
        raise Stopped(number, f"{folder} stopped by {number.name}: give the same command again to go on") from None
    except ChildFailedError as error:
        raise _told(error, ConfigError, Died) from None


@contextmanager
def _signals_given_back() -> Iterator[None]:
    """The launcher leaves handlers of its own behind, which would swallow the Ctrl-C of the sweep around it."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            with suppress(ValueError):  # outside the main thread none were set
                signal.signal(number, handler)


def _told(error: ChildFailedError, refused: type[Exception], died: type[Exception]) -> BaseException:
    """The first failure, in the worker's own words.

    Times are whole seconds, and a death takes others with it: a signal that the launcher did not send comes first, then
    our own errors, then others (of lost connections, say), then those that the launcher ended.
    """

    def place(item: tuple[int, ProcessFailure]) -> tuple[int, int]:
        code = item[1].exitcode
        own = any(kind in str(item[1].message) for kind in ("ConfigError: ", "Died: "))
        return (3 if code == -signal.SIGTERM else 0 if code < 0 else 1 if own else 2), item[1].timestamp

    rank, failure = min(error.failures.items(), key=place)
    code = failure.exitcode
    if code in _STOPPED:
        return Stopped(code - 128, "stopped: give the same command again to go on")
    if code < 0:
        return RuntimeError(
            f"process {rank} of the run was killed by signal {failure.signal_name()} (pid {failure.pid}), and the "
            "others were ended: give the same command again to go on from the last checkpoint"
        )
    message: Any = failure.message
    message = str(message["message"] if isinstance(message, dict) else message)
    kind, _, text = message.partition(": ")
    own = {"ConfigError": refused, "Died": died}.get(kind)
    if own:
        return own(text)
    return RuntimeError(f"process {rank} of the run failed (exit status {code}): {message}")


def _check(config: Config) -> None:
    import torch

    from posbench.machine.device import choose_device
    from posbench.model import shape_of
    from posbench.schemes import build_scheme
    from posbench.training.processes import check_divides

    nproc = config.launch.nproc
    device = choose_device(config.train)
    if device.is_cuda and nproc > torch.cuda.device_count():
        raise ConfigError(
            f"launch.nproc={nproc} processes want a GPU each, and this machine has {torch.cuda.device_count()}: lower "
            "launch.nproc, or take train.device=cpu"
        )
    if device.is_cuda and device.torch.index:
        raise ConfigError(
            f"train.device={config.train.device} is one GPU, and launch.nproc={nproc} wants as many: take "
            "train.device=auto, and CUDA_VISIBLE_DEVICES to choose among them"
        )
    check_divides(config, nproc)
    build_scheme(config.scheme, shape_of(config))


@record
def _work(file: str) -> None:
    from posbench.composition import checked
    from posbench.training.loop import train

    if sys.platform == "linux":  # a launcher that is killed itself leaves nobody training
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
    mapping = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    try:
        train(checked(mapping))
    except Stopped as stopped:
        sys.stderr.write(f"{stopped}\n" if os.environ.get("RANK") == "0" else "")
        raise SystemExit(stopped.exit_status) from None


if __name__ == "__main__":
    if not os.environ.get("POSBENCH_TRACEBACK"):
        sys.excepthook = lambda kind, error, trace: None  # the launcher says it, once
    end_with(lambda: _work(sys.argv[1]))
