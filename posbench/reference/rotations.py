"""Define the schemes that rotate vectors, by explicit rotation matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from math import ceil, cos, exp, floor, log, log1p, pi, sin, sqrt
from typing import Any

import numpy as np

from posbench.config import Config
from posbench.reference.definition import Array, Definition


class Rotary(Definition):
    """RoPE: multiply q, k and v at position p by the rotation matrix R_p, and o by its transpose, the inverse."""

    sites: Sequence[str]
    base: Any = 10000.0
    rescale: str | Mapping[str, Any] | None = None
    factor: float | None = None

    def __init__(self, config: Config, weights: Mapping[str, Array], **options: Any) -> None:
        super().__init__(config, weights, **options)
        self.L = config.train.context_length
        self.length = self.L  # of the input, until `window` sets it
        # `base: context_length` stands for the training length.
        self.base = float(self.L if isinstance(self.base, str) else self.base)

    def window(self, length: int) -> None:
        self.length = length

    def frequencies(self, D: int) -> list[float]:
        """Return the r/2 frequencies, radians per token, of the pairs (t, t + r/2) in the first r channels."""
        return [float(self.base ** (-2 * t / D)) for t in range(D // 2)]

    def rescaled_frequencies(self, D: int) -> list[float]:
        w = self.frequencies(D)
        if self.rescale is None:
            return w
        return rescaled(w, self.rope_parameters, self.schedule_base, self.length)

    def matrix(self, p: int, D: int, h: int) -> Array:
        """Return the matrix [D, D] that multiplies vectors of head h at position p."""
        return rotation(p, D, tuple(self.rescaled_frequencies(D)))

    @property
    def schedule_base(self) -> float:
        return float(self.base)

    @property
    def rope_parameters(self) -> dict[str, Any]:
        """Return transformers' `rope_parameters` of the rescaling; a name means the training length."""
        if isinstance(self.rescale, Mapping):
            factor = self.factor or self.rescale["factor"]
            return {**self.rescale, "factor": factor}
        assert self.rescale is not None
        # By default as large as the window needs.
        factor = self.factor or max(1.0, self.length / self.L)
        if self.rescale == "dynamic_ntk":
            factor = 1.0
        return {"rope_type": NAMES[self.rescale], "factor": factor, _LENGTH: self.L}

    def q(self, x: Array, p: Any, h: int) -> Array:
        if "q" not in self.sites:
            return x
        rotated = self.matrix(p, len(x), h) @ x
        is_softmax = self.config.scheme.attention.get("kind", "softmax") == "softmax"
        # YaRN's temperature belongs to a softmax over rotated scores.
        if self.rescale is None or "k" not in self.sites or not is_softmax:
            return rotated
        is_rotated = np.arange(len(x)) < 2 * len(self.frequencies(len(x)))
        # transformers multiplies q and k by the factor; here q takes both.
        return np.where(is_rotated, attention_factor(self.rope_parameters) ** 2, 1.0) * rotated

    def k(self, x: Array, p: Any, h: int) -> Array:
        return self.matrix(p, len(x), h) @ x if "k" in self.sites else x

    def v(self, x: Array, p: Any, h: int) -> Array:
        return self.matrix(p, len(x), h) @ x if "v" in self.sites else x

    def o(self, x: Array, p: Any, h: int) -> Array:
        return self.matrix(p, len(x), h).T @ x if "o" in self.sites else x


@cache
def rotation(position: int, head_dim: int, frequencies: tuple[float, ...]) -> Array:
    """Return the matrix [D, D] that rotates coordinates (t, t + r/2) by position * frequencies[t] rad, t < r/2."""
    return rotation_by(tuple(position * frequency for frequency in frequencies), head_dim)


def rotation_by(angles: tuple[float, ...], head_dim: int) -> Array:
    """Return the matrix [D, D] that rotates coordinates (t, t + r/2) by angles[t] radians."""
    R, half = np.eye(head_dim), len(angles)
    for t, angle in enumerate(angles):
        u = t + half
        R[t, t], R[t, u] = cos(angle), -sin(angle)
        R[u, t], R[u, u] = sin(angle), cos(angle)
    return R


class LearnedFrequencies(Rotary):
    """LeRoPE: each frequency is multiplied by the exponential of a learned number."""

    def frequencies(self, D: int) -> list[float]:
        frequencies = super().frequencies(D)
        return [exp(number) * w for number, w in zip(self.weights["log_scale"], frequencies, strict=True)]


class LearnedBase(Rotary):
    """RoPE with the base multiplied by the exponential of a learned number."""

    def frequencies(self, D: int) -> list[float]:
        return [self.schedule_base ** (-2 * t / D) for t in range(D // 2)]

    @property
    def schedule_base(self) -> float:
        return float(self.base * exp(self.weights["log_scale"][0]))


class PartialRotation(Rotary):
    """The base class of RoPE that rotates only a `fraction` of the channels or pairs."""

    fraction: float


class PartialRotary(PartialRotation):
    """GPT-NeoX's RoPE: rotate the first `r = fraction * D` channels, with frequencies `base ** (-2t / r)`."""

    def frequencies(self, D: int) -> list[float]:
        return super().frequencies(int(D * self.fraction))


class KeyOffset(PartialRotary):
    """Key offset: GPT-NeoX's RoPE, and channels of a key that are not rotated are the previous token's (or 0)."""

    def after_hook(self, site: str, x: Array, positions: Sequence[Any], *h: int) -> Array:
        y = super().after_hook(site, x, positions, *h)
        # Channels from r on are not rotated: a key has them from the previous token.
        r = int(x.shape[1] * self.fraction)  # rotated channels
        if site == "k":
            for t in range(len(x)):
                y[t, r:] = x[t - 1, r:] if t > 0 else 0.0
        return y


class PRope(PartialRotation):
    """p-RoPE: RoPE with frequency 0 for all but the fastest `floor(fraction * D / 2)` pairs."""

    def frequencies(self, D: int) -> list[float]:
        rotated = floor(self.fraction * D / 2)  # pairs
        return [w if t < rotated else 0.0 for t, w in enumerate(super().frequencies(D))]


class Hope(Rotary):
    """HoPE: RoPE with frequency 0 for pairs with periods above the training length."""

    def frequencies(self, D: int) -> list[float]:
        return [0.0 if 2 * pi / w > self.L else w for w in super().frequencies(D)]


class Fope(Hope):
    """FoPE: rotate pair t by sums over the frequencies of HoPE, weighted by column t of a matrix for cos and for sin.

    The matrices of a key head are the identity plus `gain sqrt(2 / (n (n + Hkv)))` times normal numbers of NumPy's
    `RandomState(0)`, rounded to float32; n is the number of frequencies.
    """

    sites = ("q", "k")
    gain: float = 0.3

    def matrix(self, p: int, D: int, h: int) -> Array:
        H, Hkv = self.config.model.num_heads, self.config.model.kv_heads
        n = int(np.count_nonzero(self.frequencies(D)))
        # A fixed seed gives every layer the same numbers.
        normal = np.random.RandomState(0).standard_normal((2, Hkv, n, n)) * self.gain * sqrt(2 / (n * (n + Hkv)))
        key_head = h * Hkv // H
        A, B = np.identity(n) + normal[:, key_head]
        angles = p * np.array(self.rescaled_frequencies(D)[:n])
        cosines = np.cos(angles) @ np.float32(A)
        sines = np.sin(angles) @ np.float32(B)
        # Pairs that HoPE does not rotate stay as they are.
        R = np.eye(D)
        for t in range(n):
            u = t + D // 2
            R[t, t], R[t, u] = cosines[t], -sines[t]
            R[u, t], R[u, u] = sines[t], cosines[t]
        return R


class Clipped(Rotary):
    """Clipped RoPE: reduce frequencies with periods above the training length to 0 along a cosine."""

    def frequencies(self, D: int) -> list[float]:
        w = super().frequencies(D)
        # Fast pairs have seen whole turns in training and stay.
        fast = [f for f in w if 2 * pi / f <= self.L]
        slow = w[len(fast) :]
        reduced = [f * (1 + cos(pi * m / max(1, len(slow) - 1))) / 2 for m, f in enumerate(slow)]
        return fast + reduced


class Xpos(Rotary):
    """xPos: RoPE on q and k, with q at position p also multiplied by `zeta_t ** (p / span)` and k by the inverse."""

    sites = ("q", "k")
    span: float = 512.0

    def power(self, p: int, D: int) -> Array:
        zetas = [(t / (D / 2) + 0.4) / 1.4 for t in range(D // 2)]
        # Both channels of a pair have its power.
        return np.array([zeta ** (p / self.span) for zeta in zetas + zetas])

    def q(self, x: Array, p: Any, h: int) -> Array:
        return super().q(x, p, h) * self.power(p, len(x))

    def k(self, x: Array, p: Any, h: int) -> Array:
        return super().k(x, p, h) * self.power(-p, len(x))


class Pope(Definition):
    """PoPE: scores `sum_c softplus(q_c) softplus(k_c) cos((i - j) w_c + delta_c)`, using 2 D channels for D cosines."""

    base: float = 10000.0

    def q(self, x: Array, p: Any, h: int) -> Array:
        return self.polar(x, p, self.weights["delta"][h])

    def k(self, x: Array, p: Any, h: int) -> Array:
        return self.polar(x, p, np.zeros(len(x)))

    def polar(self, x: Array, p: int, delta: Array) -> Array:
        D = len(x)
        magnitudes = [max(y, 0) + log1p(exp(-abs(y))) for y in x]  # softplus
        angles = [p * self.base ** (-c / D) + delta[c] for c in range(D)]
        waves = [*map(cos, angles), *map(sin, angles)]
        return np.array(magnitudes + magnitudes) * np.array(waves)


# ---------------------------------------------------------------- frequencies rescaled for longer inputs

NAMES = {"pi": "linear", "ntk": "ntk", "dynamic_ntk": "dynamic", "yarn": "yarn_by_turns", "yarn_code": "yarn"}
_LENGTH = "original_max_position_embeddings"


def rescaled(w: Sequence[float], parameters: Mapping[str, Any], base: float, length: int) -> list[float]:
    """Return the r/2 frequencies `w`, rescaled for an input of `length` tokens.

    Arguments: parameters, transformers' `rope_parameters`, or with the types `ntk` or `yarn_by_turns`; base, of w.
    Sources: linear, arXiv 2306.15595; ntk and dynamic, bloc97 and emozilla 2023; yarn_by_turns, arXiv 2309.00071; yarn,
    the code of its authors; llama3, arXiv 2407.21783; longrope, arXiv 2402.13753; transformers' modeling_rope_utils.py.
    """
    p, kind = parameters, parameters["rope_type"]
    s, L = p["factor"], p.get(_LENGTH, 1)  # `linear` has no L and does not read it
    r = 2 * len(w)
    if kind == "linear":
        return [f / s for f in w]
    if kind == "longrope":
        divisors = p["long_factor" if length > L else "short_factor"]
        return [f / divisor for f, divisor in zip(w, divisors, strict=True)]
    if kind in ("ntk", "dynamic"):
        if kind == "dynamic":
            s = 1 + s * (max(length, L) / L - 1)
        # Factor of the base; r = 2 has one pair, which keeps its frequency.
        larger = s ** (r / (r - 2)) if r > 2 else 1.0
        return [f * larger ** (-2 * t / r) for t, f in enumerate(w)]
    shares = [1.0] * len(w)  # the share of each frequency that is not divided by s
    if kind == "yarn":
        # The pairs that turn `fast` and `slow` times in L tokens are the ends of the ramp.
        slow, fast = p.get("beta_slow") or 1, p.get("beta_fast") or 32
        first = r * log(L / (fast * 2 * pi)) / (2 * log(base))
        last = r * log(L / (slow * 2 * pi)) / (2 * log(base))
        if p.get("truncate", True):
            first, last = floor(first), ceil(last)
        low, high = max(first, 0), min(last, r - 1)
        for t in range(len(w)):
            squeezed = float(t > low)
            if low != high:
                squeezed = min(1.0, max(0.0, (t - low) / (high - low)))
            shares[t] = 1 - squeezed
    else:  # llama3, yarn_by_turns
        slow, fast = p.get("low_freq_factor", 1), p.get("high_freq_factor", 32)
        for t, f in enumerate(w):
            turns = L * f / (2 * pi)
            shares[t] = float(turns > fast)
            if slow <= turns <= fast:
                shares[t] = (turns - slow) / (fast - slow)
    return [f * (1 - share) / s + f * share for f, share in zip(w, shares, strict=True)]


def attention_factor(parameters: Mapping[str, Any]) -> float:
    """Return the factor by which transformers multiplies the rotated channels of q and k; 1 but for YaRN and longrope.

    Without further keys, YaRN's is equation 15 of arXiv 2309.00071, inverted. Arguments: as of `rescaled`.
    """
    kind, log_s = parameters["rope_type"], max(0.0, log(parameters["factor"]))
    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])
    if kind == "longrope":
        return float((1 + log_s / log(parameters[_LENGTH])) ** 0.5)
    if kind not in ("yarn", "yarn_by_turns"):
        return 1.0
    numerator, denominator = parameters.get("mscale"), parameters.get("mscale_all_dim")
    # transformers uses both scales or neither.
    if not numerator or not denominator:
        numerator, denominator = 1, 0
    return float((0.1 * numerator * log_s + 1) / (0.1 * denominator * log_s + 1))
