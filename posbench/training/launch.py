"""`launch.nproc`: the workers of one run, by PyTorch's own elastic launcher (what torchrun is made of).

The configuration is composed once, here; the workers read it from a file in the run folder, so that no second Hydra
runs. A worker that dies takes the others down, and its own error is what is shown.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, record

from posbench.config import Config, ConfigError
from posbench.interruption import Stopped

CONFIGURATION = ".launch.yaml"  # in the run folder, while the workers run
PATIENCE_SECONDS = 900  # for the checkpoint that a signal asks for
_STOPPED = (130, 143)


def is_worker() -> bool:
    """Whether this process was started by a launcher: ours, torchrun, or another that sets RANK and WORLD_SIZE."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch(config: Config) -> None:
    """Train the run of `config` in `launch.nproc` processes on this machine, and wait for them.

    Raises: ConfigError, Died or RuntimeError with the first failed worker's own message; Stopped after a signal.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from posbench import runs
    from posbench.data import prepare
    from posbench.training.loop import Died

    _check(config)
    prepare(config)  # once, before there are several who would
    folder = runs.run_folder(config)
    there = folder.is_dir()
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / CONFIGURATION
    runs.write_text(file, yaml.safe_dump(config.to_mapping(), sort_keys=False))
    # Threads are shared out, as torchrun asks; a number that the user has set stands.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // config.launch.nproc)))
    for noisy in ("torch.distributed.elastic", "torch.distributed.run"):
        logging.getLogger(noisy).setLevel(logging.CRITICAL)  # what it would print, we say shorter
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=config.launch.nproc,
        run_id=f"posbench-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.5,
        shutdown_timeout=PATIENCE_SECONDS,
    )
    try:
        elastic_launch(settings, sys.executable)("-m", "posbench.training.launch", str(file))
    except SignalException as error:
        number = signal.Signals(error.sigval)
        raise Stopped(number, f"{folder} stopped by {number.name}: give the same command again to go on") from None
    except ChildFailedError as error:
        raise _told(error, ConfigError, Died) from None
    finally:
        file.unlink(missing_ok=True)
        if not there:
            for empty in (folder, folder.parent, folder.parent.parent):
                with suppress(OSError):
                    empty.rmdir()


def _told(error: ChildFailedError, refused: type[Exception], died: type[Exception]) -> BaseException:
    """The first failure, in the worker's own words.

    Times are whole seconds, and a death takes others with it: a signal that the launcher did not send comes first, then
    errors, then those that the launcher ended.
    """

    def place(item: tuple[int, ProcessFailure]) -> tuple[int, int]:
        code = item[1].exitcode
        return (2 if code == -signal.SIGTERM else 0 if code < 0 else 1), item[1].timestamp

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

    from posbench.training.device import choose_device

    nproc = config.launch.nproc
    device = choose_device(config.train)
    if device.is_cuda and nproc > torch.cuda.device_count():
        raise ConfigError(
            f"launch.nproc={nproc} processes want a GPU each, and this machine has {torch.cuda.device_count()}: lower "
            "launch.nproc, or take train.device=cpu"
        )
    if config.train.batch_size % (config.train.accumulation * nproc):
        raise ConfigError(
            f"train.batch_size={config.train.batch_size} windows in train.accumulation={config.train.accumulation} "
            f"parts do not divide among launch.nproc={nproc} processes: take a multiple of "
            f"{config.train.accumulation * nproc}"
        )


@record
def _work(file: str) -> None:
    from posbench.composition import checked
    from posbench.training.loop import train

    mapping = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    try:
        train(checked(mapping))
    except Stopped as stopped:
        sys.stderr.write(f"{stopped}\n" if os.environ.get("RANK") == "0" else "")
        raise SystemExit(stopped.exit_status) from None


if __name__ == "__main__":
    if not os.environ.get("POSBENCH_TRACEBACK"):
        sys.excepthook = lambda kind, error, trace: None  # the launcher says it, once
    _work(sys.argv[1])
