"""RoPE and its relatives: rotate any of q, k, v and o (the four sites) by angles that grow with position.

    R_p rotates the pair of channels (t, t + D/2) by p * inv_freq_t radians,  inv_freq_t = base ** (-2t / D)

q, k and v are rotated by R at their own position; o, the attention output, by the INVERSE at the query's position. So
with q and k, scores depend only on j - i, and with v and o, o_i = sum_j a_ij R_(j-i) v_j. Su et al. 2021 (arXiv
2104.09864); for v and o, kexue.fm/archives/10862.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from posbench.config import ConfigError
from posbench.schemes.base import Scheme, Shape, require_number
from posbench.schemes.rescaling import RescaleOption, Rescaling
from posbench.system.plain import apply, is_plain
from posbench.system.torch_internals import as_dtype

SITES = ("q", "k", "v", "o")


class Turn(NamedTuple):
    """Cosines and sines of the rotation angles, each [T, D/2], or [B, heads, T, D/2] if they depend on content."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, angles: Tensor) -> Turn:
        """Return the cosines and sines of `angles`, radians."""
        return cls(angles.cos(), angles.sin())


class TemperedTurn(NamedTuple):
    """Cosines and sines of the rotation angles, and YaRN's factor for each channel of q, [D]."""

    cos: Tensor
    sin: Tensor
    # It is kept apart from the cosine, because v and o are not scaled.
    temperature: Tensor


def rotate(x: Tensor, angles: Tensor, inverse: bool = False) -> Tensor:
    """Return x [..., T, D] with channel pairs (t, t + D/2) rotated by `angles` [T, D/2] radians, back if `inverse`."""
    return turn(x, Turn.of(angles), inverse)


def turn(x: Tensor, cos_sin: Turn | TemperedTurn, inverse: bool = False) -> Tensor:
    """Return `x` [..., T, D] rotated by the angles with these cosines and sines, or back if `inverse`."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    # The inverse negates only the sine: the cosine is even, and negating both would add half a turn.
    sin = -cos_sin.sin.to(dtype) if inverse else cos_sin.sin.to(dtype)
    return apply(_Rotation, x, cos_sin.cos.to(dtype), sin)


class _Rotation(torch.autograd.Function):
    """A rotation of x [..., T, D] whose gradient is the inverse rotation, so x is saved only if angles are learned."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        needs_angle_grad = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        ctx.save_for_backward(cos, sin, *([x] if needs_angle_grad else []))
        return _rotate_pairs(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        cos, sin, *saved_x = ctx.saved_tensors
        grad_x = _rotate_pairs(grads[0], cos, -sin)
        if not saved_x:  # the angles are not learned
            return grad_x, None, None
        # The outputs are a cos - b sin and b cos + a sin.
        a, b = saved_x[0].to(cos.dtype).chunk(2, dim=-1)
        grad_a, grad_b = grads[0].to(cos.dtype).chunk(2, dim=-1)
        grad_cos = (grad_a * a + grad_b * b).sum_to_size(cos.shape)
        grad_sin = (grad_b * a - grad_a * b).sum_to_size(sin.shape)
        return grad_x, grad_cos, grad_sin


def _rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = x.to(cos.dtype)
    a, b = wide.chunk(2, dim=-1)
    if is_plain():  # code that torch.func transforms must not write into views
        return as_dtype(torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1), x.dtype)
    # In place, so that fewer temporary tensors are allocated.
    y = wide * torch.cat((cos, cos), dim=-1)
    y_a, y_b = y.chunk(2, dim=-1)
    y_a.addcmul_(b, sin, value=-1)
    y_b.addcmul_(a, sin)
    return as_dtype(y, x.dtype)


def inverse_frequencies(head_dim: int, base: float, device: torch.device | None = None) -> Tensor:
    """Compute `base ** (-2t / D)` for t = 0 .. D/2 - 1 on `device`: radians per token, [D/2] float64."""
    return base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim)


class Rotary(Scheme):
    """RoPE on any of the sites q, k, v, o. Subclasses change `frequencies` or rotate fewer channels (`width`).

    YaRN's temperature multiplies q if both q and k are rotated and attention is softmax.

    Options: `sites`, any of q, k, v, o; `base`, a number (10000 in the paper) or `context_length` for the training
    length; `rescale`, a name or transformers' `rope_parameters` (`posbench.schemes.rescaling`); `factor`, by default
    length of the window / training length. The last two are meant for `posbench eval --under rescale=yarn`, and for
    runs that continue another one in longer windows.
    Raises: ConfigError for an unknown or repeated site, a base that is not above 1, or an invalid rescaling.
    """

    def __init__(
        self,
        shape: Shape,
        sites: Sequence[str],
        base: float | str = 10000.0,
        rescale: RescaleOption | None = None,
        factor: float | None = None,
    ) -> None:
        super().__init__(shape)
        if not isinstance(sites, Sequence):
            raise ConfigError(
                f"scheme.sites={sites!r} is not a list: give any of {list(SITES)}, such as scheme.sites=[q,k]"
            )
        sites = [str(site) for site in sites]
        wrong = [site for site in sites if site not in SITES]
        if wrong or len(set(sites)) != len(sites):
            raise ConfigError(f"scheme.sites={sites} must name each of {list(SITES)} at most once, and nothing else")
        # A name takes the training length from `shape`; a mapping of transformers' parameters holds its own.
        self._reads_length = base == "context_length" or isinstance(rescale, str)
        if base == "context_length":
            base = shape.positions_length
        if rescale is None and factor is not None:
            raise ConfigError(f"scheme.factor={factor} needs scheme.rescale, such as scheme.rescale=yarn")
        self.sites = frozenset(sites)
        self.base = require_number("base", base, 1.001, 1e15, "10000 is usual")
        self.rescaling: Rescaling | None = None
        if rescale is not None:
            self.rescaling = Rescaling.of(rescale, factor, shape.positions_length)

    @property
    def is_relative(self) -> bool:  # type: ignore[override]
        """Return whether q and k are both rotated or neither, and v and o likewise."""
        return ("q" in self.sites) == ("k" in self.sites) and ("v" in self.sites) == ("o" in self.sites)

    @property
    def keeps_norms(self) -> bool:  # type: ignore[override]
        """Return True unless YaRN multiplies q by its temperature."""
        return not (self._takes_temperature and self.rescaling is not None and self.rescaling.is_tempered)

    @property
    def is_streaming(self) -> bool:  # type: ignore[override]
        """Return whether angles stay the same if more tokens follow."""
        return self.rescaling is None or self.rescaling.is_streaming

    @property
    def reads_length(self) -> bool:  # type: ignore[override]
        """Return whether the base or the rescaling is computed from the training length."""
        return self._reads_length

    @property
    def acts_on(self) -> frozenset[str]:
        return self.sites

    @property
    def moves_k_and_v_alike(self) -> bool:
        # An overridden k or v may change more than the sites tell.
        overridden = type(self).k is not Rotary.k or type(self).v is not Rotary.v
        return not overridden and ("k" in self.sites) == ("v" in self.sites)

    @property
    def width(self) -> int:
        """Return r, the even number of rotated channels: the first r of each head, in pairs (t, t + r/2)."""
        return self.shape.head_dim

    @property
    def schedule_base(self) -> float:
        """Return the base of the frequencies `base ** (-2t / D)`, without rescaling."""
        return self.base

    def frequencies(self, device: torch.device | None = None) -> Tensor:
        """Return the rotation frequencies before rescaling, [r/2] float64, radians per token."""
        return inverse_frequencies(self.width, self.base, device)

    def angles(self, pos: Tensor, length: int) -> Tensor:
        """Return the rotation angles `pos * inv_freq`, [T, r/2] radians, in float64, as long inputs need."""
        inv_freq = self.frequencies(pos.device)
        if self.rescaling is not None:
            inv_freq = self.rescaling.inv_freq(inv_freq, self.schedule_base, length)
        return pos.to(torch.float64)[..., None] * inv_freq

    def prepare(self, pos: Tensor, length: int) -> Any:
        """Return the cosines and sines of the rotation angles, [T, r/2] each, and YaRN's factor for q, in float64."""
        angles = self.angles(pos, length)
        # Subclasses may change norms in other ways, without a rescaling.
        if self.keeps_norms or self.rescaling is None:
            return Turn.of(angles)
        temperature = angles.new_ones(self.shape.head_dim)
        temperature[: self.width] = self.rescaling.temperature(length)  # transformers leaves the other channels
        return TemperedTurn(angles.cos(), angles.sin(), temperature)

    def q(self, x: Tensor, pos: Any) -> Tensor:
        if not isinstance(pos, TemperedTurn):
            return self._rotated("q", x, pos)
        dtype = torch.promote_types(x.dtype, torch.float32)
        return self._rotated("q", x.to(dtype) * pos.temperature.to(dtype), pos).to(x.dtype)

    def k(self, x: Tensor, pos: Any) -> Tensor:
        return self._rotated("k", x, pos)

    def v(self, x: Tensor, pos: Any) -> Tensor:
        return self._rotated("v", x, pos)

    def o(self, x: Tensor, pos: Any) -> Tensor:
        return self._rotated("o", x, pos)

    @property
    def _takes_temperature(self) -> bool:
        return self.sites >= {"q", "k"} and self.shape.attention == "softmax"

    def _rotated(self, site: str, x: Tensor, cos_sin: Turn | TemperedTurn) -> Tensor:
        if site not in self.sites:
            return x
        inverse = site == "o"
        r = self.width  # rotated channels
        if r == x.shape[-1]:
            return turn(x, cos_sin, inverse)
        return torch.cat((turn(x[..., :r], cos_sin, inverse), x[..., r:]), dim=-1)
