"""Change the magnitudes of q and k: with rotations, or with the number of tokens that compete."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.schemes.base import Scheme, Shape, require_integer, require_number
from posbench.schemes.rescaling import RescaleOption
from posbench.schemes.rotary import Rotary, Turn

_LARGEST = 108 * math.log(2)  # float32 ends at 2 ** 128; a factor of 2 ** 20 is left for q and k themselves


class Xpos(Rotary):
    """xPos: RoPE on q and k, with pair t multiplied by `zeta_t ** (d / span)` at distance d.

    RoPE whose scores also decay with distance, slow pairs less (Sun et al. 2022, arXiv 2212.10554).

    `zeta_t = (t / (D/2) + 0.4) / 1.4`. q at position p is multiplied by `zeta_t ** (p / span)`, k by the inverse, with
    p from the middle of the input. They exceed float32 above `longest` tokens.
    Options: `base`; `span` (512 tokens in the paper); `rescale` and `factor` of `Rotary`, which do not change the
    powers. Raises: ConfigError for a span that is not above 0.
    """

    keeps_norms = False

    def __init__(
        self,
        shape: Shape,
        base: float | str = 10000.0,
        span: float = 512.0,
        rescale: RescaleOption | None = None,
        factor: float | None = None,
    ) -> None:
        super().__init__(shape, ("q", "k"), base, rescale, factor)
        self.span = require_number("span", span, 1e-3, 1e9, "512 tokens in the paper")

    @property
    def longest(self) -> int:
        """Return the longest input in tokens for which the fastest pair's power fits float32 (30,594 at span 512)."""
        # The limit also keeps the scores of later keys, which are computed before they are masked, from overflowing.
        fastest_zeta = 0.4 / 1.4  # zeta_0
        return math.floor(_LARGEST * self.span / -math.log(fastest_zeta))

    def prepare(self, pos: Tensor, length: int) -> Any:
        """Return cosines and sines for q, times a power of zeta, and for k, times the inverse power."""
        cos_sin = super().prepare(pos, length)
        pairs = torch.arange(self.width // 2, dtype=torch.float64, device=pos.device)
        zeta = (pairs / (self.width // 2) + 0.4) / 1.4
        # Counted from the middle of the input, which keeps the factors small.
        power = zeta ** ((pos.to(torch.float64)[..., None] - length / 2) / self.span)
        cos, sin = cos_sin.cos, cos_sin.sin
        return cos_sin._replace(cos=cos * power, sin=sin * power), Turn(cos / power, sin / power)

    def q(self, x: Tensor, pos: Any) -> Tensor:
        return super().q(x, pos[0])

    def k(self, x: Tensor, pos: Any) -> Tensor:
        return super().k(x, pos[1])


class Pope(Scheme):
    """PoPE: compute scores as `sum_c softplus(q_c) softplus(k_c) cos(d w_c + delta_c)`, d being the distance.

    Content in the magnitudes and position in the angles of polar coordinates (arXiv 2509.10534).

    `w_c = base ** (-c / D)`. delta [H, D] is learned from 0 in each layer; the paper's has the opposite sign and is
    bounded to [-2 pi, 0]. Each channel becomes a cosine and a sine, so q and k get 2 D wide.
    Options: `base` (10000 as in the paper). Raises: ConfigError unless it is above 1.
    """

    keeps_norms = False
    per_layer = True

    def __init__(self, shape: Shape, base: float = 10000.0) -> None:
        super().__init__(shape)
        self.base = require_number("base", base, 1.001, 1e15, "10000 is usual")
        self.delta = nn.Parameter(torch.zeros(shape.num_heads, shape.head_dim))

    def prepare(self, pos: Tensor, length: int) -> Turn:
        """Return the cosines and sines of `p w_c` at positions p, [T, D] float64 each."""
        D = self.shape.head_dim
        inv_freq = self.base ** (-torch.arange(D, dtype=torch.float64, device=pos.device) / D)
        angles = pos.to(torch.float64)[..., None] * inv_freq
        return Turn.of(angles)

    def q(self, x: Tensor, pos: Turn) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        delta = self.delta.to(wide)[:, None]  # [H, 1, D]
        cos, sin = pos.cos.to(wide), pos.sin.to(wide)
        # Cosine and sine of (p w + delta) by the sum formulas: p w is shared by the layers, delta is the layer's.
        return _polar(x, cos * delta.cos() - sin * delta.sin(), sin * delta.cos() + cos * delta.sin())

    def k(self, x: Tensor, pos: Turn) -> Tensor:
        return _polar(x, pos.cos, pos.sin)

    def flops_per_token(self, length: int) -> float:
        """Return the extra FLOPs per token, in one layer, of scores with 2 D instead of D channels."""
        # On average a query sees half of the `length` keys.
        return 1.0 * self.shape.num_heads * self.shape.head_dim * length


def _polar(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    magnitude = F.softplus(x.to(wide))
    return torch.cat((magnitude * cos.to(wide), magnitude * sin.to(wide)), dim=-1).to(x.dtype)


class Ssmax(Scheme):
    """Scalable softmax: replace q_i by `s_h ln(i + 1) q_i`, with s learned for each layer and head (arXiv 2501.19399).

    i is the position, so scores are not relative, and the factor is the same with `window`, in which fewer tokens
    compete. The optional bias of the paper is omitted.
    """

    group = "biases on the scores"  # implemented by scaling q
    is_relative = False
    keeps_norms = False
    per_layer = True

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        # The last query of a training window is then initially unscaled.
        self.s = nn.Parameter(torch.full((shape.num_heads,), 1 / math.log(max(2, shape.context_length))))

    def prepare(self, pos: Tensor, length: int) -> Tensor:
        """Return `ln(i + 1)` for each position i in `pos`, [T, 1] float64."""
        return (pos.to(torch.float64)[..., None] + 1).log()

    def q(self, x: Tensor, pos: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        return (x.to(wide) * (self.s[:, None, None] * pos)).to(x.dtype)


class LogGrowth(Scheme):
    """Replace q_i by `(1 + slope ln(1 + floor((i + 1) / tokens))) q_i`, in which nothing is learned.

    Llama 4's layers without RoPE do this with 8,192 tokens and a slope of 0.1 ("temperature tuning", transformers:
    models/llama4/modeling_llama4.py).
    Options: `tokens` and `slope`.
    """

    group = "biases on the scores"  # implemented by scaling q
    is_relative = False
    keeps_norms = False

    def __init__(self, shape: Shape, tokens: int, slope: float = 0.1) -> None:
        super().__init__(shape)
        self.tokens = require_integer("tokens", tokens, 1, "the position at which scores begin to grow")
        self.slope = require_number("slope", slope, 0, 100, "0.1 is usual")

    def prepare(self, pos: Tensor, length: int) -> Tensor:
        """Return the factor of the query at each position, [T, 1] float64."""
        return 1 + self.slope * torch.log1p(((pos[..., None] + 1) // self.tokens).double())

    def q(self, x: Tensor, pos: Tensor) -> Tensor:
        return (x.to(torch.promote_types(x.dtype, torch.float32)) * pos).to(x.dtype)


class LogLength(LogGrowth):
    """HyPE's scale in softmax layers: replace q_i by `log_a(i + a) q_i`, in which nothing is learned.

    The first query is not scaled. From Chen et al. 2026 (arXiv 2601.22156) and their code:
    thunlp/hybrid-linear-attention, modeling_qwen3.py, `attn_logits_scaling`.
    Options: `a`, tokens. Raises: ConfigError for an `a` below 2.
    """

    def __init__(self, shape: Shape, a: int = 362) -> None:
        tokens = require_integer("a", a, 2, "362 tokens in the authors' code")
        super().__init__(shape, tokens, slope=1 / math.log(tokens))

    def prepare(self, pos: Tensor, length: int) -> Tensor:
        """Return the factor of the query at each position, [T, 1] float64."""
        return (pos[..., None] + self.tokens).double().log() / math.log(self.tokens)
