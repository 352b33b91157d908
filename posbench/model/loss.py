"""The mean cross-entropy of a linear layer's logits, which never stand whole in memory.

Logits are made in chunks of rows, and each chunk's gradient at once in the forward pass, while it is still in the
cache (as Liger kernels do on GPUs, arXiv 2410.10989): [N, V] float32 logits, their softmax and its gradient are the
largest tensors of a small model's step. N rows, C channels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from posbench.system.matmul import product, summed_outer

Gradient = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

# Logits a chunk: 4 MB in bfloat16 stay in a CPU core's cache; a GPU wants fewer and larger products.
CHUNK = {"cpu": 512 * 4096, "cuda": 4096 * 16384}


def losses_and_gradient(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's loss, nats [N] in at least float32, and its gradient by the logits, [N, V] in their dtype."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    if logits.is_cuda:  # one compiled kernel; an assignment by index would keep all of them in float32 beside it
        log_p = logits.log_softmax(-1, dtype=wide)
        losses = -log_p.gather(-1, targets[:, None])[:, 0]
        is_target = torch.arange(logits.shape[-1], device=logits.device) == targets[:, None]
        return losses, (log_p.exp() - is_target.to(wide)).to(logits.dtype)
    p = logits.softmax(-1, dtype=wide)
    # log sum exp = largest logit - log of the largest p: half of a CPU's time here goes into exponentials.
    log_sum = logits.amax(-1).to(wide) - p.amax(-1).log()
    losses = log_sum - logits.gather(-1, targets[:, None])[:, 0].to(wide)
    p[torch.arange(len(targets), device=targets.device), targets] -= 1
    return losses, p.to(logits.dtype)


class _MeanLoss(torch.autograd.Function):
    """Its gradient is formed in the forward pass; backward only scales it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        rows: int,
        gradient_of: Gradient,
        divisor: Tensor | None,
    ) -> Tensor:
        rounded = weight.to(x.dtype)
        total = torch.zeros((), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        of_x, of_weight = torch.empty_like(x), torch.zeros_like(weight)
        for part, wanted, slot in zip(x.split(rows), targets.split(rows), of_x.split(rows), strict=True):
            if divisor is None:
                losses, gradient = gradient_of(product(part, rounded), wanted)
            else:
                losses, gradient = gradient_of(product(part, rounded), wanted.clamp(min=0))
                losses, gradient = losses * (wanted >= 0), gradient * (wanted >= 0)[:, None]
            total += losses.sum()
            product(gradient, rounded.T, out=slot)
            of_weight += summed_outer(gradient, part)
        ctx.save_for_backward(of_x, of_weight)
        ctx.divisor = len(x) if divisor is None else divisor
        return total / ctx.divisor

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        of_x, of_weight = ctx.saved_tensors
        scale = above[0] / ctx.divisor
        of_x = (of_x.to(scale.dtype) * scale).to(of_x.dtype)
        return of_x, of_weight * scale.to(of_weight.dtype), None, None, None, None


def mean_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    gradient_of: Gradient = losses_and_gradient,
    rows: int | None = None,
    divisor: Tensor | None = None,
) -> Tensor:
    """Mean over rows of the cross-entropy of `x @ weight.T` against targets, nats, 0-d in at least float32.

    With a divisor, 0-d: the sum over the rows whose targets are not below 0, divided by that.

    Arguments: x [N, C]; weight [V, C], rounded to x's dtype; targets [N] int64; gradient_of, a compiled
    `losses_and_gradient` where there is one; rows a chunk, by default what suits the device.
    """
    rows = rows or max(1, CHUNK.get(x.device.type, CHUNK["cuda"]) // len(weight))
    return _MeanLoss.apply(x, weight, targets, rows, gradient_of, divisor)
