"""The kinds of attention without a softmax: `LinearAttention` and `DecayAttention`, which has no queries and keys.

Linear attention with positions (Katharopoulos et al. 2020, arXiv 2006.16236; RoFormer, arXiv 2104.09864, eq. 19):

    o_i = sum_{j<=i} (R phi(q_i) . R phi(k_j)) e^bias v_j / sum_{j<=i} phi(q_i) . phi(k_j) e^bias,  phi(x) = elu(x) + 1

A scheme rotates q and k after phi and only in the numerator, so that the denominator stays positive. ALiBi's bias is
retention's decay.

Decay attention has no queries and no keys, so weights depend only on distance, or on gates:

    o_i = sum_{j<=i} e^bias v_j

With one decay per head (ALiBi: gamma_h = exp(-m_h)) it is a linear recurrence, `o_i = gamma_h o_(i-1) + v_i`. If the
scheme also rotates values and outputs, the recurrence is complex on pairs of channels, `o_i = gamma_h exp(-1j theta)
o_(i-1) + v_i` (kexue.fm/archives/10862).

In both, time is linear and the state has a fixed size if the scheme states its bias as one decay per head
(`Scheme.log_decay`; no bias is a decay of 0); under any other bias time is quadratic and all rows are cached.
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
from posbench.schemes.base import apply_hook


def features(x: Tensor) -> Tensor:
    """Return `elu(x) + 1`."""
    # exp(x) below 0, because bfloat16 would round elu(x) + 1 to 0 below -8.
    # Without the clamp, the gradient at large x would be NaN.
    return torch.where(x >= 0, x + 1, x.clamp(max=0).exp())


class NonSoftmax(Kind):
    """Base class of attention without a softmax, computed in at least float32."""

    has_keys = False
    _chunks: Callable[..., Tensor]
    _quadratic: Callable[..., Tensor]

    def kernels(
        self, schemes: Sequence[Scheme], has_bias: bool, device: torch.device
    ) -> Mapping[str, Callable[..., Tensor] | None]:
        in_chunks = {"chunks": None} if any(scheme.log_decay() is not None for scheme in schemes) else {}
        return {**in_chunks, "quadratic": self._quadratic}

    def _kernel_for(self, scheme: Scheme, at: Placement) -> Callable[..., Tensor]:
        # Chunks take distances as differences of row numbers, which is wrong for a batch's own positions.
        in_chunks = scheme.log_decay() is not None and at.positions is None
        return self.kernel or (self._chunks if in_chunks else self._quadratic)

    def _wide(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        H = self.shape.num_heads
        return tuple(
            x.to(torch.promote_types(x.dtype, torch.float32)).repeat_interleave(H // x.shape[1], dim=1) for x in tensors
        )


class LinearAttention(NonSoftmax):
    """Linear attention: weights are products of features of queries and keys, without a softmax (formula above)."""

    def mix(
        self, parts: Mapping[str, Tensor], x: Tensor, scheme: Scheme, at: Placement, cache: KVCache | None
    ) -> Tensor:
        q, k, v = features(parts["q"]), features(parts["k"]), parts["v"]
        gates, pos, pos_of_keys = self.gates_and_positions(x, scheme, at, cache)
        kernel, past = self._kernel_for(scheme, at), at.past(None if cache is None else cache.rows)
        # Features first: phi(R q) would not keep R's dependence on distance.
        turned_q, turned_k = apply_hook(scheme, "q", q, pos, past), apply_hook(scheme, "k", k, pos_of_keys, past)
        values = apply_hook(scheme, "v", v, pos_of_keys, past)
        o = kernel((q, turned_q), (k, turned_k), values, gates, scheme, at, cache)
        return apply_hook(scheme, "o", o.to(v.dtype), pos, past)

    def _chunks(
        self,
        qs: tuple[Tensor, Tensor],
        ks: tuple[Tensor, Tensor],
        v: Tensor,
        gates: Any,
        scheme: Scheme,
        at: Placement,
        cache: KVCache | None,
    ) -> Tensor:
        """Return the attention output [B, H, T, .] in linear time, for a bias that is one decay per head.

        Arguments: qs and ks, each without and with the scheme's change by position.
        """
        q, turned_q, k, turned_k, v = self._wide(*qs, *ks, v)
        log_decay = scheme.log_decay()
        assert log_decay is not None
        a = sums.decay_per_head(log_decay, self.shape.num_heads, q)
        state, key_state = cache.state if cache is not None and cache.state else (None, None)
        # The denominator has q and k without the change by position, so it stays positive.
        numerator, state = sums.products(turned_q, turned_k, v, a, state)
        key_sums, key_state = sums.running_sum(k, a, key_state)
        if cache is not None:
            cache.advance(q.shape[2])
            cache.state = (state, key_state)
        return numerator / (q * key_sums).sum(-1, keepdim=True)

    def _quadratic(
        self,
        qs: tuple[Tensor, Tensor],
        ks: tuple[Tensor, Tensor],
        v: Tensor,
        gates: Any,
        scheme: Scheme,
        at: Placement,
        cache: KVCache | None,
    ) -> Tensor:
        """Return the attention output [B, H, T, .] for any bias, in quadratic time. Arguments: as of `_chunks`."""
        k, turned_k = ks
        if cache is not None:
            is_one = turned_k is k  # then it is cached once
            k, cached, v = cast(tuple[Tensor, Tensor | None, Tensor], cache.append(k, None if is_one else turned_k, v))
            turned_k = k if cached is None else cached
        bias = scheme.bias(qs[1], turned_k, gates, at)
        q, turned_q, k, turned_k, v = self._wide(*qs, k, turned_k, v)
        rows = []
        blocks = sums.weight_blocks(bias, len(q), q.shape[1], q.shape[2], k.shape[2], q, relative_to_largest=True)
        for queries, keys, weights in blocks:
            numerator = ((turned_q[:, :, queries] @ turned_k[:, :, keys].mT) * weights) @ v[:, :, keys]
            rows.append(numerator / ((q[:, :, queries] @ k[:, :, keys].mT) * weights).sum(-1, keepdim=True))
        return torch.cat(rows, dim=2)

    def flops_per_token(self, length: int, scheme: Scheme) -> float:
        """Return the FLOPs per token of attention in one layer, without projections, at `length` tokens."""
        D = self.shape.head_dim
        if scheme.log_decay() is not None:
            # Updates and reads of two states per head, D x D and D.
            return 4.0 * self.shape.num_heads * D * (D + 1)
        # Scores and weighted values of half the keys, with scores for two sums if the scheme changes q or k.
        products = 3.0 if {"q", "k"} & scheme.acts_on else 2.0
        return products * self.shape.num_heads * D * length


class DecayAttention(NonSoftmax):
    """Attention without queries and keys: `o_i = sum_{j<=i} e^bias v_j`, with weights that do not depend on content.

    A bias that reads queries gets zeros.
    Options: `normalise`, whether the weights of each query are divided by their sum.
    """

    parts = ("v",)

    def __init__(self, shape: Shape, shared_kv: bool = False, normalise: bool = False) -> None:
        super().__init__(shape, shared_kv)
        if not isinstance(normalise, bool):
            raise ConfigError(f"scheme.attention.normalise={normalise!r} must be true or false")
        self.normalise = normalise

    def mix(
        self, parts: Mapping[str, Tensor], x: Tensor, scheme: Scheme, at: Placement, cache: KVCache | None
    ) -> Tensor:
        v = parts["v"]
        gates, pos, pos_of_keys = self.gates_and_positions(x, scheme, at, cache)
        kernel, past = self._kernel_for(scheme, at), at.past(None if cache is None else cache.rows)
        o = kernel(apply_hook(scheme, "v", v, pos_of_keys, past), gates, scheme, at, cache)
        return apply_hook(scheme, "o", o.to(v.dtype), pos, past)

    def _chunks(self, v: Tensor, gates: Any, scheme: Scheme, at: Placement, cache: KVCache | None) -> Tensor:
        (v,), log_decay = self._wide(v), scheme.log_decay()
        assert log_decay is not None
        a = sums.decay_per_head(log_decay, self.shape.num_heads, v)
        if self.normalise:
            v = torch.cat((v, torch.ones_like(v[..., :1])), dim=-1)  # the last channel sums the weights
        state = cache.state[0] if cache is not None and cache.state else None
        o, state = sums.running_sum(v, a, state)
        if cache is not None:
            cache.advance(v.shape[2])
            cache.state = (state,)
        return o[..., :-1] / o[..., -1:] if self.normalise else o

    def _quadratic(self, v: Tensor, gates: Any, scheme: Scheme, at: Placement, cache: KVCache | None) -> Tensor:
        B, H, T = len(v), self.shape.num_heads, v.shape[2]
        if cache is not None:
            v = cast(Tensor, cache.append(v)[0])
        no_queries = v.new_zeros(()).expand(B, H, T, v.shape[3])
        bias = scheme.bias(no_queries, torch.zeros_like(v), gates, at)
        (v,) = self._wide(v)
        rows = []
        for _, keys, weights in sums.weight_blocks(bias, B, H, T, v.shape[2], v, self.normalise):
            o = weights @ v[:, :, keys]
            rows.append(o / weights.sum(-1, keepdim=True) if self.normalise else o)
        return torch.cat(rows, dim=2)

    def flops_per_token(self, length: int, scheme: Scheme) -> float:
        """Return the FLOPs per token of attention in one layer, without projections, at `length` tokens."""
        # Without a decay, a query reads half of the `length` values on average.
        per_channel = 2.0 if scheme.log_decay() is not None else float(length)
        return per_channel * self.shape.num_heads * self.shape.head_dim
