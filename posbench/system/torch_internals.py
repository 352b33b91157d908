"""Reach the parts of torch that are private, and keep two faults of its compiler out of what posbench compiles."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

# Everything here was tried with torch 2.11 and 2.13. tests/schemes/test_compiled.py fails if the one patch
# is no longer needed. Whatever else torch removes raises an error.


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x in `dtype`, or x itself if it has that dtype already."""
    # torch 2.11 loses the gradient of an `autograd.Function` if the last thing its forward pass does is a `.to` that
    # changes nothing: the gradient becomes zero, silently, on every device.
    return x if x.dtype == dtype else x.to(dtype)


def attention_with_logsumexp(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Return fused attention on a CPU, [B, H, T, D], and the log-sum-exp of its scores, [B, H, T], without gradient.

    It is causal if `mask` is None.
    """
    # `scaled_dot_product_attention` does not return the log-sum-exp.
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output, logsumexp = kernel(q, k, v, 0.0, mask is None, attn_mask=mask, scale=scale)
    return output, logsumexp


def default_store() -> torch.distributed.Store:
    """Return the key-value store of the process group, for waits longer than the time limit of collectives."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def allow_recompiles(number: int) -> None:
    """Let torch compile each function at least `number` times before it gives up; the default is 8."""
    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, number)


@functools.cache
def share_no_row_buffers() -> None:
    """Keep Inductor from fusing kernels if several rows of a vectorised loop would share a buffer of one row."""
    from torch._inductor.codegen.cpp import OuterLoopFusedSchedulerNode
    from torch._inductor.virtualized import V

    # Inductor fuses the outer loops of kernels that need each other's results, and keeps an intermediate result in a
    # buffer that holds one row. If an outer loop is vectorised, sixteen rows write to that buffer and the last one
    # wins, silently (pytorch issue 185702; docs/internals/decisions.md). Seen with torch 2.13, on CPUs. Inductor has no
    # setting for this, so its private check is replaced; tests/schemes/test_compiled.py fails if the check or the fault
    # disappears.
    may_fuse = OuterLoopFusedSchedulerNode.check_outer_fusion_loop_level_attr

    @functools.wraps(may_fuse)
    def may_fuse_safely(self: Any, kernels: list[Any], depth: int) -> bool:
        is_vectorised = any(loop.steps != 1 for kernel in kernels for loop in kernel.loop_nest.loops[:depth])
        return may_fuse(self, kernels, depth) and not (is_vectorised and V.local_buffer_context.local_buffers)

    OuterLoopFusedSchedulerNode.check_outer_fusion_loop_level_attr = may_fuse_safely  # type: ignore[method-assign]
    torch.compiler.config.cache_key_tag += "no row buffers"  # kernels on disk that were compiled before are not reused
