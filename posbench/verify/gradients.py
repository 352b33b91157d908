"""Are gradients right: of what a scheme learns, on every kernel, and of all weights on the paths that training takes?

On a GPU the paths of training are part of every `posbench verify`, as blocks run uncompiled; `--compiled` adds the
compiled blocks, on a CPU too. What is compiled on a GPU is other code altogether: FlexAttention for biases, one kernel
for what is many.
"""

from __future__ import annotations

import copy
import warnings
import zlib
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from posbench.attention import kernels as softmax_kernels
from posbench.attention.kernels import COMPILED_FROM
from posbench.model.decoder import Decoder
from posbench.verify.specimen import Specimen, learned, set_kernel

STEPS = (1e-6, 1e-7, 1e-8)  # of finite differences: a smaller step may miss a kink that a larger one crosses
# Of a gradient, times as many roundings as of a logit: it passes the model twice, and terms cancel. On a CPU, by every
# scheme, weights that all share were measured to need up to 39 and 8 (fp32, bf16), what is learned up to 111 (FoX) and
# 14 (learned frequencies).
ALLOWANCE = {torch.float32: 8.0, torch.bfloat16: 4.0}
# A further factor for schemes whose scores are piecewise linear in what the model computes: a rounding that crosses a
# kink changes the gradient by a step. On an H200 CoPE and DAPE needed 83 in fp32, while in float64 their gradients
# agree with the CPU's to 1e-14. A wrong gradient misses by a million roundings.
KINKED = 128.0
FLOOR = 1.0  # of the mean size of gradients: smaller ones are held to it (what is added to all scores has none)


def gradients(specimen: Specimen) -> tuple[float, str]:
    """The largest error of a learned tensor's gradient along a direction, float64; on which kernel, of which tensor.

    Of a random sum of the logits of about size 1, against its central difference when the tensor moves that way: every
    entry by +1 or -1, drawn once, so that no entry's share can be missing. Of several steps the one that agrees best
    counts: a wrong gradient is wrong at every step, while the kinks of piecewise-linear schemes spoil those that cross
    them.
    """
    model = copy.deepcopy(specimen.wide)
    parameters = learned(model)
    directions = {}
    for name, parameter in parameters.items():
        signs = np.random.RandomState(zlib.crc32(name.encode())).choice([-1.0, 1.0], parameter.shape)
        directions[name] = torch.as_tensor(signs, dtype=parameter.dtype)
    expected = {
        name: [_difference(model, specimen, parameters[name], directions[name], step) for step in STEPS]
        for name in parameters
    }
    errors = {}
    for path, kernel in (
        model.architecture.kinds[0].kernels(specimen.schemes, specimen.has_bias, torch.device("cpu")).items()
    ):
        if kernel is softmax_kernels.flex:
            continue  # on a CPU it has no gradient, and is never used for training there
        set_kernel(model, kernel)
        with warnings.catch_warnings():
            found = gradients_of(model, specimen, parameters)
        for name, gradient in found.items():
            along = float((gradient * directions[name]).sum())
            errors[f"{path}, {name}"] = min(abs(along - difference) for difference in expected[name])
    worst = max(errors, key=lambda place: (np.isnan(errors[place]), errors[place]))
    return errors[worst], worst


def gradients_of(
    model: Decoder, specimen: Specimen, parameters: dict[str, nn.Parameter], setting: str = "text"
) -> dict[str, Tensor]:
    """Return the gradient of a random sum of the logits by each parameter, float64 on the CPU."""
    with torch.enable_grad():
        found = torch.autograd.grad(_scalar(model, specimen, setting), list(parameters.values()), allow_unused=True)
    return {
        name: torch.zeros(parameter.shape, dtype=torch.float64) if gradient is None else gradient.double().cpu()
        for (name, parameter), gradient in zip(parameters.items(), found, strict=True)
    }


def _scalar(model: Decoder, specimen: Specimen, setting: str = "text") -> Tensor:
    device = model.embedding.weight.device
    tokens, positions = (x.to(device) for x in specimen.batch)
    if setting == "text":
        logits = model(tokens[:1])
    elif setting == "positions":
        logits = model(tokens, positions=positions)
    else:
        model.bos_id = int(tokens[0, specimen.length // 3])  # both sequences have it
        logits = model(tokens)
        model.bos_id = None
    weights = torch.from_numpy(np.random.RandomState(3).standard_normal(logits.shape))
    weights /= weights.numel() ** 0.5
    return (logits.double().cpu() * weights).sum()


def _difference(model: Decoder, specimen: Specimen, parameter: Tensor, direction: Tensor, step: float) -> float:
    """The scalar's central difference as `parameter` moves along `direction`."""
    start, at = parameter.detach().clone(), {}
    for steps in (-2, -1, 1, 2):
        parameter.data.copy_(start + steps * step * direction)
        at[steps] = float(_scalar(model, specimen))
    parameter.data.copy_(start)
    # Of fourth order: where a learned frequency meets a long distance, the third derivative is in the millions.
    return (8 * (at[1] - at[-1]) - (at[2] - at[-2])) / (12 * step)


def training_errors(
    specimen: Specimen, narrow: Decoder, dtype: torch.dtype, rounding: float, compiled: bool
) -> Iterator[tuple[str, float]]:
    """Each path and its error, a root mean square in roundings, gradients by their `ALLOWANCE`.

    Arguments: narrow, in `dtype` on its device; compiled, whether its blocks are compiled for it, which takes a minute.
    """
    wide = copy.deepcopy(specimen.wide)
    exact = {
        setting: gradients_of(wide, specimen, dict(wide.named_parameters()), setting) for setting in specimen.settings
    }
    sizes = [float(gradient.norm()) / gradient.numel() ** 0.5 for gradient in exact["text"].values()]
    least = FLOOR * sum(sizes) / len(sizes)
    allowance = ALLOWANCE[dtype] * (KINKED if any(scheme.has_kinks for scheme in specimen.schemes) else 1.0)
    for how in ("eager", *(["compiled"] if compiled else [])):
        set_kernel(narrow, None)
        narrow.piece = None
        if how == "compiled":
            torch.compiler.reset()
            narrow.compile_blocks()
            with torch.enable_grad():
                logits = narrow(specimen.tokens.to(narrow.embedding.weight.device), offset=specimen.far)[0]
            yield "compiled", _error(logits, specimen.far_logits) / rounding
        for setting, gradients in exact.items():
            torch.compiler.reset()  # after eight versions of a block the compiler gives up, and runs it uncompiled
            found = gradients_of(narrow, specimen, dict(narrow.named_parameters()), setting)
            place = "" if setting == "text" else f" ({setting})"
            for name, gradient in gradients.items():
                size = max(float(gradient.norm()), least * gradient.numel() ** 0.5)
                error = float((found[name] - gradient).norm()) / size
                yield f"{how} gradient of {name}{place}", error / rounding / allowance
    if compiled and specimen.has_bias and specimen.wide.scheme.longest is None:
        # Running sums of gates grow with the window, and so do their roundings.
        windows = _windows_of_long_one(specimen)
        growth = windows if any(scheme.overrides("gate") for scheme in specimen.schemes) else 1
        yield "compiled attention of a long window", _long_window(specimen, narrow) / rounding / growth


def _windows_of_long_one(specimen: Specimen) -> int:
    """Return how many times the tokens are repeated to make a window whose attention alone a GPU compiles."""
    return 1 + COMPILED_FROM // specimen.length


@torch.no_grad()
def _long_window(specimen: Specimen, narrow: Decoder) -> float:
    """Return the error of logits that are read without a gradient in such a window."""
    tokens = specimen.tokens.repeat(1, _windows_of_long_one(specimen))
    return _error(narrow(tokens.to(narrow.embedding.weight.device))[0], specimen.wide(tokens)[0])


def _error(result: Tensor, expected: Tensor) -> float:
    return float((result.detach().double().cpu() - expected).norm() / expected.norm())
