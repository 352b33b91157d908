"""The base class of optimizers: learning rates, clipping, steps that are skipped, and the state in a checkpoint.

One of your own is a class in a file, `posbench train train.optimizer=my_optimizer.py:Sign`:

    class Sign(Optimizer):
        def update(self, divisor, healthy):
            for name, weight in self.weights.items():
                step = self.rates[name] * (weight.grad / divisor).sign()
                weight.sub_(torch.where(healthy, step, 0.0))

Its options are the constructor's keywords, `train.optimizer_options.beta=0.95`:

        def __init__(self, *given, beta=0.9):
            super().__init__(*given)

Moments that must survive a resume go into `self.moments[name]`, a dict of tensors for each parameter.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from posbench.config import TrainConfig
from posbench.model.layers import layer_matrices
from posbench.schemes import Scheme

OF_SCHEME = "scheme."  # beginning of the names of a position scheme's parameters


def decayed_parameters(model: nn.Module) -> set[str]:
    """Return the names of the parameters with weight decay: all matrices, but of a scheme only those in `decayed`."""
    scheme_modules = {prefix: module for prefix, module in model.named_modules() if isinstance(module, Scheme)}
    decayed = {f"{prefix}.{name}" for prefix, scheme in scheme_modules.items() for name in scheme.decayed}
    of_schemes = {
        f"{prefix}.{name}" for prefix, scheme in scheme_modules.items() for name, _ in scheme.named_parameters()
    }
    return decayed | {name for name, p in model.named_parameters() if p.ndim >= 2 and name not in of_schemes}


class Optimizer(ABC):
    """Base class of optimizers: a subclass implements `update`, and keeps what it remembers in `moments`.

    Attributes: weights, {name: parameter}; rates, {name: learning rate of this step}; decays, {name: weight decay};
    moments, {name: {moment: tensor}}, saved in checkpoints.
    """

    def __init__(self, model: nn.Module, config: TrainConfig, scheme_lr_factor: float = 1.0, /) -> None:
        self.config = config
        self.weights = dict(model.named_parameters())
        decayed = decayed_parameters(model)
        self.decays = {name: config.weight_decay if name in decayed else 0.0 for name in self.weights}
        # Factors on the learning rate, 1 for most parameters.
        self.factors = dict.fromkeys(self.weights, 1.0)
        self.factors |= dict.fromkeys(layer_matrices(model), config.matrix_lr_factor)
        self.factors |= {name: scheme_lr_factor for name in self.weights if name.startswith(OF_SCHEME)}
        self.rates = dict.fromkeys(self.weights, 0.0)
        self.moments: dict[str, dict[str, Tensor]] = {name: {} for name in self.weights}

    @property
    def record(self) -> dict[str, Any] | None:
        """Return facts for the run's manifest, or None if there is nothing to say."""
        return None

    @staticmethod
    def described(record: Mapping[str, Any]) -> str:
        """Return what a run says about its optimizer before it begins. Arguments: record, as above."""
        return ", ".join(f"{name}={value}" for name, value in record.items())

    @abstractmethod
    def update(self, divisor: Tensor, healthy: Tensor) -> None:
        """Update the weights by their gradients divided by `divisor`, without a gradient of its own.

        Arguments: divisor, 0-d, 1 or more, by which clipping divides; healthy, 0-d bool: if False, weights and moments
        must stay as they are.
        """

    def set_rate(self, step: int) -> None:
        """Set the learning rates for step `step` (0-based)."""
        rate = learning_rate(step, self.config)
        self.rates = {name: factor * rate for name, factor in self.factors.items()}

    @torch.no_grad()
    def step(self, healthy: Tensor) -> Tensor:
        """Update the weights, and return the L2 norm of all gradients together before clipping, 0-d.

        Arguments: healthy, 0-d bool on the device: nothing is updated if it is False.
        """
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.weights.values() if p.grad is not None])
        clip = self.config.grad_clip
        # All on the device: the host does not read the norm, so it never waits for the GPU.
        divisor = (norm / clip).clamp(min=1.0) if clip else torch.ones_like(norm)  # a clip of 0 means none
        self.update(divisor, healthy & norm.isfinite())
        return norm

    def zero_grad(self) -> None:
        """Set all gradients to None."""
        for weight in self.weights.values():
            weight.grad = None

    def state(self) -> dict[str, Tensor]:
        """Return all moments, {`<parameter>/<moment>`: tensor}."""
        return {f"{name}/{key}": value for name, moments in self.moments.items() for key, value in moments.items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Load the moments that the method `state` returned."""
        for entry, value in state.items():
            name, _, key = entry.rpartition("/")
            self.moments[name][key] = value.to(self.weights[name].device)


def learning_rate(step: int, config: TrainConfig) -> float:
    """Return the learning rate of step `step` (0-based): linear warm-up, then cosine, constant or wsd.

    `cosine` falls to `lr_end_ratio * lr` (Loshchilov and Hutter 2017); `wsd` stays at the peak and falls to the same
    rate over the last `decay_ratio` of the steps (Hu et al. 2024, arXiv 2404.06395).
    """
    # A branch, which starts from a longer run's checkpoint, has the longer run's warm-up.
    total, warmup = config.num_steps, config.warmup_steps
    if step < warmup:
        return config.lr * (step + 1) / warmup
    end = config.lr_end_ratio * config.lr
    if config.schedule == "cosine":
        progress = (step - warmup) / max(1, total - 1 - warmup)
        return end + (config.lr - end) * (1 + math.cos(math.pi * progress)) / 2
    decay_begins = config.decay_begins if config.schedule == "wsd" else total  # a constant rate never decays
    if step < decay_begins:
        return config.lr
    return config.lr + (end - config.lr) * (step - decay_begins + 1) / (total - decay_begins)
