"""Compute causal softmax attention by one of five kernels, which give equal results; `attend` picks the fastest.

    short    blocks of queries against the keys before them, with a gradient written here: any bias. It keeps all
             weights, so it serves short windows, in training on CPUs.
    fused    PyTorch's scaled_dot_product_attention: no bias, any length, no T x T tensor in memory
    blocks   blocks of queries against the keys before them: any bias, memory linear in T. Compiled on CPUs, it is also
             fast at short contexts.
    masked   blocks of queries on the fused kernel with the bias as its mask, on CPUs: any bias. On Intel's processors
             it is the fastest in float32 at short contexts, unless the bias is learned.
    flex     FlexAttention with the bias as its score function: any bias on CUDA, compiled

All take q [B, H, T, D], k [B, Hkv, T, D] and v [B, Hkv, T, E], H being a multiple of Hkv, and return [B, H, T, E].
`blocks` and `masked` also take more keys than queries; the queries then belong to the last keys.

A sink needs no special kernel: with l, the log-sum-exp of a row of scores, the output without a sink times
sigmoid(l - sink) is the output with it. A block of queries reads only keys that one of its queries sees, so time is
linear in the window.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from posbench.schemes.base import Bias, evaluate_bias
from posbench.system.matmul import IS_INTEL
from posbench.system.plain import is_plain
from posbench.system.torch_internals import allow_recompiles, attention_with_logsumexp

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# These were measured on 2 CPU cores, see docs/internals/speed.md.
BLOCK = 128  # queries per block
MASKED_CELLS = 1 << 20  # mask entries in memory at a time, per head
TILE = 128  # rows and columns of FlexAttention's tiles of scores, its default
FLEX_FROM = 16  # channels per head, the fewest that FlexAttention takes
# Tokens above which the CPU's fused kernel is faster than compiled blocks, and than `short` (which has a limit of its
# own). It multiplies by MKL, which is slow on AMD's processors.
FUSED_ABOVE, SHORT_UP_TO = (32, 32) if IS_INTEL else (512, 1 << 20)
MASKED_UP_TO = 512  # tokens
SHORT_BLOCK = 64  # queries per block of `short`, small because scores above the diagonal are wasted work
SHORT_CELLS = 1 << 24  # weights that `short` keeps per layer for its gradient at most, 64 MB in float32
CUDA_SCORES = 1 << 27  # scores of an uncompiled block on a GPU, 512 MB in float32, held a few times over
SCHEMES_A_PROCESS = 256  # schemes with compiled attention in one process; torch raises beyond it (its default is 8)
COMPILED_FROM = 1024  # shortest window, in tokens, for which inference on a GPU compiles FlexAttention


class Scoring(NamedTuple):
    """The parts of softmax scores besides q . k, and which keys are hidden."""

    scale: float  # multiplies q . k
    bias: Bias | None = None  # a function (b, h, i, j) of sequence, head, query row and key row, added to the scores
    sink: Tensor | None = None  # one more logit in each head's softmax, whose value is 0, [H] (arXiv 2508.10925)
    window: int | None = None  # keys that a query sees, including its own; None means all earlier keys
    reads_rows: bool = True  # whether the bias reads tensors with an entry per query or key
    first: Tensor | None = None  # the first key that each query sees, if the bias hides earlier ones, [B, T]


def scale_by_sink(o: Tensor, logsumexp: Tensor, sink: Tensor) -> Tensor:
    """Scale attention outputs as if each head's softmax had one more logit, a sink, whose value is zero.

    Arguments: o [B, H, T, E]; logsumexp, of each query's scores, [B, H, T]; sink, [H].
    """
    return o * (logsumexp - sink[:, None].to(logsumexp.dtype)).sigmoid().to(o.dtype)[..., None]


def fused(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    """Return causal softmax attention [B, H, T, E] by the device's fused kernel, without a bias or a window."""
    groups = q.shape[1] // k.shape[1]
    if q.is_cuda and groups > 1 and q.dtype not in (torch.bfloat16, torch.float16):
        # The float32 kernels do not support grouped queries: torch would fall back to one that holds every score.
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    return _fused_kernel(q, k, v, None, scoring)


def _fused_kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scoring: Scoring) -> Tensor:
    """Return softmax attention [B, H, T, E] by PyTorch's fused kernel, causal or with a mask to add to the scores."""
    # The kernel needs q, k and v of one width; channels of zeros change nothing.
    width = max(q.shape[-1], v.shape[-1])
    value_width = v.shape[-1]
    q, k, v = (x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
    if scoring.sink is None:
        is_grouped = q.shape[1] != k.shape[1]
        o = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, scale=scoring.scale, enable_gqa=is_grouped
        )
    else:
        # A sink needs the CPU kernel that also returns the log-sum-exp, which has no gradient.
        o, logsumexp = attention_with_logsumexp(q, k, v, mask, scoring.scale)
        o = scale_by_sink(o, logsumexp, scoring.sink)
    return o if value_width == width else o[..., :value_width]


def blocks(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, block: int = BLOCK) -> Tensor:
    """Return causal softmax attention [B, H, T, E], by blocks of queries with scores in float32 (float64 if q is).

    Without a gradient, memory holds at most [B, H, block, T] scores at a time.
    Arguments: block, queries per block.
    """
    B, H, T = q.shape[:3]
    scale, bias, sink, window, *_ = scoring
    num_cached = k.shape[2] - T  # keys before the first query
    groups = H // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    # Make these contiguous before slicing: torch 2.13 miscompiles transposed copies of several bf16 slices on CPUs.
    k_t = k.transpose(-2, -1).contiguous()
    v = v.contiguous()
    dtype = torch.promote_types(q.dtype, torch.float32)
    sequence, head = _sequence_and_head(B, H, q.device)
    out = []
    for start in range(0, T, block):
        end = min(start + block, T)
        keys = _key_range(num_cached + start, num_cached + end, num_cached + T, block, window)
        i = torch.arange(start, end, device=q.device)[:, None]
        j = torch.arange(keys.start, keys.stop, device=q.device)[None, :]
        scores = (q[:, :, start:end] @ k_t[..., keys]).to(dtype) * scale
        if bias is not None:
            scores = scores + evaluate_bias(bias, sequence, head, i, j).to(dtype)
        scores = scores.masked_fill(_is_hidden(i + num_cached, j, window), float("-inf"))
        o = scores.softmax(-1).to(v.dtype) @ v[:, :, keys]
        out.append(o if sink is None else scale_by_sink(o, scores.logsumexp(-1), sink))
    return torch.cat(out, dim=2)


def short(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    """Return causal softmax attention [B, H, T, E], which keeps all weights for the gradient: for short windows."""
    B, H, T = q.shape[:3]
    scale, bias, sink, window, *_ = scoring
    groups = H // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    o_dtype = q.dtype
    dtype = torch.promote_types(q.dtype, torch.float32)
    # The masks first, outside the autograd function, so that gradients of a learned bias pass through them.
    masks = []
    for start in range(0, T, SHORT_BLOCK):
        end = min(start + SHORT_BLOCK, T)
        first_key = 0 if window is None else max(0, start + 1 - window)  # that any query of the block sees
        mask = _causal_mask(start, end, first_key, window, dtype, q.device)
        if bias is not None:
            i = torch.arange(start, end, device=q.device)[:, None]
            j = torch.arange(first_key, end, device=q.device)[None, :]
            mask = evaluate_bias(bias, *_sequence_and_head(B, H, q.device), i, j).to(dtype) + mask
        masks.append(mask)
    # Batched over B * H, for `torch.bmm`.
    q, k, v = (q.to(dtype) * scale).flatten(0, 1), k.to(dtype).flatten(0, 1), v.to(dtype).flatten(0, 1)
    o, logsumexp = _Short.apply(q, k, v, H, sink is not None, *masks)
    o = o.unflatten(0, (B, H))
    return (o if sink is None else scale_by_sink(o, logsumexp.unflatten(0, (B, H)), sink)).to(o_dtype)


@functools.lru_cache(maxsize=64)
def _causal_mask(
    start: int, end: int, first: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    i, j = torch.arange(start, end, device=device)[:, None], torch.arange(first, end, device=device)
    return torch.zeros((end - start, end - first), dtype=dtype, device=device).masked_fill(
        _is_hidden(i, j, window), -float("inf")
    )


def _is_hidden(i: Tensor, j: Tensor, window: int | None) -> Tensor:
    return j > i if window is None else (j > i) | (j <= i - window)


class _Short(torch.autograd.Function):
    """The function o = P v with P = softmax(q k' + mask), computed by blocks of queries, with its gradient.

    q is scaled already. A mask is [rows, keys], [H, rows, keys] or [B, H, rows, keys]. With g the gradient of o and h
    the gradient of l, the log-sum-exp of the scores: dv = P' g; the scores have dS = P (g v' - sum(g o) + h), so dq =
    dS k and dk = dS' q.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, heads: int, with_sum: bool, *masks: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        o = q.new_empty(*q.shape[:2], v.shape[-1])
        k_t = k.transpose(1, 2)
        start, block_weights, logsumexps = 0, [], []
        for mask in masks:
            end = start + mask.shape[-2]
            keys = slice(end - mask.shape[-1], end)  # a block's keys end with its last query
            weights = torch.bmm(q[:, start:end], k_t[..., keys])  # scores, until the softmax below
            weights.unflatten(0, (-1, heads)).add_(mask)
            if with_sum:
                logsumexps.append(weights.logsumexp(-1))
            # In place: the scores are not needed again.
            torch.softmax(weights, -1, out=weights)
            torch.bmm(weights, v[:, keys], out=o[:, start:end])
            block_weights.append(weights)
            start = end
        ctx.save_for_backward(q, k, v, o, *block_weights)
        ctx.heads, ctx.shapes = heads, [mask.shape for mask in masks]
        return o, torch.cat(logsumexps, dim=1) if with_sum else None

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, *block_weights = ctx.saved_tensors
        g = gradients[0].contiguous()
        dq, dk, dv, dmasks = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v), []
        v_t = v.transpose(1, 2)
        # The part of dS / P that is one number a query: h - sum(g o).
        row_terms = -(g * o).sum(-1, keepdim=True)
        if gradients[1] is not None:
            row_terms += gradients[1][..., None]
        start = 0
        for n, (weights, shape) in enumerate(zip(block_weights, ctx.shapes, strict=True)):
            end = start + weights.shape[-2]
            keys = slice(end - weights.shape[-1], end)
            g_block = g[:, start:end]
            dv[:, keys] += torch.bmm(weights.transpose(1, 2), g_block)
            dscores = torch.baddbmm(row_terms[:, start:end], g_block, v_t[..., keys]).mul_(weights)
            torch.bmm(dscores, k[:, keys], out=dq[:, start:end])
            dk[:, keys] += torch.bmm(dscores.transpose(1, 2), q[:, start:end])
            # Masks follow the five inputs q, k, v, heads, with_sum; one that only hides keys needs no gradient.
            is_learned = ctx.needs_input_grad[5 + n]
            dmasks.append(dscores.unflatten(0, (-1, ctx.heads)).sum_to_size(shape) if is_learned else None)
            start = end
        return dq, dk, dv, None, None, *dmasks


def _sequence_and_head(B: int, H: int, device: torch.device) -> tuple[Tensor, Tensor]:
    # h without a dimension for sequences: a bias that ignores b then gives [H, T, T].
    return torch.arange(B, device=device)[:, None, None, None], torch.arange(H, device=device)[:, None, None]


def _key_range(start: int, end: int, length: int, block: int, window: int | None) -> slice:
    """Return the rows of the keys that a block of queries reads; some may be after its last query.

    Arguments: start and end, the rows of the keys at the block's queries; length, of all keys; block, queries per
    block.
    """
    if window is not None:
        return slice(max(0, start + 1 - window), end)
    # Round up to one of 16 sizes. If each block needed a little more memory than the previous one, the allocator could
    # not reuse any freed block, and memory would grow with the square of the length. At most a sixteenth more is
    # computed.
    grid = block * -(-length // (16 * block))
    return slice(0, min(length, -(-end // grid) * grid))


def masked(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, cells: int = MASKED_CELLS) -> Tensor:
    """Return causal softmax attention [B, H, T, E] by the CPU's fused kernel, with the bias as its mask.

    Without a gradient, memory holds at most H x `cells` mask entries at a time, and B times as much if the bias differs
    by sequence.
    """
    # The kernel's log-sum-exp has no gradient, and the sink needs one.
    if scoring.sink is not None and torch.is_grad_enabled():
        return blocks(q, k, v, scoring)
    bias, window = scoring.bias, scoring.window
    B, H, T = q.shape[:3]
    num_cached = k.shape[2] - T  # keys before the first query
    sequence, head = _sequence_and_head(B, H, q.device)
    dtype = torch.promote_types(q.dtype, torch.float32)
    num_keys, most = k.shape[2], T
    if window is not None:
        # Blocks are about as long as the window, so one reads about two windows of keys.
        num_keys, most = min(num_keys, 2 * window), max(window, BLOCK)
    block = max(16, min(T, most, cells // num_keys))
    # Allocate the result once: a list of parts would leave gaps between the masks, too small for the next mask.
    out = q.new_empty(B, H, T, v.shape[-1])
    for start in range(0, T, block):
        end = min(start + block, T)
        keys = _key_range(num_cached + start, num_cached + end, num_cached + T, block, window)
        i = torch.arange(start, end, device=q.device)[:, None]
        j = torch.arange(keys.start, keys.stop, device=q.device)[None, :]
        zero = torch.zeros(1, 1, *torch.broadcast_shapes(i.shape, j.shape), dtype=dtype, device=q.device)
        added = zero.expand(1, H, -1, -1)
        if bias is not None:
            added = zero + evaluate_bias(bias, sequence, head, i, j).to(dtype)
        mask = added.masked_fill(_is_hidden(i + num_cached, j, window), float("-inf"))
        out[:, :, start:end] = _fused_kernel(q[:, :, start:end], k[:, :, keys], v[:, :, keys], mask, scoring)
    return out


def causal_tiles(length: int, device: torch.device) -> BlockMask:
    """Return FlexAttention's causal block mask for `length` tokens: the tiles of scores to compute."""
    from torch.nn.attention.flex_attention import BlockMask

    # PyTorch's `create_block_mask` tests every pair of tokens to find the tiles; writing them down takes two small
    # kernels.
    n = -(-length // TILE)
    # Tiles on the diagonal, and all tiles of a last row that is not full, are masked entry by entry; tiles left of the
    # diagonal are computed whole.
    row = torch.arange(n, dtype=torch.int32, device=device)
    is_ragged = min(length % TILE, 1)  # 1 if the last row is not full
    last = (row == n - 1).int() * is_ragged
    from_diagonal = (row[:, None] + row) % n  # row r lists r, r + 1, ...
    # Masked and whole tiles of each row of queries, then masked and whole tiles of each column of keys.
    counts = (1 + last * (n - 1), row * (1 - last), 1 + is_ragged - last, n - 1 - row - is_ragged + last)
    masked_keys = torch.where(last[:, None] == 1, row, from_diagonal)
    masked_queries = torch.where(row == 1, n - 1, from_diagonal)
    indices = (masked_keys, row.expand(n, n), masked_queries, (from_diagonal + 1) % n)
    count, index = (torch.stack(lists).to(torch.int32)[:, None, None] for lists in (counts, indices))
    return BlockMask(
        seq_lengths=(length, length),
        kv_num_blocks=count[0],
        kv_indices=index[0],
        full_kv_num_blocks=count[1],
        full_kv_indices=index[1],
        q_num_blocks=count[2],
        q_indices=index[2],
        full_q_num_blocks=count[3],
        full_q_indices=index[3],
        BLOCK_SIZE=(TILE, TILE),
        mask_mod=_is_visible,
    )


def _is_visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def windowed_tiles(length: int, window: int | None, first: Tensor | None, device: torch.device) -> BlockMask:
    """Return FlexAttention's block mask for sliding windows or separate documents.

    Arguments: first, the first key that each query sees, [B, T], or None.
    """
    from torch.nn.attention.flex_attention import BlockMask

    n = -(-length // TILE)
    row = torch.arange(n, dtype=torch.int32, device=device)
    # The first tile that any query of each row of tiles sees. All tiles from there are masked score by score.
    begin, is_visible = row.new_zeros(1, 1), _is_visible
    if window is not None:
        begin = (row * TILE + 1 - window).clamp(min=0)[None] // TILE

        def is_visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (i >= j) & (j > i - window)

    if first is not None:
        # A later query of a tile sees no earlier key than the tile's first query.
        begin = torch.maximum(begin, first[:, ::TILE].int() // TILE)  # [1 or B, n]
    # How many tiles each row reads, and their numbers: begin, begin + 1, ...
    return BlockMask.from_kv_blocks(
        (row - begin + 1)[:, None].int(),
        ((begin[..., None] + row) % n)[:, None].int(),
        BLOCK_SIZE=TILE,
        mask_mod=is_visible,
        seq_lengths=(length, length),
    )


def flex(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    """Return causal softmax attention [B, H, T, E] by FlexAttention. On CUDA, callers compile this function."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    scale, bias, sink, window, reads_rows, first = scoring

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        assert bias is not None
        return s + bias(b, h, i, j).to(s.dtype)  # in float32, which slopes times positions need

    T = q.shape[2]
    if window is None and first is None:
        tiles = causal_tiles(T, q.device)
    else:
        tiles = windowed_tiles(T, window, first, q.device)
    result: Any = flex_attention(
        q,
        k,
        v,
        score_mod=None if bias is None else score,
        block_mask=tiles,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        kernel_options=cast(Any, kernel_options(q, reads_rows and bias is not None)),
        return_aux=None if sink is None else AuxRequest(lse=True),
    )
    return result if sink is None else scale_by_sink(result[0], result[1].lse, sink)


def kernel_options(q: Tensor, reads_rows: bool) -> dict[str, int]:
    """Return options by which FlexAttention prefetches fewer tiles, or {} if its default fits in shared memory.

    Arguments: reads_rows, as in `Scoring`.
    """
    # A kernel also prefetches what a bias reads at (query, key), one float32 tile per stage. On an H200, which has
    # 232,448 bytes of shared memory, the default of three stages then needs 245,760 bytes forward at 64 channels and
    # 233,472 backward at 128; two stages need at most 147,456. A bias that reads only one number per head (ALiBi's
    # slopes) prefetches no tile, and float32 fits because its tiles are smaller.
    if not reads_rows or q.dtype == torch.float32:
        return {}
    return {"fwd_num_stages": 2} if q.shape[3] <= 64 else {"fwd_num_stages": 2, "bwd_num_stages": 2}


@functools.cache
def _compiled_flex() -> Callable[..., Tensor]:
    # Dynamic shapes: one kernel per scheme serves all lengths, in any order.
    allow_recompiles(SCHEMES_A_PROCESS)
    return torch.compile(flex, dynamic=True, fullgraph=True)


def attend(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, may_compile: bool = False) -> Tensor:
    """Return causal softmax attention [B, H, T, E] in q's dtype by the fastest kernel of this file for `scoring`.

    Arguments: q [B, H, T, D]; k [B, Hkv, T, D] and v [B, Hkv, T, E], or more than T rows if keys before the first query
    are cached; may_compile, whether long windows may compile their attention on CUDA although the calling code is not
    compiled.
    """
    compiling = torch.compiler.is_compiling()
    T, num_keys = q.shape[2], k.shape[2]
    if scoring.window is not None and scoring.window >= num_keys:
        scoring = scoring._replace(window=None)  # it hides nothing, and the fused kernels then apply
    if is_plain():  # torch would call a fused kernel for one run of a stack after the other
        return blocks(q, k, v, scoring)
    if q.is_cuda:
        return _attend_on_cuda(q, k, v, scoring, may_compile or compiling)
    if num_keys > T:
        return masked(q, k, v, scoring)
    has_mask = scoring.bias is not None or scoring.window is not None
    if has_mask and _trains_masked(q, scoring, compiling):
        return masked(q, k, v, scoring)
    if compiling:
        is_fused = not has_mask and scoring.sink is None and T > FUSED_ABOVE
        return fused(q, k, v, scoring) if is_fused else blocks(q, k, v, scoring)
    # A sink needs the log-sum-exp, whose gradient the fused kernel does not give.
    is_fused = not has_mask and (scoring.sink is None or not torch.is_grad_enabled())
    if is_fused and T > SHORT_UP_TO:
        return fused(q, k, v, scoring)
    if torch.is_grad_enabled() and q.dtype != torch.bfloat16 and _kept_weights(q, scoring.window) <= SHORT_CELLS:
        return short(q, k, v, scoring)
    if is_fused:
        return fused(q, k, v, scoring)
    return masked(q, k, v, scoring) if has_mask else blocks(q, k, v, scoring)


def _trains_masked(q: Tensor, scoring: Scoring, compiling: bool) -> bool:
    """Return whether `masked` was measured to be the fastest kernel in training."""
    B, H, T, _ = q.shape
    is_measured = IS_INTEL and q.dtype == torch.float32 and FUSED_ABOVE < T <= MASKED_UP_TO
    # The fused kernel has no gradient of its log-sum-exp, which a sink needs. Not compiled, `short` suits windows.
    if not is_measured or scoring.sink is not None or (scoring.window is not None and not compiling):
        return False
    if scoring.bias is None:
        return True
    origin = torch.zeros(1, 1, dtype=torch.long, device=q.device)
    added = evaluate_bias(scoring.bias, *_sequence_and_head(B, H, q.device), origin, origin)
    # With a mask that needs a gradient torch takes a slow kernel; one for each sequence would be large.
    return not added.requires_grad and (added.ndim < 4 or len(added) == 1)


def _kept_weights(q: Tensor, window: int | None) -> int:
    """Return how many weights `short` would keep for its gradient."""
    B, H, T, _ = q.shape
    keys = T if window is None else min(T, window + SHORT_BLOCK)
    return B * H * T * keys


def _attend_on_cuda(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, compiles: bool) -> Tensor:
    """Return causal softmax attention [B, H, T, E] on a GPU, if possible without holding all scores at once.

    Arguments: compiles, whether attention may run compiled.
    """
    B, H, T, D = q.shape
    num_keys, window = k.shape[2], scoring.window
    is_only_causal = scoring.bias is None and scoring.sink is None and window is None
    if num_keys == T and is_only_causal:
        return fused(q, k, v, scoring)
    # Uncompiled FlexAttention would hold all scores.
    if num_keys == T and compiles and D >= FLEX_FROM:
        if torch.compiler.is_compiling():
            return flex(q, k, v, scoring)
        if T >= COMPILED_FROM and not torch.is_grad_enabled():
            return _compiled_flex()(q, k, v, scoring)
    if torch.is_grad_enabled():
        return blocks(q, k, v, scoring)
    # Use few, large blocks, because each costs a dozen kernel launches.
    most = T if window is None else max(window, BLOCK)
    block = max(BLOCK, min(T, most, CUDA_SCORES // (B * H * num_keys)))
    return blocks(q, k, v, scoring, block=block)
