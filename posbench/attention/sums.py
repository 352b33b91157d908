"""Sums over the past without a softmax: the work of the kinds `linear` and `decay`.

    products        o_i = sum_{j<=i} exp(a (i - j)) (q_i . k_j) v_j       in linear time
    running_sum     o_i = sum_{j<=i} exp(a (i - j)) x_j                   in linear time
    weight_blocks   e^bias of some queries and the keys they may see, for biases that cannot be split: quadratic

`a` is each head's log-decay, at most 0. In chunks (Sun et al. 2023, arXiv 2307.08621, section 2.3): within one by a
matrix of weights, from those before by a state that fades. Every exponential is of `a` times a distance, so the
strongest decay underflows to 0 and nothing overflows, where powers `exp(-a j)` would.

All compute in the dtype they get: callers give at least float32. Shapes: N chunks of L tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from posbench.schemes.base import Bias, evaluate_bias

CHUNK = 64  # tokens
BLOCK = 128  # queries


def products(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Values weighted by unnormalised products of queries and keys, and by distance.

    Arguments: q, k [B, H, T, D]; v [B, H, T, E]; log_decay [H]; state, what an earlier call gave back for the tokens
    before these, None where there are none.
    Returns: [B, H, T, E], and `sum_j exp(a (last - j)) k_j v_j^T`, [B, H, D, E].
    """

    def of_chunks(parts: list[Tensor], state: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v = parts  # [B, H, N, L, .]
        within, since_before, until_last = _fading(log_decay, q.shape[3])
        entering, state = _states((k * until_last[:, None, :, None]).mT @ v, log_decay * q.shape[3], state)
        inside = ((q @ k.mT) * within[:, None]) @ v
        return inside + (q * since_before[:, None, :, None]) @ entering, state

    return _in_chunks(of_chunks, [q, k, v], state)


def running_sum(x: Tensor, log_decay: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """A sum of vectors that fade with distance: `s_i = exp(a) s_(i-1) + x_i`.

    Arguments: x [B, H, T, D]; log_decay [H]; state, as above, [B, H, 1, D].
    Returns: [B, H, T, D], and the last of them.
    """

    def of_chunks(parts: list[Tensor], state: Tensor | None) -> tuple[Tensor, Tensor]:
        (x,) = parts
        within, since_before, _ = _fading(log_decay, x.shape[3])
        inside = within[:, None] @ x
        entering, state = _states(inside[..., -1:, :], log_decay * x.shape[3], state)
        return inside + since_before[:, None, :, None] * entering, state

    return _in_chunks(of_chunks, [x], state)


def _fading(log_decay: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Weights in a chunk: of earlier rows for each, [H, L, L]; since the chunk before, until the last row, [H, L]."""
    row = torch.arange(length, device=log_decay.device)
    distance = (row[:, None] - row).clamp(min=0)
    within = (log_decay[:, None, None] * distance).exp().tril()
    return within, (log_decay[:, None] * (row + 1)).exp(), (log_decay[:, None] * (length - 1 - row)).exp()


def _states(added: Tensor, log_decay: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
    """The state that enters each chunk, and the one behind the last: `S_(n+1) = exp(a) S_n + added_n`, S_0 = before.

    By doubling, so that many chunks take few steps. Arguments: added [B, H, N, ., .]; log_decay, of a chunk, [H].
    """
    first = torch.zeros_like(added[:, :, 0]) if before is None else before
    states = torch.cat((first[:, :, None], added), dim=2)
    step = 1
    while step < states.shape[2]:
        weight = (step * log_decay).exp()[:, None, None, None]
        states = torch.cat((states[:, :, :step], states[:, :, step:] + weight * states[:, :, :-step]), dim=2)
        step *= 2
    return states[:, :, :-1], states[:, :, -1]


def _in_chunks(
    of_chunks: Callable[[list[Tensor], Tensor | None], tuple[Tensor, Tensor]],
    tensors: list[Tensor],
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """All whole chunks at once, then what is left as one shorter chunk. Tensors [B, H, T, .]."""
    T = tensors[0].shape[2]
    whole = T // CHUNK * CHUNK
    rows = []
    for begin, end, length in ((0, whole, CHUNK), (whole, T, T - whole)):
        if begin < end:
            o, state = of_chunks([x[:, :, begin:end].unflatten(2, (-1, length)) for x in tensors], state)
            rows.append(o.flatten(2, 3))
    assert state is not None
    return rows[0] if len(rows) == 1 else torch.cat(rows, dim=2), state


def weight_blocks(
    bias: Bias | None, B: int, H: int, queries: int, keys: int, like: Tensor, relative_to_largest: bool
) -> Iterator[tuple[slice, slice, Tensor]]:
    """`e^bias` by blocks of queries, 0 where a key comes after its query.

    Arguments: queries, how many: those of the last `keys`; like, a tensor for dtype and device; relative_to_largest,
    whether each row is divided by its largest weight: what is normalised does not feel it, and exp never overflows.
    Yields: rows of queries, rows of keys, and weights [B or 1, H or 1, at most BLOCK, keys].
    """
    sequence = torch.arange(B, device=like.device)[:, None, None, None]
    head = torch.arange(H, device=like.device)[:, None, None]
    before = keys - queries
    for start in range(0, queries, BLOCK):
        end = min(start + BLOCK, queries)
        i = torch.arange(start, end, device=like.device)[:, None]
        j = torch.arange(before + end, device=like.device)
        log_weights = like.new_zeros(1, 1, end - start, before + end)
        if bias is not None:
            log_weights = log_weights + evaluate_bias(bias, sequence, head, i, j).to(like.dtype)
        log_weights = log_weights.masked_fill(j > i + before, float("-inf"))
        if relative_to_largest:
            log_weights = log_weights - log_weights.amax(-1, keepdim=True).detach()
        yield slice(start, end), slice(0, before + end), log_weights.exp()


def heads_of(log_decay: Tensor | float, num_heads: int, like: Tensor) -> Tensor:
    """What `Scheme.log_decay` gave, for each head, [H]."""
    if isinstance(log_decay, Tensor):
        return log_decay.to(like.dtype)
    return like.new_full((num_heads,), log_decay)
