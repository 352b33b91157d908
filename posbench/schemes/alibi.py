"""ALiBi: a penalty on the scores that grows linearly with distance, at each head's own slope (arXiv 2108.12409)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from posbench.schemes.base import Scheme, Shape


def slopes(num_heads: int) -> Tensor:
    """`2 ** (-8h / H)` for h = 1 .. H where H is a power of two, [H] float64.

    Otherwise those of P heads, P the largest power of two below H, then every second one (1st, 3rd, ...) of 2P heads
    until there are H.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    own = 2.0 ** (-8 * torch.arange(1, power + 1, dtype=torch.float64) / power)
    between = 2.0 ** (-8 * torch.arange(1, 2 * power + 1, 2, dtype=torch.float64) / (2 * power))
    return torch.cat((own, between))[:num_heads]


class Alibi(Scheme):
    """`bias_h(i, j) = -m_h (i - j)`, not learned, added to the scaled scores and not scaled itself.

    From the relative distance, since an absolute key index times the slope is off by whole logits in low precision. The
    slopes stay float64 until attention rounds the bias to the dtype of its scores.
    """

    slopes: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.register_buffer("slopes", slopes(shape.num_heads), persistent=False)

    def bias(self, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return self.slopes[head] * (j - i)
