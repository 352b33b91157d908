"""Add positions to the token embeddings, once, before the first layer."""

from __future__ import annotations

import torch
from torch import Tensor

from posbench.config import ConfigError
from posbench.schemes.base import Scheme, Shape, require_number


class Learned(Scheme):
    """Learned positions: add row `p` of a table [longest, C] to the embedding of the token at position `p`.

    A learned vector for each position, added once to the token embeddings (Gehring et al. 2017, arXiv 1705.03122).

    The table has the standard deviation of the token embeddings. It covers the training length, or for tasks the
    longest problem that may be tested; later positions are not defined.
    """

    is_relative = False

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.table = self.normal(shape.longest or shape.context_length, shape.d_model)

    @property
    def longest(self) -> int:
        return len(self.table)

    def embed(self, x: Tensor, pos: Tensor) -> Tensor:
        return x + self.table[pos].to(x.dtype).reshape(-1, *x.shape[1:])


class Sinusoidal(Scheme):
    """Sinusoidal positions: add `a sin(p / base ** (2i / C))` to channel `2i`, and the cosine to channel `2i + 1`.

    Sines and cosines of the position, added once to the token embeddings (Vaswani et al. 2017, arXiv 1706.03762).

    Options: `amplitude`, in standard deviations of the token embeddings at initialisation, `a = amplitude *
    embedding_std`; 1 is the paper's proportion. `base`, 10000 as in the paper.
    Raises: ConfigError for an odd d_model, a negative amplitude, or a base that is not above 1.
    """

    is_relative = False

    def __init__(self, shape: Shape, amplitude: float = 1.0, base: float = 10000.0) -> None:
        super().__init__(shape)
        if shape.d_model % 2:
            raise ConfigError(
                f"model.d_model={shape.d_model} is odd: sines and cosines use pairs of channels, so it must be even"
            )
        self.amplitude = require_number("amplitude", amplitude, 0, 1e6, "1 is the paper's proportion")
        self.base = require_number("base", base, 1.001, 1e15, "10000 is usual")

    def prepare(self, pos: Tensor, length: int) -> Tensor:
        """Return the sines and cosines to add to the token embeddings, times the amplitude, [T, C] float64."""
        width = self.shape.d_model
        inv_freq = self.base ** (-torch.arange(0, width, 2, dtype=torch.float64, device=pos.device) / width)
        angles = pos.to(torch.float64)[..., None] * inv_freq
        return self.amplitude * self.shape.embedding_std * torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)

    def embed(self, x: Tensor, pos: Tensor) -> Tensor:
        return x + pos.to(x.dtype).reshape(-1, *x.shape[1:])
