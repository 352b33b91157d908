"""AdamW (Loshchilov and Hutter 2019): decay on matrices only, with clipping inside PyTorch's fused kernel."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from posbench.config import TrainConfig
from posbench.training.optimizers.optimizer import Optimizer


class AdamW(Optimizer):
    """PyTorch's fused AdamW, whose kernel clips gradients and skips steps that are not finite.

    Arguments: names, of the parameters to train, all by default.
    """

    def __init__(
        self,
        model: nn.Module,
        config: TrainConfig,
        scheme_lr_factor: float = 1.0,
        names: Collection[str] | None = None,
        /,
    ) -> None:
        super().__init__(model, config, scheme_lr_factor)
        groups: dict[tuple[float, float], list[str]] = {}  # (factor of the rate, weight decay) -> names
        # None: all parameters.
        for name in self.weights if names is None else names:
            groups.setdefault((self.factors[name], self.decays[name]), []).append(name)
        torch_groups = []
        for (_, decay), group in groups.items():
            weights = [self.weights[name] for name in group]
            # All weights of a group have one rate; `first` is the name by which `update` finds it.
            torch_groups.append({"params": weights, "first": group[0], "weight_decay": decay})
        self.inner = torch.optim.AdamW(
            torch_groups,
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )
        # The kernel's moments are ours: what is loaded into `moments` is what it reads.
        for group in groups.values():
            for name in group:
                self.inner.state[self.weights[name]] = self.moments[name]

    def update(self, divisor: Tensor, healthy: Tensor) -> None:
        for group in self.inner.param_groups:
            group["lr"] = self.rates[group["first"]]
        # The kernel reads these two attributes, which PyTorch's gradient scaler sets. The class does not declare them.
        fused: Any = self.inner
        fused.grad_scale = divisor.to(torch.float32)
        fused.found_inf = (~healthy).to(torch.float32)
        self.inner.step()
