"""Does a gradient reach what a scheme learns, the right one, on every kernel that attention runs on?"""

from __future__ import annotations

import copy
import warnings
import zlib
from typing import cast

import numpy as np
import torch
from torch import Tensor

from posbench.attention import Kind
from posbench.attention import kernels as softmax_kernels
from posbench.model import Block, Decoder
from posbench.verify.specimen import VOCAB, Specimen

STEPS = (1e-6, 1e-7, 1e-8)  # of finite differences: a kink that a step crosses is not there for a smaller one


def learns(specimen: Specimen) -> bool:
    """Whether the scheme has parameters of its own."""
    return any(True for _ in specimen.wide.scheme.parameters())


def gradients(specimen: Specimen) -> tuple[float, str]:
    """The largest error of a learned tensor's gradient along a direction, float64; on which kernel, of which tensor.

    Of a random sum of the logits of about size 1, against its central difference when the tensor moves that way: every
    entry by +1 or -1, drawn once, so that no entry's share can be missing. Of several steps the one that agrees best
    counts: a wrong gradient is wrong at every step, while the kinks of piecewise-linear schemes spoil those that cross
    them.
    """
    model = copy.deepcopy(specimen.wide)
    learned = dict(model.scheme.named_parameters())
    directions = {name: _signs(name, parameter) for name, parameter in learned.items()}
    weights = torch.from_numpy(np.random.RandomState(3).standard_normal((specimen.length, VOCAB)))
    weights /= weights.numel() ** 0.5
    expected = {
        name: [_difference(model, specimen, weights, learned[name], directions[name], step) for step in STEPS]
        for name in learned
    }
    errors = {}
    for path, kernel in _kind(model).kernels(specimen.schemes, specimen.has_bias, torch.device("cpu")).items():
        if kernel is softmax_kernels.flex:
            continue  # on a CPU it has no gradient, and is never used for training there
        for block in model.blocks:
            cast(Block, block).attention.kind.kernel = kernel
        with torch.enable_grad(), warnings.catch_warnings():
            scalar = _scalar(model, specimen, weights)
            found = torch.autograd.grad(scalar, list(learned.values()), allow_unused=True)
        for name, gradient in zip(learned, found, strict=True):
            along = 0.0 if gradient is None else float((gradient * directions[name]).sum())
            errors[f"{path}, {name}"] = min(abs(along - difference) for difference in expected[name])
    worst = max(errors, key=lambda place: (np.isnan(errors[place]), errors[place]))
    return errors[worst], worst


def _kind(model: Decoder) -> Kind:
    return cast(Block, model.blocks[0]).attention.kind


def _signs(name: str, parameter: Tensor) -> Tensor:
    signs = np.random.RandomState(zlib.crc32(name.encode())).choice([-1.0, 1.0], parameter.shape)
    return torch.as_tensor(signs, dtype=parameter.dtype)


def _scalar(model: Decoder, specimen: Specimen, weights: Tensor) -> Tensor:
    return (model(specimen.tokens)[0] * weights).sum()


def _difference(
    model: Decoder, specimen: Specimen, weights: Tensor, parameter: Tensor, direction: Tensor, step: float
) -> float:
    """The scalar's central difference as `parameter` moves along `direction`."""
    start, at = parameter.detach().clone(), {}
    for steps in (-2, -1, 1, 2):
        parameter.data.copy_(start + steps * step * direction)
        at[steps] = float(_scalar(model, specimen, weights))
    parameter.data.copy_(start)
    # Of fourth order: where a learned frequency meets a long distance, the third derivative is in the millions.
    return (8 * (at[1] - at[-1]) - (at[2] - at[-2])) / (12 * step)
