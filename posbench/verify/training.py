"""The paths that training takes, held to float64: gradients of every weight, and compiled blocks.

On a GPU they are of every `posbench verify`, gradients as blocks run uncompiled; `--compiled` adds the compiled blocks,
on a CPU too. What is compiled on a GPU is other code altogether: FlexAttention for biases, one kernel for what is many.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import cast

import numpy as np
import torch
from torch import Tensor

from posbench.attention.kernels import COMPILED_FROM
from posbench.model import Block, Decoder
from posbench.verify.specimen import VOCAB, Specimen

# Of a gradient, times as many roundings as of a logit: it passes the model twice, and terms cancel. On a CPU, by every
# scheme, weights that all share were measured to need up to 39 and 8 (fp32, bf16), what is learned up to 111 (FoX) and
# 14 (learned frequencies).
ALLOWANCE = {torch.float32: 8.0, torch.bfloat16: 4.0}
FLOOR = 1.0  # of the mean size of gradients: smaller ones are held to it (what is added to all scores has none)


def gradients_of(model: Decoder, specimen: Specimen) -> dict[str, Tensor]:
    """By every parameter, of a random sum of the logits of size about 1, float64 on the CPU."""
    weights = torch.from_numpy(np.random.RandomState(3).standard_normal((specimen.length, VOCAB)))
    weights /= weights.numel() ** 0.5
    parameters = dict(model.named_parameters())
    with torch.enable_grad():
        logits = model(specimen.tokens.to(model.embedding.weight.device))[0]
        scalar = (logits.double().cpu() * weights).sum()
        found = torch.autograd.grad(scalar, list(parameters.values()), allow_unused=True)
    return {
        name: torch.zeros(parameter.shape, dtype=torch.float64) if gradient is None else gradient.double().cpu()
        for (name, parameter), gradient in zip(parameters.items(), found, strict=True)
    }


def training_errors(
    specimen: Specimen, narrow: Decoder, dtype: torch.dtype, rounding: float, compiled: bool
) -> Iterator[tuple[str, float]]:
    """Each path and its error, a root mean square in roundings, gradients by their `ALLOWANCE`.

    Arguments: narrow, in `dtype` on its device; compiled, whether its blocks are compiled for it, which takes a minute.
    """
    exact = gradients_of(copy.deepcopy(specimen.wide), specimen)
    sizes = [float(gradient.norm()) / gradient.numel() ** 0.5 for gradient in exact.values()]
    least = FLOOR * sum(sizes) / len(sizes)
    for how in ("eager", *(["compiled"] if compiled else [])):
        for block in narrow.blocks:
            cast(Block, block).attention.kind.kernel = None
        narrow.piece = None
        if how == "compiled":
            torch.compiler.reset()
            narrow.compile_blocks()
            with torch.enable_grad():
                logits = narrow(specimen.tokens.to(narrow.embedding.weight.device), offset=specimen.far)[0]
            yield "compiled", _error(logits, specimen.far_logits) / rounding
        found = gradients_of(narrow, specimen)
        for name, gradient in exact.items():
            size = max(float(gradient.norm()), least * gradient.numel() ** 0.5)
            error = float((found[name] - gradient).norm()) / size
            yield f"{how} gradient of {name}", error / rounding / ALLOWANCE[dtype]
    if compiled and specimen.has_bias and specimen.wide.scheme.longest is None:
        yield "compiled attention of a long window", _long_window(specimen, narrow) / rounding


@torch.no_grad()
def _long_window(specimen: Specimen, narrow: Decoder) -> float:
    """Of logits that are read without a gradient, in a window from which on a GPU compiles attention alone."""
    tokens = specimen.tokens.repeat(1, 1 + COMPILED_FROM // specimen.length)
    return _error(narrow(tokens.to(narrow.embedding.weight.device))[0], specimen.wide(tokens)[0])


def _error(result: Tensor, expected: Tensor) -> float:
    return float((result.detach().double().cpu() - expected).norm() / expected.norm())
