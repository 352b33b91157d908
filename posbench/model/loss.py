"""Compute the mean cross-entropy of a linear layer's logits without holding all logits in memory.

N rows, C channels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from posbench.system.matmul import product, summed_outer
from posbench.system.plain import is_plain

Gradient = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

# Logits per chunk: 4 MB in bfloat16 stay in a CPU core's cache; a GPU is faster with fewer and larger products.
CHUNK = {"cpu": 512 * 4096, "cuda": 4096 * 16384}


def losses_and_gradient(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's cross-entropy, [N] nats in at least float32, and its gradient for the logits, [N, V]."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    if logits.is_cuda:  # compiles to one kernel; an assignment by index would need another float32 copy of the logits
        log_p = logits.log_softmax(-1, dtype=wide)
        losses = -log_p.gather(-1, targets[:, None])[:, 0]
        is_target = torch.arange(logits.shape[-1], device=logits.device) == targets[:, None]
        return losses, (log_p.exp() - is_target.to(wide)).to(logits.dtype)
    p = logits.softmax(-1, dtype=wide)
    # log-sum-exp = largest logit - log(largest p), which avoids exponentials: half of the time on a CPU goes into them.
    log_sum = logits.amax(-1).to(wide) - p.amax(-1).log()
    losses = log_sum - logits.gather(-1, targets[:, None])[:, 0].to(wide)
    # In place: p becomes the gradient, p - one_hot(target).
    p[torch.arange(len(targets), device=targets.device), targets] -= 1
    return losses, p.to(logits.dtype)


class _MeanLoss(torch.autograd.Function):
    """The mean cross-entropy of a linear layer's logits. Forward computes the gradient; backward only scales it."""

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
        # Each chunk's gradient is computed while the chunk is still in the cache (as Liger kernels do on GPUs, arXiv
        # 2410.10989). Otherwise [N, V] float32 logits, their softmax and its gradient would be the largest tensors of a
        # small model's step.
        dx, dweight = torch.empty_like(x), torch.zeros_like(weight)
        # `dpart` is a view of dx, written by `product` below.
        for part, target, dpart in zip(x.split(rows), targets.split(rows), dx.split(rows), strict=True):
            if divisor is None:
                losses, gradient = gradient_of(product(part, rounded), target)
            else:
                # A negative target is not scored; 0 stands in for it as an index.
                losses, gradient = gradient_of(product(part, rounded), target.clamp(min=0))
                losses, gradient = losses * (target >= 0), gradient * (target >= 0)[:, None]
            total += losses.sum()
            product(gradient, rounded.T, out=dpart)
            dweight += summed_outer(gradient, part)
        ctx.save_for_backward(dx, dweight)
        ctx.divisor = len(x) if divisor is None else divisor
        return total / ctx.divisor

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        dx, dweight = ctx.saved_tensors
        scale = gradients[0] / ctx.divisor
        dx = (dx.to(scale.dtype) * scale).to(dx.dtype)
        return dx, dweight * scale.to(dweight.dtype), None, None, None, None


def _plain_mean(x: Tensor, weight: Tensor, targets: Tensor, divisor: Tensor | None) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    losses = F.cross_entropy((x @ weight.to(x.dtype).T).to(wide), targets.clamp(min=0), reduction="none")
    if divisor is None:
        return losses.mean()
    return (losses * (targets >= 0)).sum() / divisor


def mean_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    gradient_of: Gradient = losses_and_gradient,
    rows: int | None = None,
    divisor: Tensor | None = None,
) -> Tensor:
    """Return the mean cross-entropy of logits `x @ weight.T` over rows, nats, 0-d in at least float32.

    If `divisor`, 0-d, is given, return the sum over rows whose target is not negative, divided by `divisor`.
    Arguments: x [N, C]; weight [V, C], rounded to x's dtype; targets [N]; rows per chunk.
    """
    # torch.func cannot transform a function that writes its gradient in the forward pass.
    if is_plain():
        return _plain_mean(x, weight, targets, divisor)
    rows = rows or max(1, CHUNK.get(x.device.type, CHUNK["cuda"]) // len(weight))
    return _MeanLoss.apply(x, weight, targets, rows, gradient_of, divisor)
