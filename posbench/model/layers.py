"""The layers of a LLaMA decoder (pre-norm RMSNorm, SwiGLU; arXiv 2302.13971) around a kind of attention.

Shapes: B batch, T tokens, C = d_model, H heads, D = head_dim, F = ffn_width. Weights are float32 and rounded to the
activations' dtype for each product; norms are computed in float32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.attention import Kind, KVCache
from posbench.config import ModelConfig
from posbench.schemes import Placement, Scheme
from posbench.schemes.base import apply_hook
from posbench.system.matmul import linear
from posbench.system.plain import apply
from posbench.system.torch_internals import as_dtype


class Linear(nn.Module):
    """A linear layer `x @ weight.T (+ bias)` in x's dtype, to which its float32 weights are rounded."""

    def __init__(self, fan_in: int, fan_out: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(fan_out, fan_in))
        self.bias = nn.Parameter(torch.zeros(fan_out)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class RMSNorm(nn.Module):
    """`x / rms(x) * weight` over channels, in at least float32 (Zhang and Sennrich 2019, arXiv 1910.07467)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return apply(_Normed, x, self.weight, self.eps)


# Written by hand: it reads and writes its tensors less often than the automatic gradient (docs/internals/speed.md).
class _Normed(torch.autograd.Function):
    """The function n w of x and weight w, with n = x / rms(x), and its gradient.

    For an output gradient g, x has the gradient (g w - n mean(g w n)) / rms(x), and w has sum(g n).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(weight.dtype)
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        normal = wide * inverse
        ctx.save_for_backward(normal, inverse, weight)
        return as_dtype(normal * weight, x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        normal, inverse, weight = ctx.saved_tensors
        wide = gradients[0].to(weight.dtype)
        products = wide * normal
        mean = (products @ weight).unsqueeze(-1) / len(weight)
        dx = torch.addcmul(wide * weight, normal, mean, value=-1).mul_(inverse)
        return dx.to(gradients[0].dtype), products.flatten(0, -2).sum(0), None


class Attention(nn.Module):
    """An attention layer, [B, T, C] -> [B, T, C]: projections around a kind of attention, which adds position."""

    def __init__(self, config: ModelConfig, kind: Kind) -> None:
        super().__init__()
        self.kind, self.head_dim, self.norm_eps = kind, config.head_width, config.norm_eps
        width = sum(kind.heads_by_part.values()) * self.head_dim  # of the packed parts
        self.qkv = Linear(config.d_model, width, config.qkv_bias)
        has_norms = config.qk_norm and kind.takes_qk_norm
        self.q_norm = RMSNorm(self.head_dim, config.norm_eps) if has_norms else None
        self.k_norm = RMSNorm(self.head_dim, config.norm_eps) if has_norms else None
        self.out = Linear(config.num_heads * self.head_dim, config.d_model)

    def forward(self, x: Tensor, at: Placement, scheme: Scheme, cache: KVCache | None = None) -> Tensor:
        B, T, _ = x.shape
        x = apply_hook(scheme, "hidden", x, at.pos, at.past(None if cache is None else cache.rows))
        packed, heads = self.qkv(x).view(B, T, -1, self.head_dim), self.kind.heads_by_part
        # Split before transposing: the gradients of the parts are then written where the projection reads them.
        split = packed.split(tuple(heads.values()), dim=2)
        parts = {part: heads_of_part.transpose(1, 2) for part, heads_of_part in zip(heads, split, strict=True)}
        before_norm = parts.get("k" if self.kind.shared_kv else "v")
        # A shared K = V is the key before its norm with `value_norm`, after it without.
        if self.q_norm is not None and self.k_norm is not None:
            parts |= {"q": self.q_norm(parts["q"]), "k": self.k_norm(parts["k"])}
        if self.kind.value_norm and before_norm is not None:
            parts["v"] = F.rms_norm(before_norm, (self.head_dim,), eps=self.norm_eps)
        elif self.kind.shared_kv:
            parts["v"] = parts["k"]
        o = self.kind.mix(parts, x, scheme, at, cache)
        return self.out(o.transpose(1, 2).reshape(B, T, -1))

    def rows(self) -> dict[str, int]:
        """Return {part: number of its weight rows} for q, k and v in the packed projection."""
        return {part: heads * self.head_dim for part, heads in self.kind.heads_by_part.items()}


class SwiGLU(nn.Module):
    """`down(silu(gate(x)) * up(x))` (Shazeer 2020, arXiv 2002.05202), with gate and up in one matrix product."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = Linear(config.d_model, 2 * config.ffn_width)
        self.down = Linear(config.ffn_width, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(apply(_Gated, self.gate_up(x)))


# Also by hand: its gradient reuses the sigmoid.
class _Gated(torch.autograd.Function):
    """The function silu(gate) * up of x [..., 2F], whose halves are gate and up."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        sigmoid = gate.sigmoid()
        ctx.save_for_backward(gate_up, sigmoid)
        return gate * sigmoid * up

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        gate_up, sigmoid = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        gated = gradients[0] * sigmoid
        dup = gated * gate  # silu(gate) = gate sigmoid(gate)
        # silu' = sigmoid + silu (1 - sigmoid)
        dgate = torch.addcmul(gated + dup, dup, sigmoid, value=-1).mul_(up)
        return torch.cat((dgate, dup), dim=-1)


def layer_matrices(model: nn.Module) -> dict[str, list[int]]:
    """Return {name of a weight: rows of each matrix in it} for the projections of all attention and SwiGLU layers."""
    matrices = {}
    for prefix, module in model.named_modules():
        if isinstance(module, Attention):
            # Packed weights hold several matrices, one below the other: q, k and v, or gate and up.
            matrices[f"{prefix}.qkv.weight"] = list(module.rows().values())
            matrices[f"{prefix}.out.weight"] = [len(module.out.weight)]
        elif isinstance(module, SwiGLU):
            matrices[f"{prefix}.gate_up.weight"] = 2 * [len(module.gate_up.weight) // 2]
            matrices[f"{prefix}.down.weight"] = [len(module.down.weight)]
    return matrices


class Block(nn.Module):
    """A decoder layer: attention, then SwiGLU, each after a norm and added to the hidden states [B, T, C]."""

    def __init__(self, config: ModelConfig, kind: Kind) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.d_model, config.norm_eps)
        self.attention = Attention(config, kind)
        self.ffn_norm = RMSNorm(config.d_model, config.norm_eps)
        self.ffn = SwiGLU(config)

    def forward(self, x: Tensor, at: Placement, scheme: Scheme, cache: KVCache | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), at, scheme, cache)
        return x + self.ffn(self.ffn_norm(x))
