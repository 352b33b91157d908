"""Tensors of which each process of a run holds a part (FSDP2): cut, put together, recognised."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn


def shard_of(parameter: nn.Parameter) -> nn.Parameter:
    """This process's part of a sharded parameter, in the same memory; one that is not sharded itself."""
    return nn.Parameter(parameter.to_local().detach()) if is_sharded(parameter) else parameter  # type: ignore[attr-defined]


def put_together(shard: Tensor, like: Tensor) -> Tensor:
    """The whole of what each process holds its shard of, laid out as `like` is: on the CPU of the first process.

    The others get nothing: what does not fit one device must not stand whole in each.
    """
    if not is_sharded(like):
        return shard
    from torch.distributed.tensor import DTensor

    assert isinstance(like, DTensor)
    whole = DTensor.from_local(shard, like.device_mesh, like.placements, shape=like.shape, stride=like.stride())
    gathered = whole.full_tensor()
    return gathered.cpu() if dist.get_rank() == 0 else gathered.new_empty(0)


def shard_like(value: Tensor, like: Tensor) -> Tensor:
    """This process's part of `value`, which is whole in all of them, laid out as `like` is."""
    if not is_sharded(like):
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements).to_local()


def is_sharded(value: Any) -> bool:
    """Whether it is one process's view of a tensor that several hold (a DTensor)."""
    return hasattr(value, "to_local")
