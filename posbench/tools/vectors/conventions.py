"""Compute what each position convention does, from the definitions in `posbench.reference`, with or without a mistake.

A field that ports get wrong has the right value by default. Shapes: T positions, H heads, G key heads, D channels of a
head, r of them rotated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from math import ceil, log, sqrt
from typing import Any, NamedTuple

import numpy as np

from posbench.composition.compose import compose
from posbench.config import Config
from posbench.reference.biases import T5, alibi_slopes
from posbench.reference.definition import Array, Rows
from posbench.reference.kinds import softmax_weights
from posbench.reference.rotations import (
    PartialRotary,
    PRope,
    Rotary,
    attention_factor,
    rescaled,
    rotation_by,
)

Values = dict[str, Array]  # name of a tensor -> its values


class Inputs(NamedTuple):
    """The inputs of a port. All numbers are exact in bfloat16 and float16."""

    q: Array  # [H, T, D]
    k: Array  # [G, T, D]
    v: Array  # [G, T, D]
    positions: list[int]  # [T], ascending
    sinks: Array  # [H], logits
    distances: list[int]  # tokens between query and key, for T5's buckets

    @property
    def length(self) -> int:
        """Return the length in tokens of an input that ends with the last position."""
        return self.positions[-1] + 1


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The base class of entries: one convention, and the tensors it makes of the inputs."""

    name: str
    summary: str  # one sentence
    source: str  # paper, or file of public code

    def values(self, inputs: Inputs) -> Values:
        """Return the tensors of this entry, in float64."""
        raise NotImplementedError

    def settings(self) -> dict[str, Any]:
        """Return what a port must be told to compute this entry."""
        return {}


@dataclass(frozen=True, kw_only=True)
class Attention(Entry):
    """The base class of entries with scores [H, T, T] or attention outputs [H, T, D]."""

    has_sink: bool = False  # whether each head's sink is one more logit of the softmax, with value 0
    sink_is_left_out: bool = False
    heads_are_tiled: bool = False  # whether query head h reads key head h % G instead of h // (H / G)
    is_scaled: bool = True  # whether q . k is divided by sqrt(D)

    def scores(self, q: Array, k: Array) -> Array:
        """Return the scores of each query and the keys up to its own position; later keys have 0."""
        scale = sqrt(q.shape[2]) if self.is_scaled else 1.0
        return np.tril(q @ self._for_heads(k, len(q)).transpose(0, 2, 1) / scale)

    def outputs(self, scores: Array, v: Array, inputs: Inputs) -> Array:
        """Return the outputs of softmax attention, [H, T, D]. Arguments: scores [H, T, T]; v [G, T, D]."""
        values = self._for_heads(v, len(scores))
        has_sink = self.has_sink and not self.sink_is_left_out
        outputs = np.zeros((*scores.shape[:2], v.shape[2]))
        for h, t in np.ndindex(*scores.shape[:2]):
            sink = float(inputs.sinks[h]) if has_sink else -np.inf
            outputs[h, t] = softmax_weights(list(scores[h, t, : t + 1]), sink) @ values[h, : t + 1]
        return outputs

    def _for_heads(self, x: Array, num_heads: int) -> Array:
        group = num_heads // len(x)
        if self.heads_are_tiled:
            return np.tile(x, (group, 1, 1))
        return np.repeat(x, group, axis=0)


@dataclass(frozen=True, kw_only=True)
class Rotation(Attention):
    """RoPE: rotate pairs of channels of the tensors `sites` by position * frequency; outputs o by the inverse."""

    sites: tuple[str, ...] = ("q", "k")
    base: float = 10000.0
    fraction: float = 1.0  # r / D
    is_proportional: bool = False  # whether slow pairs of all D channels have frequency 0, as in p-RoPE
    rescale: Mapping[str, Any] | None = None  # transformers' `rope_parameters`
    pairing: str = "half"  # pairs are half: (t, t + r/2); adjacent: (2t, 2t + 1)
    side: str = "first"  # the rotated channels are the first or the last r
    shares_kv: bool = False  # whether the rotated keys are also the values

    # What ports get wrong.
    direction: int = 1
    first_position: int = 0
    other_width: bool = False  # frequencies from D instead of r, or from r instead of D
    exponent_is_halved: bool = False  # frequencies base ** (-t / r) instead of base ** (-2t / r)
    frequency_format: str = "float64"
    position_format: str = "float64"
    angle_format: str = "float64"
    sine_of_unrotated: float = 0.0  # of pairs with frequency 0
    attention_power: tuple[int, int] = (1, 1)  # how often q and k are multiplied by the attention factor
    ignored_keys: tuple[str, ...] = ()  # of `rope_parameters`
    ramp_in_turns: bool = False  # YaRN's ramp as in the paper instead of the public code
    is_short_input: bool = False  # whether the input's length is taken as the original one
    value_rotations: int = 1
    inverse: str = "transpose"  # of outputs: transpose | none | forward | negated

    def settings(self) -> dict[str, Any]:
        rescale = dict(self.rescale or {"rope_type": "default"})
        if self.is_proportional:
            rescale["rope_type"] = "proportional"
        parameters = {**rescale, "rope_theta": self.base, "partial_rotary_factor": self.fraction}
        return {"rope_parameters": parameters, "pairs": self.pairing, "rotated_channels": self.side}

    def values(self, inputs: Inputs) -> Values:
        q, k = self.turned_q_and_k(inputs)
        scores = self.scores(q, k)
        values = {}
        if "q" in self.sites:
            values = {"q": q, "k": k, "scores": scores}
        v = k if self.shares_kv else inputs.v
        if "v" in self.sites and not self.shares_kv:
            for _ in range(self.value_rotations):
                v = turned(v, self.matrices(inputs))
            values["v"] = v
        if "o" in self.sites or self.has_sink:
            values["o"] = self._turned_back(self.outputs(scores, v, inputs), inputs)
        return values

    def turned_q_and_k(self, inputs: Inputs) -> tuple[Array, Array]:
        """Return q [H, T, D] and k [G, T, D], rotated and multiplied by the attention factor."""
        if "q" not in self.sites:
            return inputs.q, inputs.k
        D = inputs.q.shape[2]
        factor = np.ones(D)
        if self.rescale is not None:
            factor[self._rotated(D)] = attention_factor(self._used_parameters())
        matrices = self.matrices(inputs)
        q_power, k_power = self.attention_power
        return turned(inputs.q, matrices) * factor**q_power, turned(inputs.k, matrices) * factor**k_power

    def _turned_back(self, o: Array, inputs: Inputs) -> Array:
        """Return the outputs o [H, T, D] rotated as `inverse` says."""
        if "o" not in self.sites or self.inverse == "none":
            return o
        matrices = self.matrices(inputs)
        if self.inverse == "transpose":
            return turned(o, matrices.transpose(0, 2, 1))
        if self.inverse == "negated":  # a table of cosines and sines, all of them negated
            matrices[:, self._rotated(o.shape[2])] *= -1
        return turned(o, matrices)  # negated or forward

    def matrices(self, inputs: Inputs) -> Array:
        """Return the rotation matrix of each position, [T, D, D]."""
        D = inputs.q.shape[2]
        frequencies = self.frequencies(D, inputs.length)
        rotated = self._rotated(D)
        order = [*rotated, *(channel for channel in range(D) if channel not in rotated)]
        round_frequencies, round_positions, round_angles = (
            FORMATS[name] for name in (self.frequency_format, self.position_format, self.angle_format)
        )
        matrices = np.zeros((len(inputs.positions), D, D))
        # `matrix` is a view, filled below.
        for matrix, position in zip(matrices, inputs.positions, strict=True):
            p = self.direction * round_positions(np.array([position + self.first_position], float))
            angles = round_angles(p * round_frequencies(np.array(frequencies)))
            half_split = rotation_by(tuple(angles), D)  # of a head whose channels are in `order`
            for t, frequency in enumerate(frequencies):
                if frequency == 0:
                    half_split[t, t + len(frequencies)] = -self.sine_of_unrotated
                    half_split[t + len(frequencies), t] = self.sine_of_unrotated
            matrix[np.ix_(order, order)] = half_split
        return matrices

    def _rotated(self, D: int) -> list[int]:
        r = D if self.is_proportional else int(self.fraction * D)
        first = 0 if self.side == "first" else D - r
        channels = list(range(first, first + r))
        if self.pairing == "half":
            return channels
        return channels[0::2] + channels[1::2]

    def frequencies(self, D: int, length: int) -> list[float]:
        """Return the rotation frequencies in an input of `length` tokens: r/2 of them, radians per token."""
        w = self._schedule(D)
        parameters = self._used_parameters()
        # The base of `dynamic` follows the input, so the exponent is halved after the rescaling.
        is_halved_here = self.exponent_is_halved and parameters.get("rope_type") != "dynamic"
        if is_halved_here:
            w = [sqrt(frequency) for frequency in w]
        if self.rescale is None:
            return w
        if self.is_short_input:
            length = parameters.get("original_max_position_embeddings", length)
        if self.ramp_in_turns and parameters["rope_type"] == "yarn":
            slow, fast = parameters.get("beta_slow", 1), parameters.get("beta_fast", 32)
            parameters |= {"rope_type": "yarn_by_turns", "low_freq_factor": slow, "high_freq_factor": fast}
        frequencies = rescaled(w, parameters, self.base, length)
        if self.exponent_is_halved and not is_halved_here:
            frequencies = [sqrt(frequency) for frequency in frequencies]
        return frequencies

    def _schedule(self, D: int) -> list[float]:
        of_width_r = PartialRotary(a_config(), {}, sites=(), fraction=self.fraction, base=self.base).frequencies(D)
        if self.is_proportional and self.other_width:
            return of_width_r + [0.0] * (D // 2 - len(of_width_r))
        if self.is_proportional:
            return PRope(a_config(), {}, sites=(), fraction=self.fraction, base=self.base).frequencies(D)
        if self.other_width:
            return Rotary(a_config(), {}, sites=(), base=self.base).frequencies(D)[: len(of_width_r)]
        return of_width_r

    def _used_parameters(self) -> dict[str, Any]:
        return {key: value for key, value in (self.rescale or {}).items() if key not in self.ignored_keys}


@dataclass(frozen=True, kw_only=True)
class Xpos(Rotation):
    """xPos: scores of RoPE, with pair t multiplied by `zeta_t ** (distance / 512)`."""

    decay: int = 1  # 0: without, -1: the inverse powers

    def values(self, inputs: Inputs) -> Values:
        """Return the scores only: q and k depend on the origin that a port chooses, and their product does not."""
        q, k = self.turned_q_and_k(inputs)
        half, T = q.shape[2] // 2, len(inputs.positions)
        zeta = np.empty(2 * half)
        zeta[self._rotated(2 * half)] = np.tile((np.arange(half) / half + 0.4) / 1.4, 2)
        scores = np.zeros((len(q), T, T))
        for i, j in zip(*np.tril_indices(T), strict=True):
            power = self.decay * (inputs.positions[i] - inputs.positions[j]) / 512
            score = self.scores(q[:, [i]] * zeta**power, k[:, [j]])  # [H, 1, 1]
            scores[:, i, j] = score[:, 0, 0]
        return {"scores": scores}


@dataclass(frozen=True, kw_only=True)
class Alibi(Attention):
    """ALiBi: scores `q . k / sqrt(D) - slope * distance`."""

    bias_sign: int = -1
    bias_is_scaled: bool = False  # whether the bias is divided by sqrt(D) too
    bias_of_key: bool = False  # whether the bias is slope * the key's position
    rule: str = "interleaved"  # of `slopes_by`

    def values(self, inputs: Inputs) -> Values:
        positions = np.array(inputs.positions, float)
        distances = positions[:, None] - positions
        if self.bias_of_key:
            distances = np.broadcast_to(-positions, distances.shape)
        bias = self.bias_sign * slopes_by(self.rule, len(inputs.q))[:, None, None] * distances
        if self.bias_is_scaled:
            bias = bias / sqrt(inputs.q.shape[2])
        return {"scores": np.tril(self.scores(inputs.q, inputs.k) + bias)}


@dataclass(frozen=True, kw_only=True)
class AlibiSlopes(Entry):
    """ALiBi's slope of each head."""

    num_heads: int
    rule: str = "interleaved"  # of `slopes_by`

    def settings(self) -> dict[str, Any]:
        return {"num_heads": self.num_heads}

    def values(self, inputs: Inputs) -> Values:
        return {"slopes": slopes_by(self.rule, self.num_heads)}


def slopes_by(rule: str, H: int) -> Array:
    """Return ALiBi's slopes of H heads by the right rule, `interleaved`, or by a wrong one."""
    if rule == "geometric":
        return np.array([2 ** (-8 * h / H) for h in range(1, H + 1)])
    if rule == "larger_power":
        return np.array(alibi_slopes(2 ** ceil(log(H, 2)))[:H])
    if rule == "of_8_heads":
        return np.array([2.0**-h for h in range(1, H + 1)])
    return np.array(alibi_slopes(H))


@dataclass(frozen=True, kw_only=True)
class T5Buckets(Entry):
    """T5's bucket of each distance between a query and an earlier key."""

    is_bidirectional: bool = False
    sign_is_lost: bool = False  # whether distances are key minus query, so that all count as 0
    is_rounded_up: bool = False  # whether logarithms are

    def settings(self) -> dict[str, Any]:
        return {"num_buckets": 32, "max_distance": 128}

    def values(self, inputs: Inputs) -> Values:
        buckets: list[float] = []
        for distance in inputs.distances:
            if self.sign_is_lost:
                distance = 0
            if self.is_bidirectional:  # half of the buckets are for later keys
                buckets.append(t5_bucket(distance, 16))
            elif self.is_rounded_up:
                wide = 16 + ceil(16 * log(max(distance, 16) / 16) / log(8))
                buckets.append(min(31, distance, wide))
            else:
                buckets.append(t5_bucket(distance, 32))
        return {"buckets": np.array(buckets, float)}


@cache
def t5_bucket(distance: int, num_buckets: int) -> float:
    """Return the bucket of a distance in tokens, as the definition of T5 reads it."""
    definition = T5(a_config(), {"table": np.arange(float(num_buckets))[:, None]}, num_buckets=num_buckets)
    return definition.bias(0, 1, 0, Rows([0, distance], [], [], []))


def turned(x: Array, matrices: Array) -> Array:
    """Return x [heads, T, D] with each row multiplied by the matrix of its position, [T, D, D]."""
    return np.einsum("tde,hte->htd", matrices, x)


@cache
def a_config() -> Config:
    """Return a configuration, which definitions ask for and the ones used here do not read."""
    return compose(["scheme=qk_rope"])


def _bfloat16(x: Array) -> Array:
    # bfloat16 has 8 significant bits.
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.round(mantissa * 256) / 256, exponent)


FORMATS: dict[str, Callable[[Array], Array]] = {
    "float64": lambda x: x,
    "float32": lambda x: x.astype(np.float32).astype(np.float64),
    "bfloat16": _bfloat16,
}
