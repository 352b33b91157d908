"""Kernels of causal softmax attention: five that give the same numbers, picked by what the scheme needs and the device.

    short    query blocks against their key prefixes, with a gradient of its own: any bias; it keeps the weights of all
             pairs, so it is for short windows, in training on CPUs
    fused    PyTorch's scaled_dot_product_attention: no bias, any length, nothing T x T in memory
    blocks   query blocks against their key prefixes: any bias, memory linear in T; compiled, on CPUs, also the
             fastest at short contexts
    masked   query blocks on the fused kernel with the bias as its mask: any bias, on CPUs where nothing is compiled
    flex     FlexAttention with the bias as its score function: any bias on CUDA, compiled

All take q [B, H, T, D], k [B, Hkv, T, D] and v [B, Hkv, T, E] with H a multiple of Hkv, and give [B, H, T, E]. `scale`
multiplies q . k; `bias` is a function (b, h, i, j) of sequence, head, query row and key row (`Scheme.bias`). `blocks`
and `masked` also take more keys than queries: the queries are then those of the last positions.

`sink`, [H], is a logit in the softmax of each head whose value is zero (gpt-oss, arXiv 2508.10925). It needs no kernel
of its own: with l, the logarithm of the sum of a row's exponentials, the output is that without a sink times
sigmoid(l - sink).

`window` is how many keys a query sees, its own among them; None: all before it. A block of queries reads the keys that
one of them sees, so that time is linear in the window.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from posbench.schemes.base import Bias, evaluate_bias

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# Measured on 2 CPU cores, see docs/internals/speed.md.
BLOCK = 128  # queries a block
MASKED_CELLS = 1 << 20  # of the mask that stands in memory at a time, for each head
TILE = 128  # rows and columns of FlexAttention's tiles of scores, its own size
FLEX_FROM = 16  # channels a head, the least that FlexAttention takes
FUSED_ABOVE = 512  # tokens from which the CPU's fused kernel is faster than compiled blocks
SHORT_BLOCK = 64  # queries a block of `short`: few scores above the diagonal are computed in vain
SHORT_CELLS = 1 << 24  # weights of `short` that one layer keeps for its gradient, 64 MB in float32
CUDA_SCORES = 1 << 27  # of a block, 512 MB in float32, that stand in a GPU's memory a few times over, uncompiled
SCHEMES_A_PROCESS = 256  # whose attention is compiled: beyond it torch raises (its own limit is 8)
COMPILED_FROM = 1024  # tokens of a window from which reading without a gradient compiles FlexAttention, on a GPU


def beside_sink(o: Tensor, logsumexp: Tensor, sink: Tensor) -> Tensor:
    """Outputs [B, H, T, E] as they are where a row's weights, of this log-sum-exp [B, H, T], share with the sink."""
    return o * (logsumexp - sink[:, None].to(logsumexp.dtype)).sigmoid().to(o.dtype)[..., None]


def fused(q: Tensor, k: Tensor, v: Tensor, scale: float, sink: Tensor | None = None) -> Tensor:
    """The fused kernel of the device, for schemes without a bias."""
    groups = q.shape[1] // k.shape[1]
    if q.is_cuda and groups > 1 and q.dtype not in (torch.bfloat16, torch.float16):
        # Kernels for float32 know no grouped queries: every score would stand in memory.
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    return _fused_kernel(q, k, v, None, scale, sink)


def _fused_kernel(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, sink: Tensor | None = None
) -> Tensor:
    """PyTorch's kernel, causal where there is no mask. It wants q, k and v of one width: zeros change nothing.

    With a sink that of CPUs, whose log-sum-exp has no gradient.
    """
    width = max(q.shape[-1], v.shape[-1])
    narrow = v.shape[-1]
    q, k, v = (x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
    if sink is None:
        o = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    else:
        of_cpus = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        o, logsumexp = of_cpus(q, k, v, 0.0, mask is None, attn_mask=mask, scale=scale)
        o = beside_sink(o, logsumexp, sink)
    return o if narrow == width else o[..., :narrow]


def blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias | None,
    scale: float,
    sink: Tensor | None = None,
    window: int | None = None,
    block: int = BLOCK,
) -> Tensor:
    """Query blocks against the keys they may see; bias and softmax in float32 (float64 where q is).

    At most [B, H, block, T] stands in memory at a time (when no gradient is wanted).
    """
    B, H, T = q.shape[:3]
    before = k.shape[2] - T
    groups = H // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    # Contiguous before slicing: torch 2.13 miscompiles transposed copies of several bf16 slices on CPUs.
    k_t = k.transpose(-2, -1).contiguous()
    v = v.contiguous()
    dtype = torch.promote_types(q.dtype, torch.float32)
    sequence, head = _sequences_and_heads(B, H, q.device)
    out = []
    for start in range(0, T, block):
        end = min(start + block, T)
        keys = _keys(before + start, before + end, before + T, block, window)
        i = torch.arange(start, end, device=q.device)[:, None]
        j = torch.arange(keys.start, keys.stop, device=q.device)[None, :]
        scores = (q[:, :, start:end] @ k_t[..., keys]).to(dtype) * scale
        if bias is not None:
            scores = scores + evaluate_bias(bias, sequence, head, i, j).to(dtype)
        scores = scores.masked_fill(_is_hidden(i + before, j, window), float("-inf"))
        o = scores.softmax(-1).to(v.dtype) @ v[:, :, keys]
        out.append(o if sink is None else beside_sink(o, scores.logsumexp(-1), sink))
    return torch.cat(out, dim=2)


def short(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias | None,
    scale: float,
    sink: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Query blocks against the keys they may see, [B * H] matrix products at a time, and the gradient likewise."""
    B, H, T = q.shape[:3]
    groups, o_dtype = H // k.shape[1], q.dtype
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    dtype, masks = torch.promote_types(q.dtype, torch.float32), []
    for start in range(0, T, SHORT_BLOCK):
        end = min(start + SHORT_BLOCK, T)
        first = 0 if window is None else max(0, start + 1 - window)
        mask = _causal_mask(start, end, first, window, dtype, q.device)
        if bias is not None:
            i = torch.arange(start, end, device=q.device)[:, None]
            j = torch.arange(first, end, device=q.device)[None, :]
            mask = evaluate_bias(bias, *_sequences_and_heads(B, H, q.device), i, j).to(dtype) + mask
        masks.append(mask)
    q, k, v = (q.to(dtype) * scale).flatten(0, 1), k.to(dtype).flatten(0, 1), v.to(dtype).flatten(0, 1)
    o, logsumexp = _Short.apply(q, k, v, H, sink is not None, *masks)
    o = o.unflatten(0, (B, H))
    return (o if sink is None else beside_sink(o, logsumexp.unflatten(0, (B, H)), sink)).to(o_dtype)


@functools.lru_cache(maxsize=64)
def _causal_mask(
    start: int, end: int, first: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """0 where query `start` + row may see key `first` + column, else -inf: [end - start, end - first]."""
    i, j = torch.arange(start, end, device=device)[:, None], torch.arange(first, end, device=device)
    return torch.zeros((end - start, end - first), dtype=dtype, device=device).masked_fill(
        _is_hidden(i, j, window), -float("inf")
    )


def _is_hidden(i: Tensor, j: Tensor, window: int | None) -> Tensor:
    """Whether query `i` does not see key `j`, rows of keys both."""
    return j > i if window is None else (j > i) | (j <= i - window)


class _Short(torch.autograd.Function):
    """o = P v with P = softmax(q k' + mask), block by block of its rows, and the log-sum-exp l where it is asked.

    q is scaled already; a mask is [rows, keys] or has [H] or [B, H] before them. With g above o and h above l:
    dv = P' g, and of the scores dS = P (g v' - sum(g o) + h), so dq = dS k, dk = dS' q.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, heads: int, with_sum: bool, *masks: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        o, start, kept, sums = q.new_empty(*q.shape[:2], v.shape[-1]), 0, [], []
        k_t = k.transpose(1, 2)
        for mask in masks:
            end = start + mask.shape[-2]
            keys = slice(end - mask.shape[-1], end)
            weights = torch.bmm(q[:, start:end], k_t[..., keys])
            weights.unflatten(0, (-1, heads)).add_(mask)
            sums += [weights.logsumexp(-1)] if with_sum else []
            torch.softmax(weights, -1, out=weights)
            torch.bmm(weights, v[:, keys], out=o[:, start:end])
            kept.append(weights)
            start = end
        ctx.save_for_backward(q, k, v, o, *kept)
        ctx.heads, ctx.shapes = heads, [mask.shape for mask in masks]
        return o, torch.cat(sums, dim=1) if with_sum else None

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, *kept = ctx.saved_tensors
        g = above[0].contiguous()
        of_q, of_k, of_v, of_masks = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v), []
        v_t, sums, start = v.transpose(1, 2), -(g * o).sum(-1, keepdim=True), 0
        if above[1] is not None:
            sums += above[1][..., None]
        for n, (weights, shape) in enumerate(zip(kept, ctx.shapes, strict=True)):
            end = start + weights.shape[-2]
            keys = slice(end - weights.shape[-1], end)
            part = g[:, start:end]
            of_v[:, keys] += torch.bmm(weights.transpose(1, 2), part)
            of_scores = torch.baddbmm(sums[:, start:end], part, v_t[..., keys]).mul_(weights)
            torch.bmm(of_scores, k[:, keys], out=of_q[:, start:end])
            of_k[:, keys] += torch.bmm(of_scores.transpose(1, 2), q[:, start:end])
            is_learned = ctx.needs_input_grad[5 + n]
            of_masks.append(of_scores.unflatten(0, (-1, ctx.heads)).sum_to_size(shape) if is_learned else None)
            start = end
        return of_q, of_k, of_v, None, None, *of_masks


def _sequences_and_heads(B: int, H: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The first two arguments of a bias, [B, 1, 1, 1] and [H, 1, 1]: one that ignores the sequence stays [H, T, T]."""
    return torch.arange(B, device=device)[:, None, None, None], torch.arange(H, device=device)[:, None, None]


def _keys(start: int, end: int, length: int, block: int, window: int | None) -> slice:
    """The keys that a block of queries reads, rows `start` to `end` of `length`: all before it, or those in the window.

    All before it in at most 16 different numbers. Blocks that each want a little more memory than the one before leave
    holes that no later one fits into: with sixteen sizes memory grows with the length, not with its square, and at most
    a sixteenth more is computed.
    """
    if window is not None:
        return slice(max(0, start + 1 - window), end)
    grid = block * -(-length // (16 * block))
    return slice(0, min(length, -(-end // grid) * grid))


def masked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias | None,
    scale: float,
    sink: Tensor | None = None,
    window: int | None = None,
    cells: int = MASKED_CELLS,
) -> Tensor:
    """Query blocks on the CPU's fused kernel, with bias and causality as its mask in float32 (float64 where q is).

    At most H x `cells` of the mask stand in memory at a time, B times that where the bias differs by sequence. Where a
    gradient passes a sink, by `blocks`.
    """
    if sink is not None and torch.is_grad_enabled():
        return blocks(q, k, v, bias, scale, sink, window)
    B, H, T = q.shape[:3]
    before = k.shape[2] - T
    sequence, head = _sequences_and_heads(B, H, q.device)
    dtype = torch.promote_types(q.dtype, torch.float32)
    reach, most = (k.shape[2], T) if window is None else (min(k.shape[2], 2 * window), max(window, BLOCK))
    block = max(16, min(T, most, cells // reach))
    # Not a list of parts: between the masks they would leave holes too small for the next.
    out = q.new_empty(B, H, T, v.shape[-1])
    for start in range(0, T, block):
        end = min(start + block, T)
        keys = _keys(before + start, before + end, before + T, block, window)
        i = torch.arange(start, end, device=q.device)[:, None]
        j = torch.arange(keys.start, keys.stop, device=q.device)[None, :]
        zero = torch.zeros(1, 1, *torch.broadcast_shapes(i.shape, j.shape), dtype=dtype, device=q.device)
        scores = (
            zero.expand(1, H, -1, -1) if bias is None else zero + evaluate_bias(bias, sequence, head, i, j).to(dtype)
        )
        mask = scores.masked_fill(_is_hidden(i + before, j, window), float("-inf"))
        out[:, :, start:end] = _fused_kernel(q[:, :, start:end], k[:, :, keys], v[:, :, keys], mask, scale, sink)
    return out


def causal_tiles(length: int, device: torch.device) -> BlockMask:
    """Which tiles of the scores of `length` tokens FlexAttention computes, and in which of them it asks for the mask.

    Those on the diagonal are cut by it, those of a last row that is not full too, and those before it are whole.
    PyTorch's `create_block_mask` finds them from every pair of tokens; written down they are two small kernels.
    """
    from torch.nn.attention.flex_attention import BlockMask

    n = -(-length // TILE)
    row = torch.arange(n, dtype=torch.int32, device=device)
    is_ragged = min(length % TILE, 1)  # the last row
    last = (row == n - 1).int() * is_ragged
    from_here = (row[:, None] + row) % n  # row r lists r, r + 1, ...
    # Of each row the cut and the whole ones, then the same tiles column by column.
    counts = (1 + last * (n - 1), row * (1 - last), 1 + is_ragged - last, n - 1 - row - is_ragged + last)
    cut_keys, cut_queries = torch.where(last[:, None] == 1, row, from_here), torch.where(row == 1, n - 1, from_here)
    indices = (cut_keys, row.expand(n, n), cut_queries, (from_here + 1) % n)
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
        mask_mod=_is_seen,
    )


def _is_seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def later_tiles(length: int, window: int | None, first: Tensor | None, device: torch.device) -> BlockMask:
    """... where each query sees a window, or keys from `first` [B, T] on: tiles from a row's first query's, all cut."""
    from torch.nn.attention.flex_attention import BlockMask

    n = -(-length // TILE)
    row = torch.arange(n, dtype=torch.int32, device=device)
    begin = row.new_zeros(1) if window is None else (row * TILE + 1 - window).clamp(min=0) // TILE
    begin = begin[None] if first is None else torch.maximum(begin, first[:, ::TILE].int() // TILE)  # [1 or B, n]
    return BlockMask.from_kv_blocks(
        (row - begin + 1)[:, None].int(),
        ((begin[..., None] + row) % n)[:, None].int(),
        BLOCK_SIZE=TILE,
        mask_mod=_is_seen if window is None else lambda b, h, i, j: (i >= j) & (j > i - window),
        seq_lengths=(length, length),
    )


def flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias | None,
    scale: float,
    sink: Tensor | None = None,
    window: int | None = None,
    reads_rows: bool = True,
    first: Tensor | None = None,
) -> Tensor:
    """FlexAttention with the bias as score function; compiled by the caller, on CUDA.

    Arguments: reads_rows, whether the bias reads tensors at query or key rows (see `kernel_options`); first, the first
    key [B, T] that each query sees, where the bias hides those before it: their tiles are left out.
    """
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        assert bias is not None
        return s + bias(b, h, i, j)  # promoted: slopes times positions need float32

    T, is_causal = q.shape[2], window is None and first is None
    result: Any = flex_attention(
        q,
        k,
        v,
        score_mod=None if bias is None else score,
        block_mask=causal_tiles(T, q.device) if is_causal else later_tiles(T, window, first, q.device),
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        kernel_options=cast(Any, kernel_options(q, reads_rows and bias is not None)),
        return_aux=None if sink is None else AuxRequest(lse=True),
    )
    return result if sink is None else beside_sink(result[0], result[1].lse, sink)


def kernel_options(q: Tensor, reads_rows: bool) -> dict[str, int]:
    """How many tiles of keys FlexAttention's kernels fetch ahead, where its own choice does not fit into a GPU.

    A kernel fetches what a bias reads at (query, key) ahead too, a tile of float32 each time. On an H200 the default of
    three stages then asks for 245,760 bytes of shared memory forward at 64 channels and 233,472 backward at 128, of
    232,448 that there are; two stages for 147,456 and less. A bias that reads numbers of
    heads alone (ALiBi's slopes) fetches no tile. float32 has smaller tiles, and fits.
    """
    if not reads_rows or q.dtype == torch.float32:
        return {}
    return {"fwd_num_stages": 2} if q.shape[3] <= 64 else {"fwd_num_stages": 2, "bwd_num_stages": 2}


@functools.cache
def _compiled_flex() -> Callable[..., Tensor]:
    """`flex` for any length, for code that is not compiled itself: one kernel a scheme, whatever was read before."""
    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, SCHEMES_A_PROCESS)
    return torch.compile(flex, dynamic=True, fullgraph=True)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias | None,
    scale: float,
    sink: Tensor | None = None,
    window: int | None = None,
    reads_rows: bool = True,
    may_compile: bool = False,
    first: Tensor | None = None,
) -> Tensor:
    """Causal attention by the fastest of the kernels above that can carry `bias`, `sink` and `window`.

    Arguments: q [B, H, T, D]; k [B, Hkv, T, D] and v [B, Hkv, T, E], or more of them where keys before the first query
    are kept; bias, None or a function of rows; scale, what multiplies q . k; sink, None or [H]; window, tokens that a
    query sees, or None; reads_rows and first, as in `flex`; may_compile, whether long windows may compile their
    attention on CUDA where the code around it is not compiled.
    Returns: [B, H, T, E] in q's dtype.
    """
    compiling = torch.compiler.is_compiling()
    B, H, T, _ = q.shape
    window = None if window is None or window >= k.shape[2] else window
    if q.is_cuda:
        return _attend_on_cuda(q, k, v, bias, scale, sink, window, reads_rows, may_compile or compiling, first)
    if k.shape[2] > T:
        return masked(q, k, v, bias, scale, sink, window)
    cells = B * H * T * (T if window is None else min(T, window + SHORT_BLOCK))
    if torch.is_grad_enabled() and not compiling and cells <= SHORT_CELLS and q.dtype != torch.bfloat16:
        return short(q, k, v, bias, scale, sink, window)
    is_fused = window is None and (sink is None or not (compiling or torch.is_grad_enabled()))
    if bias is None and is_fused and (not compiling or T > FUSED_ABOVE):
        return fused(q, k, v, scale, sink)
    if (bias is not None or window is not None) and not compiling:
        return masked(q, k, v, bias, scale, sink, window)
    return blocks(q, k, v, bias, scale, sink, window)


def _attend_on_cuda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias | None,
    scale: float,
    sink: Tensor | None,
    window: int | None,
    reads_rows: bool,
    compiles: bool,
    first: Tensor | None,
) -> Tensor:
    """`flex` uncompiled would hold every score at once, and so do blocks whose gradient is wanted."""
    B, H, T, D = q.shape
    is_whole, is_plain = k.shape[2] == T, bias is None and sink is None and window is None
    if is_plain and is_whole:
        return fused(q, k, v, scale)
    if not is_plain and is_whole and compiles and D >= FLEX_FROM:
        if torch.compiler.is_compiling():
            return flex(q, k, v, bias, scale, sink, window, reads_rows, first)
        if T >= COMPILED_FROM and not torch.is_grad_enabled():
            return _compiled_flex()(q, k, v, bias, scale, sink, window, reads_rows, first)
    if torch.is_grad_enabled():
        return blocks(q, k, v, bias, scale, sink, window)
    # Few and large blocks: each costs a dozen launches.
    most = T if window is None else max(window, BLOCK)
    block = max(BLOCK, min(T, most, CUDA_SCORES // (B * H * k.shape[2])))
    return blocks(q, k, v, bias, scale, sink, window, block=block)
