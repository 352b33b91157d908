"""Linear attention with positions (Katharopoulos et al. 2020, arXiv 2006.16236; RoFormer, arXiv 2104.09864, eq. 19).

    o_i = sum_{j<=i} (R phi(q_i) . R phi(k_j)) e^bias v_j / sum_{j<=i} phi(q_i) . phi(k_j) e^bias,  phi(x) = elu(x) + 1

A scheme's hooks rotate behind phi and in the numerator alone: the denominator stays positive. In linear time and with a
state of fixed size where the scheme knows its bias as a decay of each head (`Scheme.log_decay`; none is a decay of 0),
so ALiBi here is retention's decay; quadratic, with all rows kept, under any other bias.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from posbench.attention import sums
from posbench.attention.kind import Kind, KVCache
from posbench.schemes import Placement, Scheme


def features(x: Tensor) -> Tensor:
    """`elu(x) + 1`, which as a sum is exactly 0 in bfloat16 below -8; unclamped its gradient at large x is NaN."""
    return torch.where(x >= 0, x + 1, x.clamp(max=0).exp())


class Linear(Kind):
    """Linear attention; sums in at least float32."""

    has_keys = False

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
        assert q is not None and k is not None
        q, k = features(q), features(k)
        gates, pos, pos_of_keys = self.placed(x, scheme, at, cache)
        in_chunks = scheme.log_decay() is not None and at.positions is None
        kernel = self.kernel or (self._chunks if in_chunks else self._quadratic)
        turned_q, turned_k = scheme.q(q, pos), scheme.k(k, pos_of_keys)
        o = kernel((q, turned_q), (k, turned_k), scheme.v(v, pos_of_keys), gates, scheme, at, cache)
        return scheme.o(o.to(v.dtype), pos)

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
        """In linear time. qs [B, H, T, .], ks [B, Hkv, T, .]: as the denominator has them, and behind their hooks."""
        (q, turned_q), (k, turned_k), v = self._wide(qs), self._wide(ks), self._wide((v,))[0]
        log_decay = scheme.log_decay()
        assert log_decay is not None
        a = sums.heads_of(log_decay, self.shape.num_heads, q)
        state, total = cache.state if cache is not None and cache.state else (None, None)
        above, state = sums.products(turned_q, turned_k, v, a, state)
        totals, total = sums.running_sum(k, a, total)
        if cache is not None:
            cache.advance(q.shape[2])
            cache.state = (state, total)
        return above / (q * totals).sum(-1, keepdim=True)

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
        """The same under any bias, by blocks of queries."""
        k, turned_k = ks[0], None if ks[1] is ks[0] else ks[1]  # one is kept where they are one
        if cache is not None:
            k, turned_k, v = cast(tuple[Tensor, Tensor | None, Tensor], cache.extended(k, turned_k, v))
        bias = scheme.bias(qs[1], k if turned_k is None else turned_k, gates, at)
        (q, turned_q), v = self._wide(qs), self._wide((v,))[0]
        k, turned_k = self._wide((k, k if turned_k is None else turned_k))
        rows = []
        blocks = sums.weight_blocks(bias, len(q), q.shape[1], q.shape[2], k.shape[2], q, relative_to_largest=True)
        for queries, keys, weights in blocks:
            above = ((turned_q[:, :, queries] @ turned_k[:, :, keys].mT) * weights) @ v[:, :, keys]
            rows.append(above / ((q[:, :, queries] @ k[:, :, keys].mT) * weights).sum(-1, keepdim=True))
        return torch.cat(rows, dim=2)

    def _wide(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """In at least float32, one for each query head."""
        H = self.shape.num_heads
        return tuple(
            x.to(torch.promote_types(x.dtype, torch.float32)).repeat_interleave(H // x.shape[1], dim=1) for x in tensors
        )

    def flops_per_token(self, length: int, scheme: Scheme) -> float:
        """In linear time a state is written and read, D x D and D; otherwise as softmax, with scores for each sum."""
        D = self.shape.head_dim
        if scheme.log_decay() is not None:
            return 4.0 * self.shape.num_heads * D * (D + 1)
        return (3.0 if {"q", "k"} & scheme.acts_on else 2.0) * self.shape.num_heads * D * length
