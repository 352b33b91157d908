"""A scheme whose keys read earlier tokens (docs/adding-a-scheme.md)."""

import torch
from torch import nn

from posbench.schemes import Scheme


class ShortConvolution(Scheme):
    """k_t + w_1 k_{t-1} + w_2 k_{t-2}, with numbers w for each channel of a head."""

    per_layer, keeps_norms, looks_back = True, False, 2

    def __init__(self, shape):
        super().__init__(shape)
        self.w = nn.Parameter(torch.zeros(2, shape.head_dim))

    def k(self, x, pos, earlier):
        return (x + self.w[0] * earlier(1) + self.w[1] * earlier(2)).to(x.dtype)
