"""Tensors of which each process of a run holds a part (FSDP2): how to cut them, join them and recognise them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn


def shard_of(parameter: nn.Parameter) -> nn.Parameter:
    """This process's part of a sharded parameter, in the same memory; an unsharded parameter as it is."""
    return nn.Parameter(parameter.to_local().detach()) if is_sharded(parameter) else parameter  # type: ignore[attr-defined]


def put_together(shard: Tensor, like: Tensor) -> Tensor:
    """The whole tensor of which each process holds a `shard`, laid out as `like` is: on the CPU of the first process.

    The others get an empty tensor: what does not fit one device must not be whole on each.
    """
    if not is_sharded(like):
        return shard
    from torch.distributed.tensor import DTensor

    assert isinstance(like, DTensor)
    whole = DTensor.from_local(shard, like.device_mesh, like.placements, shape=like.shape, stride=like.stride())
    gathered = whole.full_tensor()
    return gathered.cpu() if dist.get_rank() == 0 else gathered.new_empty(0)


def shard_like(value: Tensor, like: Tensor) -> Tensor:
    """This process's part of `value`, which every process holds whole, laid out as `like` is."""
    if not is_sharded(like):
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements).to_local()


def is_sharded(value: Any) -> bool:
    """Whether it is one process's view of a tensor that several processes hold (a DTensor)."""
    return hasattr(value, "to_local")
