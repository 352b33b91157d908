"""Softmax attention with keys and values of its own: from a latent (`Latent`, MLA), or in fewer heads (`Grouped`).

Latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) caches one short vector per token, and one key of a few
channels that all heads share and that carries position ("decoupled RoPE"), with R_j what the scheme does to a key:

    c_j = norm(W_c x_j),    k_jh = [R_j W_r x_j ; W_k,h c_j],    v_jh = W_v,h c_j
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.attention.kind import KVCache
from posbench.attention.softmax import Softmax
from posbench.config import ConfigError
from posbench.schemes import Scheme, Shape
from posbench.schemes.base import apply_hook, require_integer, require_number
from posbench.schemes.earlier import EarlierRows
from posbench.schemes.rotary import Rotary
from posbench.system.matmul import linear

EPS = 1e-6  # added to the mean square of a latent, as in DeepSeek-V3


class _OwnKeys(Softmax):
    """Softmax attention that computes keys and values from the hidden states by its own matrices."""

    parts = ("q",)
    takes_qk_norm = False
    _rotated: int  # channels of a key that a scheme may rotate

    def check_scheme(self, scheme: Scheme) -> None:
        # Latent attention caches what keys and values are computed from, so only the shared channels can be rotated.
        sites = {"k", "v"} & scheme.acts_on
        is_rotation = isinstance(scheme, Rotary) and type(scheme).k is Rotary.k and scheme.width <= self._rotated
        if "v" in sites or (sites and not is_rotation):
            raise ConfigError(
                f"{type(scheme).__name__} changes {' and '.join(sorted(sites))}, and attention of the kind "
                f"{self.shape.attention} allows only a rotation of q and k in their first {self._rotated} channels: "
                f"choose {{kind: partial_rotary, fraction: {self._rotated / self.shape.head_dim:g}}}, or a scheme that "
                "does not change keys and values"
            )

    def flops_per_token(self, length: int, scheme: Scheme) -> float:
        """Return the FLOPs per token of attention in one layer, with the products by the kind's own matrices."""
        own_parameters = sum(parameter.numel() for parameter in self.parameters() if parameter.ndim > 1)
        return super().flops_per_token(length, scheme) + 2.0 * own_parameters


class Latent(_OwnKeys):
    """Multi-head latent attention (MLA): keys and values are computed from one cached latent per token.

    A query and a key have D channels (in DeepSeek's models D leaves out the first r). The first r are multiplied with a
    key that all heads share, which a scheme may rotate; the others with keys from the latent. Values have D channels.

    Options: `latent_heads`, G: the latent has `2 G D - r` channels, so that the cache is as large as with G heads of
    keys and values; `shared`, r / D. A latent of queries, as in the largest models, is left out: it saves no cache.
    Raises: ConfigError unless G is at least 1 and r is an even number between 0 and D.
    """

    def __init__(self, shape: Shape, shared_kv: bool = False, latent_heads: int = 1, shared: float = 0.25) -> None:
        super().__init__(shape, shared_kv)
        H, D, C = shape.num_heads, shape.head_dim, shape.d_model
        require_integer("attention.latent_heads", latent_heads, 1, "the key heads that the cache could hold")
        r = require_number("attention.shared", shared, 0, 1, "0.25 is usual") * D
        if r % 2 or not 0 < r < D:
            raise ConfigError(
                f"scheme.attention.shared={shared} of model.head_dim={D} is {r:g} channels, which must be an even "
                f"number, above 0 and below {D}: change it"
            )
        self._rotated = int(r)
        latent = 2 * latent_heads * D - self._rotated
        self.W_c, self.W_r = nn.Parameter(torch.empty(latent, C)), nn.Parameter(torch.empty(self._rotated, C))
        self.W_k = nn.Parameter(torch.empty(H * (D - self._rotated), latent))
        self.W_v = nn.Parameter(torch.empty(H * D, latent))
        self.norm_weight = nn.Parameter(torch.ones(latent))

    def _keys_and_values(
        self,
        parts: Mapping[str, Tensor],
        x: Tensor,
        scheme: Scheme,
        pos: Any,
        past: EarlierRows,
        cache: KVCache | None,
    ) -> tuple[Tensor, Tensor]:
        H, D = self.shape.num_heads, self.shape.head_dim
        c = F.rms_norm(linear(x, self.W_c.to(x.dtype)), self.norm_weight.shape, self.norm_weight.to(x.dtype), EPS)
        shared = F.pad(linear(x, self.W_r.to(x.dtype)), (0, D - self._rotated))  # hooks get D channels
        shared = apply_hook(scheme, "k", shared[:, None], pos, past)[..., : self._rotated]  # [B, 1, T, r]
        # A cache holds [B, heads, T, .]: the latent is one head.
        c, shared = self._cached(scheme, cache, c[:, None], shared)
        k, v = (linear(c[:, 0], W.to(c.dtype)).unflatten(-1, (H, -1)).transpose(1, 2) for W in (self.W_k, self.W_v))
        return torch.cat((shared.expand(-1, H, -1, -1), k), dim=-1), v


class Grouped(_OwnKeys):
    """Grouped-query attention with `kv_heads` heads of keys and values, whatever the model has (arXiv 2305.13245).

    Option: `kv_heads`, which divides num_heads; equal to `latent_heads`, it gives a cache of the same size.
    """

    def __init__(self, shape: Shape, shared_kv: bool = False, kv_heads: int = 1) -> None:
        super().__init__(shape, shared_kv)
        require_integer("attention.kv_heads", kv_heads, 1, "1 is multi-query attention")
        if shape.num_heads % kv_heads:
            raise ConfigError(
                f"model.num_heads={shape.num_heads} is not a multiple of scheme.attention.kv_heads={kv_heads}: change "
                "one"
            )
        self._rotated = shape.head_dim
        self.W_k, self.W_v = (nn.Parameter(torch.empty(kv_heads * shape.head_dim, shape.d_model)) for _ in range(2))

    def _keys_and_values(
        self,
        parts: Mapping[str, Tensor],
        x: Tensor,
        scheme: Scheme,
        pos: Any,
        past: EarlierRows,
        cache: KVCache | None,
    ) -> tuple[Tensor, Tensor]:
        D = self.shape.head_dim
        k, v = (linear(x, W.to(x.dtype)).unflatten(-1, (-1, D)).transpose(1, 2) for W in (self.W_k, self.W_v))
        k, v = self._cached(scheme, cache, apply_hook(scheme, "k", k, pos, past), v)
        return k, v
