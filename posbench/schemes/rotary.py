"""Rotation of any of the four sites q, k, v, o by angles that grow with position (RoPE and its relatives).

    R_p turns the pair of channels (t, t + D/2) by p * inv_freq_t radians,  inv_freq_t = base ** (-2t / D)

q, k and v are rotated by R at their own position; o, the attention output, by the INVERSE at the query's position.
So q with k gives scores of j - i alone, and v with o gives o_i = sum_j a_ij R_(j-i) v_j.
Su et al. 2021 (arXiv 2104.09864); for v and o, kexue.fm/archives/10862.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from posbench.config import ConfigError
from posbench.schemes.base import Scheme, Shape

SITES = ("q", "k", "v", "o")


class Turn(NamedTuple):
    """Cosines and sines of the angles, each [T, D/2], float32 (float64 where the model is)."""

    cos: Tensor
    sin: Tensor


def rotate(x: Tensor, angles: Tensor, inverse: bool = False) -> Tensor:
    """Turn the channel pairs (t, t + D/2) of x [..., T, D] by `angles` [T, D/2] radians, or back where `inverse`.

    A pure function of one tensor: norms are kept, the inverse undoes it. In at least float32, returned in x's dtype.
    """
    return turn(x, Turn(angles.cos(), angles.sin()), inverse)


def turn(x: Tensor, by: Turn, inverse: bool = False) -> Tensor:
    """`rotate` with the cosines and sines at hand, for callers that share them between layers."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    cos, sin = by.cos.to(dtype), by.sin.to(dtype)
    # The inverse negates the sine alone: the cosine is even, and negating both would turn by half a turn more.
    signed = torch.stack((sin, -sin) if inverse else (-sin, sin), dim=-2)
    halves = x.to(dtype).unflatten(-1, (2, -1))  # [..., T, 2, D/2]
    # A flip of the halves, not a cat of slices: a compiler keeps its vectors (docs/performance.md).
    return (halves * cos[..., None, :] + halves.flip(-2) * signed).flatten(-2).to(x.dtype)


def inverse_frequencies(head_dim: int, base: float, device: torch.device | None = None) -> Tensor:
    """`base ** (-2t / D)` for t = 0 .. D/2 - 1, radians a token, [D/2] float64; made on `device`, not copied there."""
    return base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim)


class Rotary(Scheme):
    """Rotate the sites named, and no other.

    Options: `sites`, any of q, k, v, o; `base`, the wavelength's growth (10000 as in the paper).
    Raises: ConfigError for an unknown or repeated site or a base that is not above 1.
    """

    def __init__(self, shape: Shape, sites: Sequence[str], base: float = 10000.0) -> None:
        super().__init__(shape)
        if not isinstance(sites, Sequence):
            raise ConfigError(
                f"scheme.sites={sites!r} is not a list: give any of {list(SITES)}, such as scheme.sites=[q,k]"
            )
        sites = [str(site) for site in sites]
        wrong = [site for site in sites if site not in SITES]
        if wrong or len(set(sites)) != len(sites):
            raise ConfigError(f"scheme.sites={sites} must name each of {list(SITES)} at most once")
        if isinstance(base, bool) or not isinstance(base, (int, float)) or not 1 < base < 1e15:
            raise ConfigError(f"scheme.base={base} must lie above 1 and below 1e15 (10000 is usual)")
        self.sites = frozenset(sites)
        self.base = float(base)

    @property
    def is_relative(self) -> bool:  # type: ignore[override]
        """If and only if rotations come in pairs: q with k, v with o."""
        return ("q" in self.sites) == ("k" in self.sites) and ("v" in self.sites) == ("o" in self.sites)

    @property
    def acts_on(self) -> frozenset[str]:
        return self.sites

    @property
    def moves_k_and_v_alike(self) -> bool:
        own = type(self).k is not Rotary.k or type(self).v is not Rotary.v
        return not own and ("k" in self.sites) == ("v" in self.sites)

    def angles(self, pos: Tensor) -> Tensor:
        """`pos * inv_freq`, [T, D/2] radians in float64: exact enough for any length (bf16 and fp32 tables are not)."""
        return pos.to(torch.float64)[:, None] * inverse_frequencies(self.shape.head_dim, self.base, pos.device)

    def prepare(self, pos: Tensor, length: int) -> Turn:
        """Cosines and sines of the angles at the positions, computed in float64."""
        angles = self.angles(pos)
        return Turn(angles.cos(), angles.sin())

    def q(self, x: Tensor, pos: Turn) -> Tensor:
        return turn(x, pos) if "q" in self.sites else x

    def k(self, x: Tensor, pos: Turn) -> Tensor:
        return turn(x, pos) if "k" in self.sites else x

    def v(self, x: Tensor, pos: Turn) -> Tensor:
        return turn(x, pos) if "v" in self.sites else x

    def o(self, x: Tensor, pos: Turn) -> Tensor:
        return turn(x, pos, inverse=True) if "o" in self.sites else x
