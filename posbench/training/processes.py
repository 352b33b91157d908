"""Share the training of one run among several processes, or run it in one.

Every process reads the same global batch and takes its own rows of each micro-batch, so the data of a run depends on
(seed, step) only.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from posbench.config import Config, ConfigError
from posbench.model.decoder import Decoder
from posbench.system.console import say
from posbench.system.signals import is_worker, launch_number
from posbench.system.torch_internals import default_store

TIMEOUT = timedelta(minutes=30)  # the longest that processes wait for each other in a collective
PREPARATION = timedelta(days=7)  # the longest that they wait while the first one fetches and tokenizes text
WAITING_SECONDS = 10.0  # how long it waits for the others to start before it says so
RELEASE_SECONDS = 0.05  # time that gloo's thread needs the interpreter to release its last tensors


class Processes:
    """The processes of a run, here only one, which shares nothing and waits for nothing."""

    rank, size, local_rank = 0, 1, 0

    @property
    def is_first(self) -> bool:
        """Return True if this process is rank 0, which writes files and prints."""
        return self.rank == 0

    def share_of(self, part: Tensor) -> Tensor:
        """Return this process's rows, [b / processes, T + 1], of a micro-batch's tensor [b, T + 1]."""
        return part

    def wrap(self, model: Decoder) -> nn.Module:
        """Return a module whose call is `model.loss`."""
        return Loss(model)

    def accumulating(self, module: nn.Module, is_last: bool) -> AbstractContextManager[Any]:
        """Return a context for one micro-batch; processes exchange gradients only if it is the step's last."""
        return nullcontext()

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean of a 0-d tensor over the processes."""
        return value

    def stop_signal(self, received: int | None) -> int | None:
        """Return the number of a signal that any process has received, or None, the same in all processes."""
        return received

    def broadcast(self, value: Any) -> Any:
        """Return the first process's `value` in every process. Wait until all have called this."""
        return value

    def announce(self, event: str) -> None:
        """Tell the processes that wait in `wait_for(event)` that `event` has happened."""

    def wait_for(self, event: str) -> None:
        """Wait, maybe for days, until the first process has announced `event`."""


class Loss(nn.Module):
    """A module whose call is the model's method `loss`, because DDP hooks into the call of a module."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, tokens: Tensor, targets: Tensor, positions: Tensor | None = None, divisor: Tensor | None = None
    ) -> Tensor:
        return self.model.loss(tokens, targets, positions, divisor)


class ProcessGroup(Processes):
    """The processes that torchrun started (RANK, WORLD_SIZE, LOCAL_RANK), seen from one of them."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.local_rank = launch_number("LOCAL_RANK", 0)

    def share_of(self, part: Tensor) -> Tensor:
        return part.chunk(self.size)[self.rank]

    def wrap(self, model: Decoder) -> nn.Module:
        ids = [self.local_rank] if next(model.parameters()).is_cuda else None
        return nn.parallel.DistributedDataParallel(Loss(model), device_ids=ids, gradient_as_bucket_view=True)

    def accumulating(self, module: nn.Module, is_last: bool) -> AbstractContextManager[Any]:
        assert isinstance(module, nn.parallel.DistributedDataParallel)
        return nullcontext() if is_last else module.no_sync()

    def mean(self, value: Tensor) -> Tensor:
        value = value.clone()  # `all_reduce` writes into it
        dist.all_reduce(value)  # the sum: gloo has no mean
        return value / self.size

    def stop_signal(self, received: int | None) -> int | None:
        flag = torch.tensor(received or 0)  # 0: no signal
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)  # on the CPU, by gloo, so that nothing waits for a GPU
        return int(flag) or None

    def broadcast(self, value: Any) -> Any:
        box = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def announce(self, event: str) -> None:
        default_store().set(event, "done")

    def wait_for(self, event: str) -> None:
        store = default_store()
        # The text may take longer than any collective may wait.
        deadline = time.monotonic() + PREPARATION.total_seconds()
        while not store.check([event]):  # `store.wait` would block signals
            if time.monotonic() > deadline:
                raise TimeoutError(f"the first process did not announce {event!r} within {PREPARATION}")
            time.sleep(0.1)


def check_divides(config: Config, processes: int) -> None:
    """Raise ConfigError if the rows of a micro-batch do not divide evenly among the processes."""
    train = config.train
    if train.batch_size % (train.accumulation * processes):
        raise ConfigError(
            f"train.batch_size={train.batch_size} windows in train.accumulation={train.accumulation} parts do not "
            f"divide among {processes} processes: take a multiple of {train.accumulation * processes}"
        )


@contextmanager
def joined_processes(device: str = "auto") -> Iterator[Processes]:
    """Join the process group of this run if a launcher has set RANK and WORLD_SIZE, and leave it at the end.

    Raises: ConfigError if this machine has fewer GPUs than processes, or if a variable of the launcher is missing.
    """
    if not is_worker():
        yield Processes()
        return
    _check_launch()
    local_rank = launch_number("LOCAL_RANK", 0)
    backends = "gloo"
    if torch.cuda.is_available() and device != "cpu":
        if local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"process {local_rank + 1} of this machine finds {torch.cuda.device_count()} GPUs: start fewer "
                "processes, or take train.device=cpu"
            )
        torch.cuda.set_device(local_rank)
        # Gloo for flags and objects on the CPU, which must not wait for the GPU.
        backends = "cpu:gloo,cuda:nccl"
    with _waiting_said():
        dist.init_process_group(backends, timeout=TIMEOUT)
    try:
        yield ProcessGroup()
    finally:
        time.sleep(RELEASE_SECONDS)  # before the group ends, gloo's thread must release its last tensors
        dist.destroy_process_group()


def _check_launch() -> None:
    """Raise ConfigError if the variables of a launcher do not say who takes part, and where they meet."""
    rank, size = launch_number("RANK"), launch_number("WORLD_SIZE")
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    problem = ""
    if rank >= size:
        problem = f"RANK={rank} must be below WORLD_SIZE={size}"
    elif missing:
        problem = f"RANK={rank} and WORLD_SIZE={size} are set, and {' and '.join(missing)} not"
    if problem:
        raise ConfigError(f"{problem}: start processes with torchrun, or unset RANK and WORLD_SIZE to train in one")
    launch_number("MASTER_PORT")


@contextmanager
def _waiting_said() -> Iterator[None]:
    """Print a line if what happens in this context has not ended after WAITING_SECONDS."""
    size, rank = os.environ["WORLD_SIZE"], os.environ["RANK"]
    line = (
        f"waiting for the other processes of {size} to start (RANK={rank}, WORLD_SIZE={size}): to train in one "
        "process, unset these two"
    )
    timer = threading.Timer(WAITING_SECONDS, say, [line])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
