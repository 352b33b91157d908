"""How causal attention runs. Four ways to the same numbers, picked from what the scheme needs and the device offers.

    fused    PyTorch's scaled_dot_product_attention: no bias, any length, nothing T x T in memory
    blocks   query blocks against their key prefixes: any bias, memory linear in T; compiled, on CPUs, also the
             fastest at short contexts
    masked   query blocks on the fused kernel with the bias as its mask: any bias, on CPUs where nothing is compiled
    flex     FlexAttention with the bias as its score function: any bias on CUDA

All take q [B, H, T, D] and k, v [B, Hkv, T, D] with H a multiple of Hkv, and give [B, H, T, D]. `blocks` and `masked`
also take more keys than queries: the queries are then those of the last positions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Bias = Callable[[Tensor, Tensor, Tensor], Tensor | None]

# Measured on 2 CPU cores, see docs/performance.md.
BLOCK = 128  # queries a block
MASKED_CELLS = 1 << 20  # of the mask that stands in memory at a time, for each head
FLEX_FROM = 16  # channels a head, the least that FlexAttention takes
FUSED_ABOVE = 512  # tokens from which the CPU's fused kernel is faster than compiled blocks


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The fused kernel of the device, for schemes without a bias."""
    groups = q.shape[1] // k.shape[1]
    if q.is_cuda and groups > 1 and q.dtype not in (torch.bfloat16, torch.float16):
        # Kernels for float32 know no grouped queries: every score would stand in memory.
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def blocks(q: Tensor, k: Tensor, v: Tensor, bias: Bias | None, offset: int = 0, block: int = BLOCK) -> Tensor:
    """Query blocks against the keys they may see; bias and softmax in float32 (float64 where q is).

    At most [B, H, block, T] stands in memory at a time (when no gradient is wanted).
    """
    H, T, D = q.shape[1:]
    before = k.shape[2] - T
    groups = H // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    # Contiguous before slicing: torch 2.13 miscompiles transposed copies of several bf16 slices on CPUs.
    k_t = k.transpose(-2, -1).contiguous()
    v = v.contiguous()
    dtype = torch.promote_types(q.dtype, torch.float32)
    head = torch.arange(H, device=q.device)[:, None, None]
    out = []
    for start in range(0, T, block):
        end = min(start + block, T)
        keys = _keys(before + end, before + T, block)
        i = torch.arange(before + start, before + end, device=q.device)[:, None]
        j = torch.arange(keys, device=q.device)[None, :]
        scores = (q[:, :, start:end] @ k_t[..., :keys]).to(dtype) * D**-0.5
        added = bias(head, i + offset, j + offset) if bias else None
        if added is not None:
            scores = scores + added.to(dtype)
        scores = scores.masked_fill(j > i, float("-inf"))
        out.append(scores.softmax(-1).to(v.dtype) @ v[:, :, :keys])
    return torch.cat(out, dim=2)


def _keys(end: int, length: int, block: int) -> int:
    """How many keys a block of queries that ends at `end` reads: all before it, in at most 16 different numbers.

    Blocks that each want a little more memory than the one before leave holes that no later one fits into: with sixteen
    sizes memory grows with the length, not with its square, and at most a sixteenth more is computed.
    """
    grid = block * -(-length // (16 * block))
    return min(length, -(-end // grid) * grid)


def masked(q: Tensor, k: Tensor, v: Tensor, bias: Bias | None, offset: int = 0, cells: int = MASKED_CELLS) -> Tensor:
    """Query blocks on the CPU's fused kernel, with bias and causality as its mask in float32 (float64 where q is).

    At most H x `cells` of the mask stand in memory at a time.
    """
    H, T = q.shape[1:3]
    before = k.shape[2] - T
    head = torch.arange(H, device=q.device)[:, None, None]
    dtype = torch.promote_types(q.dtype, torch.float32)
    block = max(16, min(T, cells // k.shape[2]))
    # Not a list of parts: kept between the masks, they would leave holes too small for the next.
    out = torch.empty_like(q)
    for start in range(0, T, block):
        end = min(start + block, T)
        keys = _keys(before + end, before + T, block)
        i = torch.arange(before + start, before + end, device=q.device)[:, None]
        j = torch.arange(keys, device=q.device)[None, :]
        added = bias(head, i + offset, j + offset) if bias else None
        scores = torch.zeros(H, end - start, keys, dtype=dtype, device=q.device) if added is None else added.to(dtype)
        mask = scores.masked_fill(j > i, float("-inf"))[None]
        parts = q[:, :, start:end], k[:, :, :keys], v[:, :, :keys]
        out[:, :, start:end] = F.scaled_dot_product_attention(*parts, mask, enable_gqa=k.shape[1] != H)
    return out


def flex(q: Tensor, k: Tensor, v: Tensor, bias: Bias, offset: int = 0) -> Tensor:
    """FlexAttention with the bias as score function; compiled by the caller, on CUDA."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        added = bias(h, i + offset, j + offset)
        return s if added is None else s + added  # promoted: slopes times positions need float32

    def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j

    T = q.shape[2]
    mask = create_block_mask(causal, None, None, T, T, device=q.device)
    return flex_attention(q, k, v, score_mod=score, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Bias | None = None, offset: int = 0) -> Tensor:
    """Causal attention by the best of the ways above that can carry `bias`.

    Arguments: q [B, H, T, D]; k, v [B, Hkv, T, D], or more of them where keys before the first query are kept; `bias`
    as `Scheme.bias`, or None; offset, the position of the first key. Returns: [B, H, T, D] in q's dtype.
    """
    compiling = torch.compiler.is_compiling()
    if k.shape[2] > q.shape[2]:
        return (blocks if q.is_cuda else masked)(q, k, v, bias, offset)
    if bias is None and (q.is_cuda or not compiling or q.shape[2] > FUSED_ABOVE):
        return fused(q, k, v)
    if q.is_cuda and bias is not None and compiling and q.shape[3] >= FLEX_FROM:
        return flex(q, k, v, bias, offset)  # uncompiled it would hold every score at once, so then blocks
    if bias is not None and not compiling and not q.is_cuda:
        return masked(q, k, v, bias, offset)
    return blocks(q, k, v, bias, offset)
