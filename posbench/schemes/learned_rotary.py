"""RoPE with learned frequencies, shared by all layers and heads; gradients flow through the float64 angles."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from posbench.schemes.base import Shape
from posbench.schemes.rotary import Rotary


class LearnedFrequencies(Rotary):
    """LeRoPE: use `inv_freq_t = base ** (-2t / D) * exp(log_scale_t)`, log_scale learned from 0 (arXiv 2607.10134)."""

    def __init__(self, shape: Shape, **options: Any) -> None:
        super().__init__(shape, **options)
        self.log_scale = nn.Parameter(torch.zeros(self.width // 2))

    def frequencies(self, device: torch.device | None = None) -> Tensor:
        return super().frequencies(device) * self.log_scale.double().exp()


class LearnedBase(Rotary):
    """RoPE with a learned base: `inv_freq_t = (base * exp(log_scale)) ** (-2t / D)`, log_scale [1] learned from 0."""

    def __init__(self, shape: Shape, **options: Any) -> None:
        super().__init__(shape, **options)
        self.log_scale = nn.Parameter(torch.zeros(1))

    @property
    def schedule_base(self) -> float:
        return self.base * math.exp(self.log_scale.item())

    def frequencies(self, device: torch.device | None = None) -> Tensor:
        inv_freq = super().frequencies(device)
        exponent = torch.arange(0, self.width, 2, dtype=torch.float64, device=device) / self.width
        return inv_freq * (-exponent * self.log_scale.double()).exp()
