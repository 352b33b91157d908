"""Smear: add a part of the previous token's embedding to each embedding (karpathy/nanochat, nanochat/gpt.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from posbench.schemes.base import Scheme, Shape, require_integer
from posbench.schemes.earlier import Earlier
from posbench.system.torch_internals import as_dtype


class Smear(Scheme):
    """Smear: `e_t := e_t + s sigmoid(w . n_t) e_{t-1}`, with n_t the first channels of `e_t / rms(e_t)`.

    e is the token embeddings. nanochat normalises embeddings before it smears them; here only the gate reads them
    normalised. w is initialised like the model's matrices and s to 0, so the scheme starts as NoPE.
    Options: `channels`, how many of d_model the gate reads (24 in nanochat; all if there are fewer).
    Raises: ConfigError unless it is a whole number above 0.
    """

    looks_back = 1
    decayed = frozenset({"w"})

    def __init__(self, shape: Shape, channels: int = 24) -> None:
        super().__init__(shape)
        self.w = self.normal(1, min(require_integer("channels", channels, 1, "24 is nanochat's"), shape.d_model))
        self.s = nn.Parameter(torch.zeros(1))

    def embed(self, x: Tensor, pos: Any, earlier: Earlier) -> Tensor:  # type: ignore[override]
        wide = x.to(self.w.dtype)
        normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + torch.finfo(torch.float32).eps)
        gate = (normal[..., : self.w.shape[1]] @ self.w.mT).sigmoid()  # [B, T, 1]
        return as_dtype(wide + self.s * gate * earlier(1), x.dtype)

    def flops_per_token(self, length: int) -> float:
        """Return the FLOPs per token of the gate and of adding the previous embedding, shared among the layers."""
        # They are spent once, before the first layer, and each layer reports its share.
        return 2.0 * (self.w.numel() + self.shape.d_model) / self.shape.num_layers
