"""Attention without content: what a token hears of another depends on their distance alone, or on gates.

    o_i = sum_{j<=i} e^bias v_j

There are no queries and no keys. Under a decay of each head (ALiBi's: gamma_h = exp(-m_h)) it is a linear recurrence,
`o_i = gamma_h o_(i-1) + v_i`; with values and outputs rotated a complex one on pairs of channels,
`o_i = gamma_h exp(-1j theta) o_(i-1) + v_i`, computed in real numbers by turning each value on and the output back
(kexue.fm/archives/10862). In linear time there, and where nothing is added; quadratic, with all rows kept, under any
other bias.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from posbench.attention import sums
from posbench.attention.kind import Kind, KVCache
from posbench.config import ConfigError
from posbench.schemes import Placement, Scheme, Shape


class Decay(Kind):
    """Weights of distance alone; sums in at least float32. A bias that looks at queries finds them to be 0.

    Options: `normalise`, whether the weights of a query are divided by their sum.
    """

    has_keys = False
    parts = ("v",)

    def __init__(self, shape: Shape, shared_kv: bool = False, normalise: bool = False) -> None:
        super().__init__(shape, shared_kv)
        if not isinstance(normalise, bool):
            raise ConfigError(f"scheme.attention.normalise={normalise!r} must be true or false")
        self.normalise = normalise

    def kernels(
        self, schemes: Sequence[Scheme], has_bias: bool, device: torch.device
    ) -> Mapping[str, Callable[..., Tensor] | None]:
        in_chunks = {"chunks": None} if any(scheme.log_decay() is not None for scheme in schemes) else {}
        return {**in_chunks, "quadratic": self._quadratic}

    def mix(
        self,
        q: Tensor | None,
        k: Tensor | None,
        v: Tensor,
        x: Tensor,
        scheme: Scheme,
        at: Placement,
        cache: KVCache | None,
    ) -> Tensor:
        gates, pos, pos_of_keys = self.placed(x, scheme, at, cache)
        in_chunks = scheme.log_decay() is not None and at.positions is None
        kernel = self.kernel or (self._chunks if in_chunks else self._quadratic)
        return scheme.o(kernel(scheme.v(v, pos_of_keys), gates, scheme, at, cache).to(v.dtype), pos)

    def _chunks(self, v: Tensor, gates: Any, scheme: Scheme, at: Placement, cache: KVCache | None) -> Tensor:
        """In linear time. v [B, Hkv, T, D], behind its hook."""
        v, log_decay = self._wide(v), scheme.log_decay()
        assert log_decay is not None
        a = sums.heads_of(log_decay, self.shape.num_heads, v)
        if self.normalise:
            v = torch.cat((v, torch.ones_like(v[..., :1])), dim=-1)  # the last channel sums the weights
        state = cache.state[0] if cache is not None and cache.state else None
        o, state = sums.running_sum(v, a, state)
        if cache is not None:
            cache.advance(v.shape[2])
            cache.state = (state,)
        return o[..., :-1] / o[..., -1:] if self.normalise else o

    def _quadratic(self, v: Tensor, gates: Any, scheme: Scheme, at: Placement, cache: KVCache | None) -> Tensor:
        """The same under any bias, by blocks of queries."""
        B, H, T = len(v), self.shape.num_heads, v.shape[2]
        if cache is not None:
            v = cast(Tensor, cache.extended(v)[0])
        bias = scheme.bias(v.new_zeros(()).expand(B, H, T, v.shape[3]), torch.zeros_like(v), gates, at)
        v = self._wide(v)
        rows = []
        for _, keys, weights in sums.weight_blocks(bias, B, H, T, v.shape[2], v, self.normalise):
            o = weights @ v[:, :, keys]
            rows.append(o / weights.sum(-1, keepdim=True) if self.normalise else o)
        return torch.cat(rows, dim=2)

    def _wide(self, v: Tensor) -> Tensor:
        """In at least float32, one for each head."""
        wide = v.to(torch.promote_types(v.dtype, torch.float32))
        return wide.repeat_interleave(self.shape.num_heads // v.shape[1], dim=1)

    def flops_per_token(self, length: int, scheme: Scheme) -> float:
        """In linear time a multiplication and an addition a channel; otherwise a product for half the keys."""
        each = 2.0 if scheme.log_decay() is not None else float(length)
        return each * self.shape.num_heads * self.shape.head_dim
