"""Keep two faults of torch's compiler out of what posbench compiles.

torch 2.11 loses the gradient of an `autograd.Function` if the last thing its forward pass does is a `.to` that changes
nothing: the gradient becomes zero, silently, on every device. `as_dtype` leaves such a `.to` out.

Inductor fuses the outer loops of kernels that need each other's results, and keeps an intermediate result in a buffer
that holds one row. If an outer loop is vectorised, sixteen rows write to that buffer and the last one wins, silently
(pytorch issue 185702; docs/internals/decisions.md has a reproduction). Seen with torch 2.13, on CPUs. Inductor has no
setting for this, so its private check is replaced; tests/schemes/test_compiled.py fails if the check or the fault
disappears.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x in `dtype`, and x itself if it has that already (see above)."""
    return x if x.dtype == dtype else x.to(dtype)


@functools.cache
def share_no_row_buffers() -> None:
    """Keep Inductor from fusing kernels if several rows of a vectorised loop would share a buffer of one row."""
    from torch._inductor.codegen.cpp import OuterLoopFusedSchedulerNode
    from torch._inductor.virtualized import V

    may_fuse = OuterLoopFusedSchedulerNode.check_outer_fusion_loop_level_attr

    @functools.wraps(may_fuse)
    def may_fuse_safely(self: Any, kernels: list[Any], depth: int) -> bool:
        is_vectorised = any(loop.steps != 1 for kernel in kernels for loop in kernel.loop_nest.loops[:depth])
        return may_fuse(self, kernels, depth) and not (is_vectorised and V.local_buffer_context.local_buffers)

    OuterLoopFusedSchedulerNode.check_outer_fusion_loop_level_attr = may_fuse_safely  # type: ignore[method-assign]
    torch.compiler.config.cache_key_tag += "no row buffers"  # kernels on disk that were compiled before are not reused
