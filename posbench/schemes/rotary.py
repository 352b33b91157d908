"""Rotation of any of the four sites q, k, v, o by angles that grow with position (RoPE and its relatives).

    R_p turns the pair of channels (t, t + D/2) by p * inv_freq_t radians,  inv_freq_t = base ** (-2t / D)

q, k and v are rotated by R at their own position; o, the attention output, by the INVERSE at the query's position.
So q with k gives scores of j - i alone, and v with o gives o_i = sum_j a_ij R_(j-i) v_j.
Su et al. 2021 (arXiv 2104.09864); for v and o, kexue.fm/archives/10862.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from posbench.config import ConfigError
from posbench.schemes.base import Scheme, Shape, number
from posbench.schemes.rescaling import Rescaling, Trained
from posbench.system.inductor import as_dtype

SITES = ("q", "k", "v", "o")


class Turn(NamedTuple):
    """Cosines and sines of the angles, each [T, D/2] ([B, heads, T, D/2] by content), in the dtype they are used in."""

    cos: Tensor
    sin: Tensor


class TemperedTurn(NamedTuple):
    """... and what q is multiplied by, 0-d; never part of the cosine, which turns v and o too."""

    cos: Tensor
    sin: Tensor
    temperature: Tensor


def rotate(x: Tensor, angles: Tensor, inverse: bool = False) -> Tensor:
    """Turn the channel pairs (t, t + D/2) of x [..., T, D] by `angles` [T, D/2] radians, or back where `inverse`.

    A pure function of one tensor: norms are kept, the inverse undoes it. In at least float32, returned in x's dtype.
    """
    return turn(x, Turn(angles.cos(), angles.sin()), inverse)


def turn(x: Tensor, by: Turn | TemperedTurn, inverse: bool = False) -> Tensor:
    """`rotate` with the cosines and sines at hand, for callers that share them between layers."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    # The inverse negates the sine alone: the cosine is even, and negating both would turn by half a turn more.
    return _Turned.apply(x, by.cos.to(dtype), -by.sin.to(dtype) if inverse else by.sin.to(dtype))


class _Turned(torch.autograd.Function):
    """x [..., T, D] turned. The gradient of a rotation is the rotation back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        of_angles = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        ctx.save_for_backward(cos, sin, *([x] if of_angles else []))
        return _turned(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        cos, sin, *turned = ctx.saved_tensors
        of_x = _turned(above[0], cos, -sin)
        if not turned:
            return of_x, None, None
        (a, b), (of_a, of_b) = (x.to(cos.dtype).chunk(2, dim=-1) for x in (turned[0], above[0]))
        return of_x, (of_a * a + of_b * b).sum_to_size(cos.shape), (of_b * a - of_a * b).sum_to_size(sin.shape)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = x.to(cos.dtype)
    a, b = wide.chunk(2, dim=-1)
    y = wide * torch.cat((cos, cos), dim=-1)
    of_a, of_b = y.chunk(2, dim=-1)
    of_a.addcmul_(b, sin, value=-1)
    of_b.addcmul_(a, sin)
    return as_dtype(y, x.dtype)


def inverse_frequencies(head_dim: int, base: float, device: torch.device | None = None) -> Tensor:
    """`base ** (-2t / D)` for t = 0 .. D/2 - 1, radians a token, [D/2] float64; made on `device`, not copied there."""
    return base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim)


class Rotary(Scheme):
    """Rotate the sites named, and no other. A subclass has other `frequencies`, or rotates fewer channels (`width`).

    Options: `sites`, any of q, k, v, o; `base`, the wavelength's growth (10000 as in the paper), or `context_length`
    for the training length. `rescale`, one of pi, ntk, dynamic_ntk, yarn, yarn_code (`posbench.schemes.rescaling`), and
    its `factor`, by default length of the window / training length: meant for `posbench eval --under rescale=yarn`.
    YaRN's temperature multiplies q, where q and k are rotated under softmax attention.
    Raises: ConfigError for an unknown or repeated site, a base that is not above 1, or a bad rescaling.
    """

    def __init__(
        self,
        shape: Shape,
        sites: Sequence[str],
        base: float | str = 10000.0,
        rescale: str | None = None,
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
            raise ConfigError(f"scheme.sites={sites} must name each of {list(SITES)} at most once")
        if base == "context_length":
            base = shape.context_length
        if rescale is None and factor is not None:
            raise ConfigError(f"scheme.factor={factor} needs scheme.rescale, such as scheme.rescale=yarn")
        self.sites = frozenset(sites)
        self.base = number("base", base, 1.001, 1e15, "10000 is usual")
        self.rescaling = None if rescale is None else Rescaling(rescale, factor)

    @property
    def is_relative(self) -> bool:  # type: ignore[override]
        """If and only if rotations come in pairs: q with k, v with o."""
        return ("q" in self.sites) == ("k" in self.sites) and ("v" in self.sites) == ("o" in self.sites)

    @property
    def keeps_norms(self) -> bool:  # type: ignore[override]
        """But for a temperature, which makes q longer."""
        return not (self._takes_temperature and self.rescaling is not None and self.rescaling.is_tempered)

    @property
    def is_streaming(self) -> bool:  # type: ignore[override]
        """Unless the factor follows the length of the window: the angles of the first tokens then depend on it."""
        return self.rescaling is None or self.rescaling.factor is not None

    @property
    def acts_on(self) -> frozenset[str]:
        return self.sites

    @property
    def moves_k_and_v_alike(self) -> bool:
        own = type(self).k is not Rotary.k or type(self).v is not Rotary.v
        return not own and ("k" in self.sites) == ("v" in self.sites)

    @property
    def width(self) -> int:
        """r, the channels of each head that are rotated, from the first on, in pairs (t, t + r/2); even."""
        return self.shape.head_dim

    @property
    def schedule_base(self) -> float:
        """The base of `frequencies`, as trained."""
        return self.base

    def frequencies(self, device: torch.device | None = None) -> Tensor:
        """`inv_freq` as trained, [r/2] float64, radians a token."""
        return inverse_frequencies(self.width, self.base, device)

    def angles(self, pos: Tensor, length: int) -> Tensor:
        """`pos * inv_freq`, [T, r/2] radians in float64: exact enough for any length (bf16 and fp32 tables are not).

        Arguments: length, tokens of the whole window.
        """
        inv_freq = self.frequencies(pos.device)
        if self.rescaling is not None:
            inv_freq = self.rescaling.inv_freq(Trained(inv_freq, self.schedule_base, self.shape.context_length), length)
        return pos.to(torch.float64)[..., None] * inv_freq

    def prepare(self, pos: Tensor, length: int) -> Any:
        """Cosines and sines of the angles at the positions, computed in float64."""
        angles = self.angles(pos, length)
        if self.keeps_norms or self.rescaling is None:
            return Turn(angles.cos(), angles.sin())
        temperature = self.rescaling.temperature(length, self.shape.context_length)
        return TemperedTurn(angles.cos(), angles.sin(), angles.new_tensor(temperature))

    def q(self, x: Tensor, pos: Any) -> Tensor:
        if not isinstance(pos, TemperedTurn):
            return self._turned("q", x, pos)
        wide = torch.promote_types(x.dtype, torch.float32)
        return self._turned("q", x.to(wide) * pos.temperature.to(wide), pos).to(x.dtype)

    def k(self, x: Tensor, pos: Any) -> Tensor:
        return self._turned("k", x, pos)

    def v(self, x: Tensor, pos: Any) -> Tensor:
        return self._turned("v", x, pos)

    def o(self, x: Tensor, pos: Any) -> Tensor:
        return self._turned("o", x, pos)

    @property
    def _takes_temperature(self) -> bool:
        return self.sites >= {"q", "k"} and self.shape.attention == "softmax"

    def _turned(self, site: str, x: Tensor, by: Turn | TemperedTurn) -> Tensor:
        if site not in self.sites:
            return x
        inverse, r = site == "o", self.width
        if r == x.shape[-1]:
            return turn(x, by, inverse)
        return torch.cat((turn(x[..., :r], by, inverse), x[..., r:]), dim=-1)
