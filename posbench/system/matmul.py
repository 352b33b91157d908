"""Multiply by weight matrices with whichever of torch's two libraries is faster on this processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from posbench.system.plain import is_plain


def cpu_info() -> str:
    """Return what Linux says about the processor; "" elsewhere."""
    info = Path("/proc/cpuinfo")
    return info.read_text(encoding="utf-8", errors="replace") if info.is_file() else ""


# torch multiplies float32 matrices by MKL, which on AMD processors runs only AVX2 code. oneDNN, which torch also has,
# runs AVX-512 there: 250 instead of 111 GFLOP/s on a core of a Zen 5 (docs/internals/speed.md).
_HAS_AVX512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
IS_INTEL = "GenuineIntel" in cpu_info()
ONEDNN_IS_FASTER = "AuthenticAMD" in cpu_info() and _HAS_AVX512 and torch.backends.mkldnn.is_available()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `x @ weight.T (+ bias)`: x [..., C], weight [N, C], bias [N], all of one dtype -> [..., N]."""
    # oneDNN's operation has no gradient, and torch.func cannot transform ours.
    if _by_onednn(x) and not is_plain():
        return _Linear.apply(x, weight, bias)
    return F.linear(x, weight, bias)


def product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Return `a @ b.T`, [N, M], from a [N, K] and b [M, K] in any layout; no gradient is recorded."""
    if not _by_onednn(a):
        return torch.mm(a, b.T, out=out)
    y = torch.ops.posbench.onednn_product(a, b) if torch.compiler.is_compiling() else _onednn_product(a, b)
    return y if out is None else out.copy_(y)


def _onednn_product(a: Tensor, b: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")


# Inductor lowers oneDNN's operation only for packed constant weights, so the compiler sees a custom operation instead.
_LIBRARY = torch.library.Library("posbench", "DEF")
_LIBRARY.define("onednn_product(Tensor a, Tensor b) -> Tensor")
_LIBRARY.impl("onednn_product", _onednn_product, "CPU")
torch.library.register_fake("posbench::onednn_product", lambda a, b: a.new_empty(len(a), len(b)), lib=_LIBRARY)


def summed_outer(a: Tensor, b: Tensor) -> Tensor:
    """Return `a.T @ b`, [N, M], from a [K, N] and b [K, M]; no gradient is recorded."""
    # oneDNN copies a transposed first factor, so make the narrower matrix the first.
    return product(a.T, b.T) if a.shape[1] <= b.shape[1] else product(b.T, a.T).T


def _by_onednn(x: Tensor) -> bool:
    return ONEDNN_IS_FASTER and x.dtype == torch.float32 and not x.is_cuda


class _Linear(torch.autograd.Function):
    """The function `x @ weight.T (+ bias)` by oneDNN, with the gradient that oneDNN's operation lacks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        y = product(x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], -1)
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        g = gradients[0].reshape(-1, gradients[0].shape[-1])
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            product(g, weight.T).view_as(x) if needs_x else None,
            summed_outer(g, x.reshape(-1, x.shape[-1])) if needs_weight else None,
            g.sum(0) if needs_bias else None,
        )
