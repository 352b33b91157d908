"""Compute sums over earlier tokens without a softmax, for the kinds of attention `linear` and `decay`.

    products        o_i = sum_{j<=i} exp(a (i - j)) (q_i . k_j) v_j       in linear time
    running_sum     o_i = sum_{j<=i} exp(a (i - j)) x_j                   in linear time
    weight_blocks   e^bias for blocks of queries and the keys they see, for any other bias: quadratic time

`a` is each head's log-decay, at most 0. Linear time comes from chunks (Sun et al. 2023, arXiv 2307.08621, section 2.3):
a matrix of weights covers the tokens within a chunk, and a decaying state carries all earlier ones. Callers pass at
least float32. Shapes: N chunks of L tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from posbench.schemes.base import Bias, evaluate_bias

CHUNK = 64  # tokens
BLOCK = 128  # queries


def products(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return `o_i = sum_{j<=i} exp(a (i - j)) (q_i . k_j) v_j`, with a the log-decay of the head.

    Arguments: q, k [B, H, T, D]; v [B, H, T, E]; log_decay [H], at most 0; state, which the call for earlier tokens
    returned, or None.
    Returns: the sums [B, H, T, E], and the state `sum_j exp(a (last - j)) k_j v_j^T`, [B, H, D, E].
    """

    def sum_chunks(parts: list[Tensor], state: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v = parts  # [B, H, N, L, .]: N chunks of L tokens
        # Decays between tokens of a chunk, [H, L, L], from its entry to each, and from each to its end, [H, L].
        within, from_entry, to_end = _decay_weights(log_decay, q.shape[3])
        # Each chunk adds its keys and values, decayed to its end.
        entering, state = _chunk_states((k * to_end[:, None, :, None]).mT @ v, log_decay * q.shape[3], state)
        # Tokens of the same chunk; all earlier ones are in the state.
        inside = ((q @ k.mT) * within[:, None]) @ v
        return inside + (q * from_entry[:, None, :, None]) @ entering, state

    return in_chunks(sum_chunks, [q, k, v], state)


def running_sum(x: Tensor, log_decay: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return running sums of vectors, `s_i = exp(a) s_(i-1) + x_i`, a the head's log-decay.

    Arguments: x [B, H, T, D]; log_decay [H], at most 0; state, which the call for earlier tokens returned, [B, H, 1,
    D], or None.
    Returns: the sums [B, H, T, D], and the last of them as the state.
    """

    def sum_chunks(parts: list[Tensor], state: Tensor | None) -> tuple[Tensor, Tensor]:
        (x,) = parts
        within, from_entry, _ = _decay_weights(log_decay, x.shape[3])
        inside = within[:, None] @ x
        entering, state = _chunk_states(inside[..., -1:, :], log_decay * x.shape[3], state)
        return inside + from_entry[:, None, :, None] * entering, state

    return in_chunks(sum_chunks, [x], state)


def _decay_weights(log_decay: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return exp(log_decay * distance) within a chunk of `length` = L tokens.

    Returns: from each earlier token (column) to each token (row), [H, L, L]; of earlier chunks at each token, [H, L];
    of each token after the chunk, [H, L].
    """
    row = torch.arange(length, device=log_decay.device)
    # Clamped, because exp could overflow at negative distances, although `tril` drops these entries.
    distance = (row[:, None] - row).clamp(min=0)
    within = (log_decay[:, None, None] * distance).exp().tril()
    return within, (log_decay[:, None] * (row + 1)).exp(), (log_decay[:, None] * (length - 1 - row)).exp()


def _chunk_states(added: Tensor, log_decay: Tensor, initial: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the state before each chunk, [B, H, N, ., .], and after the last: `S_(n+1) = exp(a) S_n + added_n`.

    Arguments: log_decay, a, over a whole chunk, [H]; initial, S_0, None for zeros.
    """
    first = torch.zeros_like(added[:, :, 0]) if initial is None else initial
    states = torch.cat((first[:, :, None], added), dim=2)
    # The span doubles at each step, so that many chunks take few steps.
    step = 1
    while step < states.shape[2]:
        weight = (step * log_decay).exp()[:, None, None, None]
        states = torch.cat((states[:, :, :step], states[:, :, step:] + weight * states[:, :, :-step]), dim=2)
        step *= 2
    return states[:, :, :-1], states[:, :, -1]


def in_chunks(
    sum_chunks: Callable[[list[Tensor], Tensor | None], tuple[Tensor, Tensor]],
    tensors: list[Tensor],
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Cut tensors into chunks of CHUNK tokens, apply `sum_chunks` to all whole chunks and then to the rest.

    Arguments: tensors [B, H, T, .]; sum_chunks, a function of the cut tensors [B, H, N, L, .] and the state before them
    (None at the start) that returns sums and the state after them.
    """
    T = tensors[0].shape[2]
    whole = T // CHUNK * CHUNK
    rows = []
    for begin, end, length in ((0, whole, CHUNK), (whole, T, T - whole)):
        if begin < end:
            o, state = sum_chunks([x[:, :, begin:end].unflatten(2, (-1, length)) for x in tensors], state)
            rows.append(o.flatten(2, 3))
    assert state is not None
    return rows[0] if len(rows) == 1 else torch.cat(rows, dim=2), state


def weight_blocks(
    bias: Bias | None, B: int, H: int, queries: int, keys: int, like: Tensor, relative_to_largest: bool
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield the weights `e^bias` by blocks of queries, 0 for keys after their query.

    Arguments: queries and keys, how many there are (the queries belong to the last keys); like, whose dtype and device
    to use; relative_to_largest, whether each row is divided by its largest weight.
    Yields: the slice of queries, the slice of keys, and weights [B or 1, H or 1, at most BLOCK, keys].
    """
    sequence = torch.arange(B, device=like.device)[:, None, None, None]
    head = torch.arange(H, device=like.device)[:, None, None]
    num_cached = keys - queries  # keys before the first query
    for start in range(0, queries, BLOCK):
        end = min(start + BLOCK, queries)
        i = torch.arange(start, end, device=like.device)[:, None]
        j = torch.arange(num_cached + end, device=like.device)
        log_weights = like.new_zeros(1, 1, end - start, num_cached + end)
        if bias is not None:
            log_weights = log_weights + evaluate_bias(bias, sequence, head, i, j).to(like.dtype)
        log_weights = log_weights.masked_fill(j > i + num_cached, float("-inf"))
        if relative_to_largest:
            # A normalised sum does not notice the division, and it keeps exp from overflowing.
            log_weights = log_weights - log_weights.amax(-1, keepdim=True).detach()
        yield slice(start, end), slice(0, num_cached + end), log_weights.exp()


def decay_per_head(log_decay: Tensor | float, num_heads: int, like: Tensor) -> Tensor:
    """Return `Scheme.log_decay`'s result as a tensor [H] in `like`'s dtype."""
    if isinstance(log_decay, Tensor):
        return log_decay.to(like.dtype)
    return like.new_full((num_heads,), log_decay)
