"""The gated delta rule, a linear recurrence that overwrites what it stored under a key (`GatedDeltaRule`).

Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464), as in the linear layers of Qwen3-Next and Qwen3.5. With a decay a_t
and a strength b_t, both between 0 and 1 and computed from the hidden states:

    S_t = a_t S_(t-1) (I - b_t k_t k_t^T) + b_t v_t k_t^T,    o_t = S_t q_t / sqrt(D)

The product with I - b_t k_t k_t^T first removes a part b_t of the value that the state holds for k_t. Time is linear: a
chunk of L tokens is one triangular system (the WY representation, section 3.3), and the state passes from chunk to
chunk. `delta_rule` keeps the transpose M = S^T, [D, E]; q_t, k_t and v_t are then rows:

    M_t = a_t M_(t-1) + k_t^T u_t,    u_t = b_t (v_t - a_t k_t M_(t-1)),    o_t = q_t M_t

In Kimi Delta Attention (arXiv 2510.26692) a_t is a diagonal matrix: each channel of the keys has its decay.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.attention.kind import Kind, KVCache
from posbench.attention.sums import in_chunks
from posbench.config import ConfigError
from posbench.schemes import Placement, Scheme, Shape
from posbench.schemes.base import apply_hook, require_integer, require_number
from posbench.schemes.earlier import EarlierRows
from posbench.system.matmul import linear

EPS = 1e-6  # added to squared lengths of q and k, and to the mean square of outputs, as in Qwen3-Next
_BLOCK = 8  # tokens, l: within a block, decays by channel are computed for each pair of tokens


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, strength: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the outputs of the gated delta rule, [B, H, T, E], and the last state, [B, Hkv, D, E].

    Arguments: q [B, H, T, D], H a multiple of Hkv; k [B, Hkv, T, D]; v [B, Hkv, T, E]; log_decay, log a_t, at most 0,
    [B, Hkv, T, 1] or [B, Hkv, T, D] (by channel); strength, b_t, [B, Hkv, T, 1]; state, which the call for earlier
    tokens returned, or None. All have one dtype, at least float32.
    """

    def sum_chunks(parts: list[Tensor], state: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v, log_decay, strength = parts  # [B, H or Hkv, N, L, .]: N chunks of L tokens
        total = log_decay.cumsum(3)  # since the chunk began
        from_start = total.exp()
        last = total[..., -1:, :]  # of the whole chunk
        # The diagonal and what is above it are not read. u is a function of the state M before the chunk: u_v - u_k M.
        system = strength * decayed_products(k, k, total)
        right = strength * torch.cat((v, from_start * k), dim=-1)
        solution = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        # The state passes from chunk to chunk.
        u_v, u_k = solution.split((v.shape[-1], k.shape[-1]), dim=-1)
        to_end = ((last - total).exp() * k).mT
        decay, removed, added = last.exp().mT, to_end @ u_k, to_end @ u_v
        state = torch.zeros_like(added[:, :, 0]) if state is None else state
        entering = []  # M before each chunk
        for n in range(q.shape[2]):
            entering.append(state)
            state = decay[:, :, n] * state - removed[:, :, n] @ state + added[:, :, n]
        states = torch.stack(entering, dim=2)
        # Outputs: products within the chunk, and what the state before it holds.
        q = q.unflatten(1, (k.shape[1], -1))  # [B, Hkv, heads that share a key head, N, L, D]
        # One dimension more, for the heads that share a key head.
        u, states, k, total = (x[:, :, None] for x in (u_v - u_k @ states, states, k, total))
        return (decayed_products(q, k, total) @ u + (q * total.exp()) @ states).flatten(1, 2), state

    return in_chunks(sum_chunks, [q, k, v, log_decay, strength], state)


def decayed_products(q: Tensor, k: Tensor, total: Tensor) -> Tensor:
    """Return `sum_c q_ic k_jc exp(total_ic - total_jc)` of tokens j <= i, and 0 of later ones: [..., L, L].

    Arguments: q and k, [..., L, D]; total, summed log-decays, [..., L, 1] or [..., L, D].
    """
    L = q.shape[-2]
    row = torch.arange(L, device=q.device)
    if total.shape[-1] == 1:
        return (q @ k.mT) * (total - total.mT).masked_fill(row > row[:, None], -torch.inf).exp()
    # Blocks of l tokens. Decays from earlier blocks pass the block's first token, so both factors are at most 1, where
    # exp(-total) would overflow. Within a block the decay of each pair of tokens is computed.
    block = math.gcd(L, _BLOCK)
    q, own_k, own_total = (x.unflatten(-2, (-1, block)) for x in (q, k, total))  # [..., L / l, l, D]
    first = own_total[..., :1, :]
    not_before = row >= row[::block, None]  # [L / l, L]
    to_first = (first - total[..., None, :, :]).masked_fill(not_before[..., None], -torch.inf).exp()
    across = (q * (own_total - first).exp()) @ (k[..., None, :, :] * to_first).mT  # [..., L / l, l, L]
    decay = own_total[..., :, None, :] - own_total[..., None, :, :]  # from token j to token i, [..., L / l, l, l, D]
    decay = decay.masked_fill((row[:block] > row[:block, None])[..., None], -torch.inf).exp()
    within = (q[..., :, None, :] * own_k[..., None, :, :] * decay).sum(-1)
    # Each block's products go into the columns of its own tokens: the others are multiplied by 0.
    places = torch.eye(L // block, dtype=q.dtype, device=q.device)[:, None, :, None]
    return (across + (within[..., None, :] * places).flatten(-2)).flatten(-3, -2)


class GatedDeltaRule(Kind):
    """The gated delta rule (Gated DeltaNet): a state of fixed size in which a key's value can be overwritten.

    In the recurrence above, `a_t = exp(-e^A_log softplus(W_a x_t + dt_bias))` and `b_t = sigmoid(W_b x_t)`; x is the
    hidden states that the projections read. q, k and v pass through a convolution over the last tokens, by channel, and
    SiLU; q and k are divided by their lengths. Then a scheme may rotate them. The output, after the hook `o`, is
    divided by its root mean square in each head, and multiplied by `norm_weight` and by `silu(W_z x_t)`. Each key head
    has its own state, decay and strength. Matrices are drawn like the model's.

    With `decay: channel` it is Kimi Delta Attention: each channel of a key has its own `a_t`, from `W_a W_f x_t`, with
    W_f [D, C] and W_a [Hkv D, D], and its own dt_bias. Rotated q and k then depend on absolute positions, because a
    rotation mixes channels that decay differently. With `decay_bound`, c, `log a_t = -c sigmoid(e^A_log (...))`, where
    `...` is what softplus has above (GLM-5.3, Ling 3; transformers, models/glm5_next).

    Options: `convolution`, its width in tokens, 4 in the paper; 0 means none. `output_gate`, whether there is W_z, or
    `sigmoid`, which replaces silu (Kimi Linear). `decay`, `head` or `channel`. `decay_bound`, nats a token, 5 in those
    models; null means none.
    Raises: ConfigError for a convolution or a bound below 0, or an output_gate or a decay that is none of these.
    """

    takes_bias = False  # the decay is learned from content
    # Outputs are sums with signs, and their normalisation enlarges small ones. In the decoder of `posbench verify`,
    # with all of `mix` in float64, its rounded inputs and outputs alone cause 18 roundings in fp32 and 7.5 in bf16, and
    # gradients reach 1.7 and 5 times the limits. With one layer no allowance is needed.
    sensitivity = 4.0

    def __init__(
        self,
        shape: Shape,
        shared_kv: bool = False,
        convolution: int = 4,
        output_gate: bool | str = True,
        decay: str = "head",
        decay_bound: float | None = None,
    ) -> None:
        super().__init__(shape, shared_kv)
        if not isinstance(output_gate, bool) and output_gate != "sigmoid":
            raise ConfigError(f"scheme.attention.output_gate={output_gate!r} must be true, false or sigmoid for gdn")
        if decay not in ("head", "channel"):
            raise ConfigError(f"scheme.attention.decay={decay!r} must be head or channel")
        if decay_bound is not None:
            decay_bound = require_number("attention.decay_bound", decay_bound, 0, math.inf, "5 is usual")
        self.decay_bound = decay_bound
        self.convolution = require_integer("attention.convolution", convolution, 0, "4 is the paper's, 0 means none")
        H, Hkv, D, C = shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.d_model
        for part, heads in {"q": H, "k": Hkv, "v": Hkv}.items():
            taps = nn.Parameter(torch.empty(heads, 1, D, convolution)) if convolution else None
            self.register_parameter(f"{part}_taps", taps)
            if taps is not None:
                # The standard deviation of PyTorch's uniform initialisation in +-1 / sqrt(width).
                taps.init_std = (3 * convolution) ** -0.5  # type: ignore[attr-defined]  # read by `initialise`
        self.W_f = None
        decays, width, middles = Hkv, C, _middles(Hkv)
        if decay == "channel":
            self.W_f = nn.Parameter(torch.empty(D, C))
            decays, width, middles = Hkv * D, D, _middles(D).repeat(Hkv)
        self.W_a = nn.Parameter(torch.empty(decays, width))
        self.W_b = nn.Parameter(torch.empty(Hkv, C))
        self.W_z = nn.Parameter(torch.empty(H * D, C)) if output_gate else None
        self.gate = torch.sigmoid if output_gate == "sigmoid" else F.silu
        # e^A_log and softplus(dt_bias) begin in the middle of equal parts, one for each key head (or channel of a
        # head), of the ranges from which the authors draw them: 0 to 16, and 0.001 to 0.1 on a log scale.
        dt = 0.001 * 100**middles
        self.A_log = nn.Parameter((16 * _middles(Hkv)).log().float())
        self.dt_bias = nn.Parameter(dt.expm1().log().float())  # the inverse of softplus
        self.norm_weight = nn.Parameter(torch.ones(D))

    def mix(
        self, parts: Mapping[str, Tensor], x: Tensor, scheme: Scheme, at: Placement, cache: KVCache | None
    ) -> Tensor:
        _, pos, pos_of_keys = self.gates_and_positions(x, scheme, at, cache)
        past = at.past(None if cache is None else cache.rows)
        q, k, v = (self._convolved(part, parts[part], past) for part in self.parts)
        q, k = (part * (part.square().sum(-1, keepdim=True) + EPS).rsqrt() for part in (q, k))
        # Rotations come after the convolutions, which would mix tokens that are rotated by different angles.
        q, k = apply_hook(scheme, "q", q, pos, past), apply_hook(scheme, "k", k, pos_of_keys, past)
        v = apply_hook(scheme, "v", v, pos_of_keys, past)
        wide = x.to(self.A_log.dtype)
        strength = F.linear(wide, self.W_b).sigmoid().mT[..., None]  # [B, Hkv, T, 1]
        state = cache.state[0] if cache is not None and cache.state else None
        o, state = delta_rule(q * self.scale, k, v, self._log_decay(wide), strength, state)
        if cache is not None:
            cache.advance(x.shape[1])
            cache.state = (state,)
        o = apply_hook(scheme, "o", o, pos, past)
        # Norm and gate of the output, per head.
        o = F.rms_norm(o, o.shape[-1:], self.norm_weight.to(o.dtype), EPS)
        if self.W_z is not None:
            z = self.gate(linear(x, self.W_z.to(x.dtype)).to(o.dtype))
            o = o * z.unflatten(-1, (self.shape.num_heads, -1)).transpose(1, 2)
        return o.to(x.dtype)

    def _log_decay(self, x: Tensor) -> Tensor:
        # At most 0: [B, Hkv, T, 1], or [B, Hkv, T, D] by channel.
        if self.W_f is not None:
            x = F.linear(x, self.W_f)
        rates = F.linear(x, self.W_a, self.dt_bias).unflatten(-1, (len(self.A_log), -1)).transpose(1, 2)
        factor = self.A_log.exp()[:, None, None]
        if self.decay_bound is not None:
            return -self.decay_bound * (factor * rates).sigmoid()
        return -factor * F.softplus(rates)

    def _convolved(self, part: str, x: Tensor, past: EarlierRows) -> Tensor:
        taps = getattr(self, f"{part}_taps")  # [heads, 1, D, tokens back]
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if taps is None:
            return F.silu(wide)
        earlier = past.earlier(f"gdn.{part}", x, self.convolution - 1)
        y = wide * taps[..., 0]
        for n in range(1, self.convolution):
            y = y + earlier(n) * taps[..., n]
        return F.silu(y)

    def flops_per_token(self, length: int, scheme: Scheme) -> float:
        """Return the FLOPs per token of attention in one layer, without the projections to q, k, v and the output."""
        D, H, Hkv = self.shape.head_dim, self.shape.num_heads, self.shape.num_kv_heads
        # The gates' matrices and the convolutions; each key reads and updates its D x D state, each query reads one.
        weights = sum(parameter.numel() for parameter in self.parameters() if parameter.ndim > 1)
        return 2.0 * weights + 2.0 * D * D * (2 * Hkv + H)


def _middles(parts: int) -> Tensor:
    return (torch.arange(parts, dtype=torch.float64) + 0.5) / parts
