"""One run on many processes: who this process is among them, and what they do together.

Every process reads the same global batch and takes its own rows of each micro-batch, so what a run consumes depends on
(seed, step) alone. Gradients are averaged by DDP, or parameters and moments are sharded by FSDP2. Only the first
process writes. A run on one process makes no process group: for it the methods of `Processes` do nothing.
"""

from __future__ import annotations

import os
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
from posbench.system.signals import is_worker

TIMEOUT = timedelta(minutes=30)  # the longest that one process may keep the others waiting
PREPARATION = timedelta(days=7)  # the same, while the first process fetches and tokenises text
RELEASE_SECONDS = 0.05  # for gloo's thread to release its last tensors, for which it needs the interpreter


class Processes:
    """The processes of a run: here a single one, so nothing is shared and nothing is waited for."""

    rank, size, local_rank = 0, 1, 0

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that writes and speaks."""
        return self.rank == 0

    def share_of(self, part: Tensor) -> Tensor:
        """This process's rows of a micro-batch [B, T + 1]."""
        return part

    def wrap(self, model: Decoder, strategy: str) -> nn.Module:
        """The model as a module whose call is the mean loss of (tokens, targets), nats."""
        return Loss(model)

    def accumulating(self, module: nn.Module, is_last: bool) -> AbstractContextManager[Any]:
        """The context of one micro-batch: gradients are exchanged in the last one only."""
        return nullcontext()

    def mean(self, value: Tensor) -> Tensor:
        """The mean over the processes of a 0-d tensor."""
        return value

    def stop_signal(self, received: int | None) -> int | None:
        """A signal that any process has received, the same answer in all of them."""
        return received

    def broadcast(self, value: Any) -> Any:
        """The first process's value, in all of them, once all have asked for it."""
        return value

    def announce(self, event: str) -> None:
        """Tell the others that something is done which they wait for, however long it took."""

    def wait_for(self, event: str) -> None:
        """Wait until the first process has announced it."""


class Loss(nn.Module):
    """`model.loss` as a module's call, which is what DDP and FSDP hook into."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, tokens: Tensor, targets: Tensor, positions: Tensor | None = None, divisor: Tensor | None = None
    ) -> Tensor:
        return self.model.loss(tokens, targets, positions, divisor)


class ProcessGroup(Processes):
    """One of several processes that torchrun started (RANK, WORLD_SIZE, LOCAL_RANK)."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))

    def share_of(self, part: Tensor) -> Tensor:
        return part.chunk(self.size)[self.rank]

    def wrap(self, model: Decoder, strategy: str) -> nn.Module:
        if strategy == "fsdp":
            return self._sharded(model)
        ids = [self.local_rank] if next(model.parameters()).is_cuda else None
        return nn.parallel.DistributedDataParallel(Loss(model), device_ids=ids, gradient_as_bucket_view=True)

    def _sharded(self, model: Decoder) -> nn.Module:
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        for method in ("loss", "nll", "answered"):  # these gather the shards as a call of the model does
            register_fsdp_forward_method(model, method)
        return Loss(model)

    def accumulating(self, module: nn.Module, is_last: bool) -> AbstractContextManager[Any]:
        if isinstance(module, nn.parallel.DistributedDataParallel):
            return nullcontext() if is_last else module.no_sync()
        module.model.set_requires_gradient_sync(is_last)  # type: ignore[operator,union-attr]
        return nullcontext()

    def mean(self, value: Tensor) -> Tensor:
        value = value.clone()
        dist.all_reduce(value)  # the sum: gloo has no mean
        return value / self.size

    def stop_signal(self, received: int | None) -> int | None:
        flag = torch.tensor(received or 0)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)  # on the CPU, by gloo: a GPU is not waited for
        return int(flag) or None

    def broadcast(self, value: Any) -> Any:
        box = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def announce(self, event: str) -> None:
        _store().set(event, "done")

    def wait_for(self, event: str) -> None:
        store = _store()
        deadline = time.monotonic() + PREPARATION.total_seconds()
        while not store.check([event]):  # not its own wait, during which no signal is heard
            if time.monotonic() > deadline:
                raise TimeoutError(f"the first process did not announce {event!r} within {PREPARATION}")
            time.sleep(0.1)


def _store() -> dist.Store:
    """The key-value store of the group. Waiting for a key may take longer than their collectives allow."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def check_divides(config: Config, processes: int) -> None:
    """Raises: ConfigError where a batch does not divide among so many processes."""
    train = config.train
    if train.batch_size % (train.accumulation * processes):
        raise ConfigError(
            f"train.batch_size={train.batch_size} windows in train.accumulation={train.accumulation} parts do not "
            f"divide among {processes} processes: take a multiple of {train.accumulation * processes}"
        )


@contextmanager
def joined_processes(device: str = "auto") -> Iterator[Processes]:
    """The processes of this run: a `ProcessGroup` where a launcher has set RANK and WORLD_SIZE, else this one process.

    Arguments: device, `train.device`. Yields: the group, which this process has joined and leaves at the end.
    Raises: ConfigError where this machine has fewer GPUs than processes.
    """
    if not is_worker():
        yield Processes()
        return
    if torch.cuda.is_available() and device != "cpu":
        local = int(os.environ.get("LOCAL_RANK", 0))
        if local >= torch.cuda.device_count():
            raise ConfigError(
                f"process {local + 1} of this machine finds {torch.cuda.device_count()} GPUs: start fewer processes, "
                "or take train.device=cpu"
            )
        torch.cuda.set_device(local)
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=TIMEOUT)
    else:
        dist.init_process_group("gloo", timeout=TIMEOUT)
    try:
        yield ProcessGroup()
    finally:
        time.sleep(RELEASE_SECONDS)
        dist.destroy_process_group()
