"""Are gradients right? Check a scheme's parameters on every kernel, and all weights on the code paths of training."""

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
from posbench.verify.random_model import RandomModel, learned, set_kernels

STEPS = (1e-6, 1e-7, 1e-8)  # of finite differences; a smaller step may avoid a kink that a larger one crosses
# A gradient may be off by this factor times the roundings of a logit, because it passes through the model twice and
# terms cancel. On a CPU, over all schemes, shared weights were measured at up to 39 (fp32) and 8 (bf16) roundings, and
# learned parameters of schemes at up to 111 (FoX) and 14 (learned frequencies).
ALLOWANCE = {torch.float32: 8.0, torch.bfloat16: 4.0}
# The allowance grows by this factor if scores are piecewise linear, because a rounding that crosses a kink changes the
# gradient by a step. On an H200, CoPE and DAPE were measured to need a factor of 83 in fp32; in float64 their gradients
# agree with the CPU's to 1e-14. A wrong gradient is off by a million roundings.
KINKED = 128.0
# Errors of small gradients are relative to this part of the mean size (a shift of all scores has a gradient of zero).
FLOOR = 1.0


def gradients(random_model: RandomModel) -> tuple[float, str]:
    """Return the largest float64 gradient error of learned tensors, and its kernel and tensor as one string."""
    model = copy.deepcopy(random_model.wide)
    parameters = learned(model)
    directions = {}
    for name, parameter in parameters.items():
        # A direction of +1 and -1, to which each entry of the gradient contributes.
        signs = np.random.RandomState(zlib.crc32(name.encode())).choice([-1.0, 1.0], parameter.shape)
        directions[name] = torch.as_tensor(signs, dtype=parameter.dtype)
    expected = {}
    # A random sum of the logits, of size about 1, is differentiated and compared with its central difference.
    for name, parameter in parameters.items():
        expected[name] = [_difference(model, random_model, parameter, directions[name], step) for step in STEPS]
    errors = {}
    for path, kernels in random_model.kernels(model).items():
        if softmax_kernels.flex in kernels:
            continue  # it has no gradient on a CPU, and training on a CPU never uses it
        set_kernels(model, kernels)
        with warnings.catch_warnings():
            kernel_gradients = gradients_of(model, random_model, parameters)
        for name, gradient in kernel_gradients.items():
            along = float((gradient * directions[name]).sum())
            # The step that agrees best counts: a wrong gradient is wrong at every step, while the kinks of
            # piecewise-linear schemes spoil only steps that cross them.
            errors[f"{path}, {name}"] = min(abs(along - difference) for difference in expected[name])
    worst = max(errors, key=lambda case: (np.isnan(errors[case]), errors[case]))
    return errors[worst], worst


def gradients_of(
    model: Decoder, random_model: RandomModel, parameters: dict[str, nn.Parameter], setting: str = "text"
) -> dict[str, Tensor]:
    """Return the gradients of a random sum of the logits, {parameter name: gradient in float64 on the CPU}.

    Arguments: setting, how positions are given: "text" (0, 1, 2, ...), "positions" (with gaps, different in each
    sequence) or "documents" (starting again in each document).
    """
    with torch.enable_grad():
        scalar = _scalar(model, random_model, setting)
        computed = torch.autograd.grad(scalar, list(parameters.values()), allow_unused=True)
    by_name = {}
    for (name, parameter), gradient in zip(parameters.items(), computed, strict=True):
        if gradient is None:  # the logits do not depend on this parameter
            gradient = torch.zeros(parameter.shape)
        by_name[name] = gradient.double().cpu()
    return by_name


def _scalar(model: Decoder, random_model: RandomModel, setting: str = "text") -> Tensor:
    """Return a random sum of the logits, 0-d float64 on the CPU. Arguments: setting, as of `gradients_of`."""
    device = model.embedding.weight.device
    tokens, positions = (x.to(device) for x in random_model.batch)
    if setting == "text":
        logits = model(tokens[:1])
    elif setting == "positions":
        logits = model(tokens, positions=positions)
    else:
        model.bos_id = int(tokens[0, random_model.length // 3])  # both sequences have it
        logits = model(tokens)
        model.bos_id = None
    # Of size about 1, whatever the number of logits is.
    weights = torch.from_numpy(np.random.RandomState(3).standard_normal(logits.shape))
    weights /= weights.numel() ** 0.5
    return (logits.double().cpu() * weights).sum()


def _difference(model: Decoder, random_model: RandomModel, parameter: Tensor, direction: Tensor, step: float) -> float:
    """Return the derivative of the sum of logits as the parameter moves along `direction`, by finite differences."""
    start = parameter.detach().clone()
    value_at = {}  # the sum after so many steps
    for steps in (-2, -1, 1, 2):
        parameter.data.copy_(start + steps * step * direction)
        value_at[steps] = float(_scalar(model, random_model))
    parameter.data.copy_(start)
    # Fourth order is needed: for a learned frequency and a long distance, the third derivative is in the millions.
    return (8 * (value_at[1] - value_at[-1]) - (value_at[2] - value_at[-2])) / (12 * step)


def training_errors(
    random_model: RandomModel, narrow: Decoder, dtype: torch.dtype, rounding: float, compiled: bool
) -> Iterator[tuple[str, float]]:
    """Yield the name and error of each code path of training: gradients of all weights and, if compiled, logits.

    An error is the norm of the difference from the float64 result, relative to that result's norm (for small gradients,
    to an average norm), in units of `rounding`, the relative rounding of `dtype`, and of what it may grow by.
    Arguments: narrow, the model in `dtype` on its device; compiled, whether to compile its blocks too, which takes a
    minute.
    """
    wide = copy.deepcopy(random_model.wide)
    wide_parameters = dict(wide.named_parameters())
    # The exact gradients, in float64 on the CPU.
    exact = {setting: gradients_of(wide, random_model, wide_parameters, setting) for setting in random_model.settings}
    sizes = [float(gradient.norm()) / gradient.numel() ** 0.5 for gradient in exact["text"].values()]
    least = FLOOR * sum(sizes) / len(sizes)
    sensitivity = random_model.sensitivity
    allowance = ALLOWANCE[dtype] * sensitivity**2  # a gradient passes through the model twice
    if any(scheme.has_kinks for scheme in random_model.schemes):
        allowance *= KINKED
    modes = ("eager", "compiled") if compiled else ("eager",)
    for mode in modes:
        set_kernels(narrow, [None for _ in narrow.architecture.kinds])
        narrow.piece = None
        if mode == "compiled":
            # Compiled code on a GPU differs a lot from uncompiled code: it uses FlexAttention for biases and fuses many
            # operations into one kernel.
            torch.compiler.reset()
            narrow.compile_blocks()
            with torch.enable_grad():
                logits = narrow(random_model.tokens.to(narrow.embedding.weight.device), offset=random_model.far)[0]
            yield "compiled", _error(logits, random_model.far_logits) / rounding / sensitivity
        for setting, gradients in exact.items():
            torch.compiler.reset()  # after eight versions of a block the compiler gives up and runs it uncompiled
            measured = gradients_of(narrow, random_model, dict(narrow.named_parameters()), setting)
            suffix = "" if setting == "text" else f" ({setting})"
            for name, gradient in gradients.items():
                size = max(float(gradient.norm()), least * gradient.numel() ** 0.5)
                error = float((measured[name] - gradient).norm()) / size
                yield f"{mode} gradient of {name}{suffix}", error / rounding / allowance
    if compiled and random_model.has_bias and random_model.wide.scheme.longest is None:
        # Scores may grow with the window, and so do their roundings: of uncompiled float32 code on a CPU, FoX's from 18
        # to 138 and DAPE's from 15 to 88. A wrong kernel is off by far more.
        growth = _repeats_of_long_window(random_model)
        yield "compiled attention of a long window", _long_window(random_model, narrow) / rounding / growth


def _repeats_of_long_window(random_model: RandomModel) -> int:
    # A GPU compiles attention for inference from this length on.
    return 1 + COMPILED_FROM // random_model.length


@torch.no_grad()
def _long_window(random_model: RandomModel, narrow: Decoder) -> float:
    tokens = random_model.tokens.repeat(1, _repeats_of_long_window(random_model))
    return _error(narrow(tokens.to(narrow.embedding.weight.device))[0], random_model.wide(tokens)[0])


def _error(result: Tensor, expected: Tensor) -> float:
    return float((result.detach().double().cpu() - expected).norm() / expected.norm())
