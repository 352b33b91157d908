"""Add a bias to the scores that depends on distance, on gates or on the scores themselves."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.config import ConfigError
from posbench.schemes.alibi import Alibi, exponents
from posbench.schemes.base import Bias, Placement, Scheme, Shape, require_integer
from posbench.schemes.content import scaled_scores
from posbench.schemes.earlier import Earlier, convolution_weight, convolved
from posbench.schemes.rotary import Turn, turn
from posbench.system.torch_internals import as_dtype


def buckets_of(d: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    """Return the index (int64) of the bucket of each distance `d` (int64, tokens), as in section 2.1 of the paper."""
    # Half of the buckets hold one distance each; the others cover ranges that grow as a logarithm.
    exact = num_buckets // 2
    ratio = (d.clamp(min=exact).to(torch.float64) / exact).log() / math.log(max_distance / exact)
    # The last bucket also covers everything beyond `max_distance`.
    wider = (exact + (ratio * (num_buckets - exact)).floor().long()).clamp(max=num_buckets - 1)
    return torch.where(d < exact, d, wider)


class T5(Scheme):
    """T5's bias: add `table[bucket(i - j), h]` to the scaled scores, with one table for all layers, learned from 0.

    One learned number for each bucket of distances and each head (Raffel et al. 2020, arXiv 1910.10683).

    T5 itself does not scale the scores. The last bucket covers all longer distances: from 113 tokens on by default.

    Options: `num_buckets`, half of them for single distances; `max_distance`, tokens at which the logarithmic ranges
    end.
    Raises: ConfigError for an odd or too small number of buckets, or a `max_distance` up to `num_buckets / 2`.
    """

    def __init__(self, shape: Shape, num_buckets: int = 32, max_distance: int = 128) -> None:
        super().__init__(shape)
        if require_integer("num_buckets", num_buckets, 2, "32 is usual") % 2:
            raise ConfigError(
                f"scheme.num_buckets={num_buckets} must be even: half of the buckets hold single distances"
            )
        if require_integer("max_distance", max_distance, 1, "128 is usual") <= num_buckets // 2:
            raise ConfigError(
                f"scheme.max_distance={max_distance} must be above scheme.num_buckets / 2 = "
                f"{num_buckets // 2} (128 is usual): shorter distances have a bucket each"
            )
        self.max_distance = max_distance
        self.table = nn.Parameter(torch.zeros(num_buckets, shape.num_heads))

    def bias(self, q: Tensor, k: Tensor, gates: Any, at: Placement) -> Bias:
        buckets = buckets_of(at.distances(q), len(self.table), self.max_distance)
        return at.look_up(self.table[buckets].t())


ONE = math.log(math.e - 1)  # softplus(ONE) = 1


class Kerple(Scheme):
    """KERPLE: add the bias `-a_h ln(1 + b_h (i - j))`, the paper's logarithmic kernel, to the scores.

    A learned penalty per head that grows with the log of distance (Chi et al. 2022, arXiv 2205.09921).

    a and b are shared by all layers, positive by softplus, and start at 1 (the authors draw them at random).
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.a = nn.Parameter(torch.full((shape.num_heads,), ONE))  # before the softplus, like b
        self.b = nn.Parameter(torch.full((shape.num_heads,), ONE))

    def bias(self, q: Tensor, k: Tensor, gates: Any, at: Placement) -> Bias:
        a, b = F.softplus(self.a)[:, None], F.softplus(self.b)[:, None]
        return at.look_up(-a * torch.log1p(b * at.distances(q)))


def inverse_softplus(x: float) -> float:
    """Return the y whose softplus, ln(1 + e^y), is `x` > 0."""
    return math.log(math.expm1(x))


class Fire(Scheme):
    """FIRE: add the bias `MLP_h(ln(1 + c (i - j)) / ln(1 + c max(L, i)))`; all layers share one ReLU MLP.

    A learned function of the distance divided by the query's position (Li et al. 2023, arXiv 2310.04418).

    c and L are learned, positive by softplus; c starts at 0.1 (the authors' code), L at the training length. For
    queries at i > L the bias depends on i too, so it is not relative. The MLP's matrices are initialised like the
    model's and its biases to 0.

    Options: `hidden`, hidden units of the MLP (32 in the paper). Raises: ConfigError unless a whole number above 0.
    """

    is_relative = False
    reads_length = True
    decayed = frozenset({"hidden_weight", "output_weight"})

    def __init__(self, shape: Shape, hidden: int = 32) -> None:
        super().__init__(shape)
        require_integer("hidden", hidden, 1, "32 in the paper")
        self.c = nn.Parameter(torch.tensor(inverse_softplus(0.1)))
        self.L = nn.Parameter(torch.tensor(inverse_softplus(1.0)))  # unit: the training length
        self.hidden_weight = self.normal(hidden, 1)
        # The authors draw weights and biases uniformly; with biases of 0, units with a negative weight start inactive.
        self.hidden_bias = nn.Parameter(torch.zeros(hidden))
        self.output_weight = self.normal(shape.num_heads, hidden)
        self.output_bias = nn.Parameter(torch.zeros(shape.num_heads))

    def bias(self, q: Tensor, k: Tensor, gates: Any, at: Placement) -> Bias:
        c, L = F.softplus(self.c), F.softplus(self.L) * self.shape.positions_length
        by_distance = torch.log1p(c * at.distances(q))
        by_query = torch.log1p(c * torch.maximum(L, at.pos.to(L.dtype)))
        by_head_and_distance = by_distance.expand(self.shape.num_heads, -1)  # equal for all heads
        knots, constants, slopes = self._pieces()
        constants_of_heads, slopes_of_heads = constants.t().contiguous(), slopes.t().contiguous()  # [H, pieces]

        def mlp(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            distance = at.distance(b, i, j).clamp(min=0)  # later keys are masked
            # FlexAttention passes a scalar h. It cannot compile the gradient of a vector indexed by a difference of
            # positions, but it can for a matrix.
            numerator = by_head_and_distance[h, distance] if h.ndim == 0 else by_distance[distance]
            share = numerator / at.value_at_query(by_query, b, i)
            # The number of a piece is the number of knots below it.
            piece = torch.zeros_like(share, dtype=torch.long)
            for knot in knots:
                piece = piece + (share > knot)
            return constants_of_heads[h, piece] + slopes_of_heads[h, piece] * share

        return mlp

    def _pieces(self) -> tuple[list[Tensor], Tensor, Tensor]:
        """Return the MLP as a piecewise linear function on [0, 1]: each hidden unit switches at one knot.

        Returns: `hidden` knots in ascending order; constants and slopes of the pieces, [hidden + 1, H] each.
        """
        # The bias of a score is then constant + slope * input, and no [H, T, T, hidden] tensor is allocated.
        weight, bias = self.hidden_weight[:, 0], self.hidden_bias
        # A unit is on or off in a whole piece, so its state in the middle tells.
        with torch.no_grad():
            # A unit with weight 0 never switches, so any knot serves it.
            knots = (-bias / weight).nan_to_num(0.0).clamp(0, 1).sort().values
            ends = torch.cat((knots.new_zeros(1), knots, knots.new_ones(1)))
            middles = (ends[1:] + ends[:-1]) / 2
            active = (middles[:, None] * weight + bias > 0).to(weight.dtype)  # [pieces, hidden]
        constants = (active * bias) @ self.output_weight.t() + self.output_bias
        return list(knots), constants, (active * weight) @ self.output_weight.t()


class Chunked(Scheme):
    """Hide the keys before the query's chunk: positions m * chunk to (m + 1) * chunk - 1 for a whole number m.

    The input is cut into pieces, and a query sees only the keys of its piece (Llama 4).

    It is the mask of Llama 4's layers with RoPE (transformers: `chunked_causal_mask_function`).
    Options: `chunk`, tokens.
    """

    group = "biases on the scores"
    is_relative = False

    def __init__(self, shape: Shape, chunk: int) -> None:
        super().__init__(shape)
        self.chunk = require_integer("chunk", chunk, 1, "tokens of a chunk")

    def bias(self, q: Tensor, k: Tensor, gates: Any, at: Placement) -> Bias:
        place_in_chunk = at.pos % self.chunk

        def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            # A key farther back than the query's place in its chunk belongs to an earlier chunk.
            is_hidden = at.distance(b, i, j) > at.value_at_query(place_in_chunk, b, i)
            return torch.where(is_hidden, -float("inf"), 0.0)

        return mask


class Fox(Scheme):
    """Forgetting gates: add the bias `sum_{l=j+1..i} ln sigmoid(w_h . x_l + b_h)` to the scores.

    Each token's gate fades all earlier tokens (Lin et al. 2025, arXiv 2503.02130).

    x is the hidden states after the layer's norm. Each layer has its own w, initialised like the model's matrices, and
    b, initialised to 0. The rest of the paper's "Pro" block is omitted, because it is not a position scheme.
    """

    per_layer = True
    decayed = frozenset({"w"})

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.w = self.normal(shape.num_heads, shape.d_model)
        self.b = nn.Parameter(torch.zeros(shape.num_heads))

    def gate(self, x: Tensor, pos: Tensor) -> Tensor:
        """Return `ln sigmoid(w_h . x + b_h)` of each token, [B, H, T, 1]."""
        return F.logsigmoid(F.linear(x.to(self.w.dtype), self.w, self.b)).mT[..., None]

    def bias(self, q: Tensor, k: Tensor, gates: Any, at: Placement) -> Bias:
        # The sum from j + 1 to i is the difference of two running sums.
        until_query, until_key = gates.sum_at_query[..., 0], gates.sum_at_key[..., 0]
        return lambda b, h, i, j: until_query[b, h, i] - until_key[b, h, j]

    def flops_per_token(self, length: int) -> float:
        return 2.0 * self.w.numel()


class Dape(Alibi):
    """DAPE: add `a_h + f_h(s_1 .. s_H, a_1 .. a_H)` to the scaled scores s of H heads, with ALiBi's biases a.

    ALiBi's bias, adapted to the scores by a small network over all heads (Zheng et al. 2024, arXiv 2405.14722).

    f is a network (linear, LeakyReLU of slope 0.01, linear), one per layer (version 1 of the paper and its code). Its
    matrices are initialised like the model's, its constants to 0.

    Options: `width`, hidden units of f (32 in the paper). Raises: ConfigError unless a whole number above 0.
    """

    per_layer = True
    reads_keys = True
    has_kinks = True
    decayed = frozenset({"inner", "outer"})

    def __init__(self, shape: Shape, width: int = 32) -> None:
        super().__init__(shape)
        self.inner = self.normal(require_integer("width", width, 1, "32 in the paper"), 2 * shape.num_heads)
        self.inner_constant = nn.Parameter(torch.zeros(width))
        self.outer = self.normal(shape.num_heads, width)
        self.outer_constant = nn.Parameter(torch.zeros(shape.num_heads))

    def bias(self, q: Tensor, k: Tensor, gates: Any, at: Placement) -> Bias:
        alibi = super().bias(q, k, gates, at)
        scores = scaled_scores(q, k, self.shape.head_dim)  # [B, H, T, keys]
        sequence, head, query, key = (torch.arange(size, device=q.device) for size in scores.shape)
        prior = alibi(sequence[:, None, None, None], head[:, None, None], query[:, None], key)
        # The network mixes heads, so they become the last dimension.
        both = torch.cat((scores, prior.to(scores.dtype).expand_as(scores)), dim=1).movedim(1, -1)
        hidden = F.leaky_relu(F.linear(both, self.inner, self.inner_constant))
        added = F.linear(hidden, self.outer, self.outer_constant).movedim(-1, 1)
        return lambda b, h, i, j: alibi(b, h, i, j) + added[b, h, i, j]

    def log_decay(self) -> None:
        """Return None: the bias depends on the scores."""
        return None

    def flops_per_token(self, length: int) -> float:
        """Return the FLOPs per token of f's two matrices in one layer."""
        # On average a query sees half of the `length` keys.
        return 1.0 * length * (self.inner.numel() + self.outer.numel())


class GrapeAp(Scheme):
    """GRAPE-AP: add the bias `m_h sum_{l=j+1..i} ln sigmoid(p_i . R_l n(p_l) / P)` <= 0, m_h being ALiBi's slopes.

    Each token between key and query adds a learned penalty (Zhang et al. 2025, arXiv 2512.07805).

    p = W_h x with W_h [P, C] in each layer, x the hidden states after the norm, and n(p) = p / rms(p). R_l rotates
    every pair of channels by l radians, so logits depend on absolute position. With W = 0 it is ALiBi with ln 2 times
    the slopes. W is initialised like the model's matrices. As in the authors' code, p_i is not normalised. Their norms
    of q, k and heads are omitted.

    Options: `width`, P (8 in the paper's experiments). Raises: ConfigError unless it is an even number above 0.
    """

    per_layer = True
    is_relative = False
    decayed = frozenset({"W"})
    exponents: Tensor

    def __init__(self, shape: Shape, width: int = 8) -> None:
        super().__init__(shape)
        if not isinstance(width, int) or isinstance(width, bool) or width < 2 or width % 2:
            raise ConfigError(f"scheme.width={width} must be an even number above 0 (8 is the paper's)")
        self.width = width
        self.W = self.normal(shape.num_heads * width, shape.d_model)
        self.register_buffer("exponents", exponents(shape.num_heads), persistent=False)

    def prepare(self, pos: Tensor, length: int) -> Turn:
        angles = pos.double()[..., None]
        return Turn.of(angles)

    def gate(self, x: Tensor, pos: Turn) -> Tensor:
        """Return p = W_h x of each token, then p / rms(p) rotated by its position: [B, H, T, 2 P]."""
        p = F.linear(x.to(self.W.dtype), self.W).unflatten(-1, (-1, self.width)).transpose(1, 2)
        # All pairs of channels turn by the same angle, the position in radians.
        cos_sin = Turn(*(part.expand(*part.shape[:-1], self.width // 2) for part in pos))
        return torch.cat((p, turn(F.rms_norm(p, (self.width,)), cos_sin)), dim=-1)

    def bias(self, q: Tensor, k: Tensor, gates: Any, at: Placement) -> Bias:
        p, turned = gates.at_query[..., : self.width], gates.at_key[..., self.width :]
        steps = F.logsigmoid(p @ turned.mT / self.width) * torch.exp2(self.exponents)[:, None, None]
        rows, keys = (torch.arange(n, device=q.device) for n in steps.shape[2:])
        # Steps at later tokens count for no key, and the mask of attention comes after the sum.
        steps = steps.masked_fill(at.is_later(rows[:, None], keys), 0.0)
        added = F.pad(steps[..., 1:], (0, 1)).flip(-1).cumsum(-1).flip(-1)  # sums over the tokens after the key
        return lambda b, h, i, j: added[b, h, i, j]

    def flops_per_token(self, length: int) -> float:
        """Return the FLOPs per token of p = W x and of the products p_i . p_l in one layer."""
        # On average a query sees half of the `length` tokens.
        return 2.0 * self.W.numel() + float(self.shape.num_heads * self.width * length)


EPS = 1e-6  # of the norms of queries and keys


class Inkling(Scheme):
    """Inkling's relative profiles: scores are `q_i . k_j / D + r_i . P[:, i - j]`, with q and k divided by their RMS.

    Learned profiles over distances, mixed by each query (transformers, models/inkling).

    `r_i = W x_i` has `profiles` numbers for each head, x being the hidden states after the layer's norm. Each layer has
    its own W and its own table P [profiles, extent], which its heads share; distances from `extent` on add nothing. The
    norms of q and k have a learned weight per channel, so `model.qk_norm` is not needed. W and P are initialised like
    the model's matrices. Inkling's optional logarithmic scale of scores is omitted.

    Options: `profiles` (16) and `extent` (1024) of the public model; an extent beyond the training context is reduced
    to it. Raises: ConfigError unless they are whole numbers above 0.
    """

    per_layer = True
    keeps_norms = False
    reads_earlier_gates = False
    decayed = frozenset({"W", "P"})

    def __init__(self, shape: Shape, profiles: int = 16, extent: int = 1024) -> None:
        super().__init__(shape)
        self.W = self.normal(shape.num_heads * require_integer("profiles", profiles, 1, "16 in Inkling"), shape.d_model)
        extent = require_integer("extent", extent, 1, "1024 in Inkling")
        # Distances beyond the training context would never be learned.
        self.P = self.normal(profiles, min(extent, shape.context_length))
        self.q_weight, self.k_weight = (nn.Parameter(torch.ones(shape.head_dim)) for _ in range(2))

    def gate(self, x: Tensor, pos: Any) -> Tensor:
        """Return `r = W x` of each head, [B, H, T, profiles]."""
        return F.linear(x.to(self.W.dtype), self.W).unflatten(-1, (self.shape.num_heads, -1)).transpose(1, 2)

    def q(self, x: Tensor, pos: Any) -> Tensor:
        return _normed(x, self.q_weight * self.shape.head_dim**-0.5)  # attention divides by sqrt(D) once more

    def k(self, x: Tensor, pos: Any) -> Tensor:
        return _normed(x, self.k_weight)

    def bias(self, q: Tensor, k: Tensor, gates: Any, at: Placement) -> Bias:
        extent = self.P.shape[1]
        products = gates.at_query @ F.pad(self.P, (0, 1))  # [B, H, T, extent + 1], the last of which are 0
        # Later keys are masked, so their clamped distances do not matter.
        return lambda b, h, i, j: products[b, h, i, at.distance(b, i, j).clamp(min=0, max=extent)]

    def flops_per_token(self, length: int) -> float:
        return 2.0 * (self.W.numel() + self.shape.num_heads * self.P.numel())


class InklingConv(Inkling):
    """Inkling's relative profiles with its short convolutions of keys, before their norm, and of values.

    They add `sum_{n=0..width-1} w_n k_{t-n}` to k_t, with a number w_n for each channel, and the same to values. Its
    convolutions after the output projection and the feed-forward network are omitted.

    Options: `width` (4 in Inkling), and the options of `Inkling`.
    """

    decayed = Inkling.decayed | {"k_convolution", "v_convolution"}

    def __init__(self, shape: Shape, profiles: int = 16, extent: int = 1024, width: int = 4) -> None:
        super().__init__(shape, profiles, extent)
        self.looks_back = require_integer("width", width, 1, "4 in Inkling") - 1
        self.k_convolution, self.v_convolution = (
            convolution_weight(shape.num_kv_heads, 1, shape.head_dim, width) for _ in range(2)
        )

    def k(self, x: Tensor, pos: Any, earlier: Earlier) -> Tensor:  # type: ignore[override]
        return super().k(as_dtype(convolved(earlier, self.k_convolution, residual=1.0), x.dtype), pos)

    def v(self, x: Tensor, pos: Any, earlier: Earlier) -> Tensor:  # type: ignore[override]
        return as_dtype(convolved(earlier, self.v_convolution, residual=1.0), x.dtype)

    def flops_per_token(self, length: int) -> float:
        return super().flops_per_token(length) + 2.0 * (self.k_convolution.numel() + self.v_convolution.numel())


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    # The weight is float32 even if the activations are narrower.
    return as_dtype(F.rms_norm(x.to(weight.dtype), weight.shape, weight, EPS), x.dtype)
