"""Softmax attention (Vaswani et al. 2017, arXiv 1706.03762): causal, and grouped-query if num_kv_heads < num_heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from posbench.attention import kernels
from posbench.attention.kernels import Scoring
from posbench.attention.kind import Kind, KVCache
from posbench.config import ConfigError
from posbench.schemes import Bias, Placement, Scheme, Shape
from posbench.schemes.base import apply_hook, evaluate_bias
from posbench.schemes.earlier import EarlierRows
from posbench.system.matmul import linear


class Softmax(Kind):
    """Softmax attention: `o_i = sum_j softmax_j<=i(q_i . k_j / sqrt(D) + bias_ij) v_j`, with keys and values cached.

    Options: `sink`, whether each head's softmax has one more learned logit, whose value is zero (gpt-oss, arXiv
    2508.10925), which starts at 0; `value_norm`, whether each value is divided by its root mean square, and a shared K
    = V then is the key before its own norm and rotation (Gemma 4); `output_gate`, `head` or `channel`: multiply the
    output of each head, or of each channel, by `sigmoid(W x)`, with x the hidden states that the projections read
    (arXiv 2505.06708). W is drawn like the model's matrices.
    """

    def __init__(
        self,
        shape: Shape,
        shared_kv: bool = False,
        sink: bool = False,
        value_norm: bool = False,
        output_gate: str | None = None,
    ) -> None:
        super().__init__(shape, shared_kv)
        for name, value in {"sink": sink, "value_norm": value_norm}.items():
            if not isinstance(value, bool):
                raise ConfigError(f"scheme.attention.{name}={value!r} must be true or false")
        if output_gate not in (None, "head", "channel"):
            raise ConfigError(f"scheme.attention.output_gate={output_gate!r} must be head, channel or null")
        self.value_norm = value_norm
        self.sink = nn.Parameter(torch.zeros(shape.num_heads)) if sink else None
        gates = shape.num_heads * (shape.head_dim if output_gate == "channel" else 1)
        self.output_gate = nn.Parameter(torch.empty(gates, shape.d_model)) if output_gate else None

    takes_qk_norm = True
    takes_windows = True

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        """Return attention [B, H, T, E] of q, k and v with position added, by `self.kernel` or else the fastest kernel.

        Arguments: those of `kernels.attend`.
        """
        if self.kernel is not None:
            return self.kernel(q, k, v, scoring)
        return kernels.attend(q, k, v, scoring, self.may_compile)

    def kernels(
        self, schemes: Sequence[Scheme], has_bias: bool, device: torch.device
    ) -> Mapping[str, Callable[..., Tensor] | None]:
        is_plain = not has_bias and self.sink is None and not any(scheme.window for scheme in schemes)
        by_name: dict[str, Callable[..., Tensor] | None] = {}
        if not has_bias:
            by_name["fused"] = kernels.attend
        if device.type == "cpu" and not is_plain:
            by_name |= {"masked": kernels.masked, "short": kernels.short}
        by_name["blocks"] = kernels.blocks
        # Uncompiled flex holds every score; on a GPU training compiles it to other code: see `posbench.verify`.
        if not is_plain and self.shape.head_dim >= kernels.FLEX_FROM:
            by_name["flex"] = kernels.flex
        return by_name

    def mix(
        self, parts: Mapping[str, Tensor], x: Tensor, scheme: Scheme, at: Placement, cache: KVCache | None
    ) -> Tensor:
        gates, pos, pos_of_keys = self.gates_and_positions(x, scheme, at, cache)
        past = at.past(None if cache is None else cache.rows)
        q = apply_hook(scheme, "q", parts["q"], pos, past)
        k, values = self._keys_and_values(parts, x, scheme, pos_of_keys, past, cache)
        dropped = 0 if cache is None else cache.filled - k.shape[2]  # keys that no query sees any more
        bias = scheme.bias(q, k, gates, at)
        reads_rows = scheme.log_decay() is None  # a bias with a log-decay reads only slopes
        # A user's scheme may widen q and k differently.
        if q.shape[-1] != k.shape[-1] or not (bias is None or callable(bias)):
            raise ConfigError(
                f"{type(scheme).__name__}.q gives {q.shape[-1]} channels and .k {k.shape[-1]}: they must be equal"
                if q.shape[-1] != k.shape[-1]
                else f"{type(scheme).__name__}.bias must return None or a function (b, h, i, j), such as "
                "lambda b, h, i, j: tensor[b, h, i, j]"
            )
        # Documents are a bias of -inf, which reads an entry per key.
        if at.documents is not None:
            num_cached = at.first_query - at.first_key  # keys before the first query
            bias = partial(_bias_within_documents, bias, at.documents, num_cached)
            reads_rows = True
        # `j` counts the cached keys; the bias counts from the first key of the input.
        if bias is not None and dropped:
            bias = partial(_bias_of_cached_keys, bias, dropped)
        scoring = Scoring(self.scale, bias, self.sink, scheme.window, reads_rows, at.documents)
        o = self.attend(q, k, values, scoring)
        o = apply_hook(scheme, "o", o, pos, past)
        if self.output_gate is None:
            return o
        shares = linear(x, self.output_gate.to(x.dtype)).sigmoid()  # [B, T, H] or [B, T, H D]
        return o * shares.unflatten(-1, (self.shape.num_heads, -1)).transpose(1, 2)

    def _keys_and_values(
        self,
        parts: Mapping[str, Tensor],
        x: Tensor,
        scheme: Scheme,
        pos: Any,
        past: EarlierRows,
        cache: KVCache | None,
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values of all visible tokens, and append the new ones to `cache`.

        Arguments: parts, k and v of the new tokens, [B, Hkv, T, D]; x, their normalised stream, [B, T, C].
        """
        # Keys and values that are equal are one tensor, cached once (kexue.fm/archives/10862).
        is_one_tensor = self.shared_kv and not self.value_norm and scheme.moves_k_and_v_alike
        k = apply_hook(scheme, "k", parts["k"], pos, past)
        if is_one_tensor:
            (k,) = self._cached(scheme, cache, k)
            return k, k
        k, v = self._cached(scheme, cache, k, apply_hook(scheme, "v", parts["v"], pos, past))
        return k, v

    def _cached(self, scheme: Scheme, cache: KVCache | None, *new: Tensor) -> tuple[Tensor, ...]:
        if cache is None:
            return new
        # A bias that reads keys may sum over keys before the window too.
        window = None if scheme.reads_keys else scheme.reach
        return cast(tuple[Tensor, ...], cache.append(*new, window=window))

    def flops_per_token(self, length: int, scheme: Scheme) -> float:
        chunk = min(length, scheme.chunk or length)
        whole_chunks, rest = divmod(length, chunk)
        # The average number of keys that a query sees, over whole chunks and the rest of the input.
        keys = (
            whole_chunks * chunk * _mean_keys(chunk, scheme.window) + rest * _mean_keys(rest, scheme.window)
        ) / length
        gates = 0 if self.output_gate is None else self.output_gate.numel()
        return 4.0 * self.shape.num_heads * self.shape.head_dim * keys + 2.0 * gates


def _mean_keys(length: int, window: int | None) -> float:
    # The first queries see fewer keys than the window.
    if length == 0:
        return 0.0
    visible = min(length, window or length)
    # Each query sees `seen` keys, except the first `seen` queries, which see half as many on average.
    return visible - visible**2 / (2 * length)


def _bias_within_documents(
    bias: Bias | None, documents: Tensor, num_cached: int, b: Tensor, h: Tensor, i: Tensor, j: Tensor
) -> Tensor:
    """Return the bias (0 if None) at sequence b, head h, query i and key j, or -inf across documents.

    Arguments: documents, the start of each key's document, [B, keys].
    """
    added = torch.zeros((), device=documents.device) if bias is None else evaluate_bias(bias, b, h, i, j)
    return torch.where(documents[b, i + num_cached] == documents[b, j], added, -float("inf"))


def _bias_of_cached_keys(bias: Bias, dropped: int, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    # Keys are counted from the first one that is still cached; `dropped` earlier ones are not.
    return evaluate_bias(bias, b, h, i, j + dropped)
