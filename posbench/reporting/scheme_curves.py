"""What a position scheme does, as curves over distance: to the score of equal content, and to the value that arrives.

    score(d)  what the scaled score of a query and a key of the same content is at distance d, less that at distance 0
    value(d)  how much of a value from distance d arrives at the query as it was sent
    decay(d)  RoFormer's long-term decay (arXiv 2104.09864, section 3.4.3): the mean over j of |sum_{t<j} exp(1j d w_t)|

The first two are means over random contents, asked of the scheme's own hooks in float64; the third is of a set of
frequencies alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from posbench.schemes import At, Scheme

Curve = NDArray[np.float64]
SAMPLES = 256  # random contents
FLAT = 1e-9  # a curve that moves by less says nothing


@dataclass(frozen=True)
class Curves:
    """Of one scheme in one layer, each [H, distances]; None where the scheme leaves that alone."""

    distances: Curve  # tokens
    score: Curve | None  # in the units of scaled scores
    value: Curve | None  # as a part of what was sent


@torch.no_grad()
def curves_of(scheme: Scheme, longest: int) -> Curves:
    """The curves of a scheme up to `longest` tokens of distance, seen from a query at that position.

    Arguments: scheme, of one layer, in any dtype; it is read in float64.
    """
    scheme = scheme.double()
    shape, length = scheme.shape, longest + 1
    H, D, C = shape.num_heads, shape.head_dim, shape.d_model
    generator = torch.Generator().manual_seed(0)
    # Of all heads alike, so that heads differ by what the scheme does alone.
    content = torch.randn(SAMPLES, 1, 1, D, dtype=torch.float64, generator=generator).expand(-1, H, -1, -1)
    stream = torch.randn(1, 1, C, dtype=torch.float64, generator=generator).expand(1, length, C)
    rows = np.unique(np.geomspace(1, longest, 200).round().astype(int))
    distances = np.concatenate(([0], rows))
    keys = torch.from_numpy(longest - distances)  # positions
    everywhere = scheme.prepare(torch.arange(length), length)
    here, there = scheme.prepare(torch.tensor([longest]), length), scheme.prepare(keys, length)

    q, k = scheme.q(content, here), scheme.k(content.expand(-1, -1, len(keys), -1), there)
    scores = (q @ k.transpose(-2, -1)).mean(0)[:, 0] / D**0.5
    at = At(here, query=longest, key=0, length=length)
    gate = scheme.gate(stream, everywhere)
    bias = scheme.bias(q, None if gate is None else gate.expand(SAMPLES, -1, -1, -1), at)
    if bias is not None:
        b, h = torch.arange(SAMPLES)[:, None, None, None], torch.arange(H)[:, None, None]
        added = bias(b, h, torch.tensor([[0]]), keys[None, :]).double()
        scores = scores + added.expand(SAMPLES, H, 1, -1).mean(0)[:, 0]
    sent = content.expand(-1, -1, len(keys), -1)
    arrived = scheme.o(scheme.v(sent, there), here)
    value = ((arrived * sent).sum(-1) / (sent * sent).sum(-1)).mean(0)
    return Curves(distances.astype(float), _unless_flat(scores - scores[:, :1]), _unless_flat(value))


def _unless_flat(curve: Tensor) -> Curve | None:
    array: Curve = curve.numpy()
    return None if np.ptp(array, axis=1).max() < FLAT else array


@torch.no_grad()
def similarity(scheme: Scheme, longest: int) -> Curves:
    """Of what a scheme adds to the embeddings: how alike the vectors of two positions are, as a cosine.

    `score` holds it, [1, distances], seen from position `longest`; None where nothing is added.
    """
    scheme = scheme.double()
    length, C = longest + 1, scheme.shape.d_model
    added = scheme.embed(torch.zeros(1, length, C, dtype=torch.float64), scheme.prepare(torch.arange(length), length))
    vectors = added[0].numpy()
    norms = np.linalg.norm(vectors, axis=1)
    distances = np.arange(length)
    if not norms.all():
        return Curves(distances.astype(float), None, None)
    cosines = (vectors @ vectors[-1] / norms / norms[-1])[::-1]
    return Curves(distances.astype(float), cosines[None, :], None)


def long_term_decay(frequencies: Sequence[float], longest: int = 1 << 16, bins: int = 160) -> tuple[Curve, Curve]:
    """`decay(d)` of frequencies (radians a token) in their order, as a part of its value at d = 0.

    Returns: distances, 0 and the middles of `bins` that grow geometrically up to `longest` tokens; the mean of the
    curve over whole distances in each bin (at most 64 of them), without which beats hide the course.
    """
    edges = np.unique(np.geomspace(1, longest, bins + 1).round().astype(int))
    middles, means = [0.0], [1.0]
    for low, high in pairwise(edges):
        distances = np.unique(np.linspace(low, high - 1, 64).round())
        sums = np.abs(np.exp(1j * np.outer(distances, frequencies)).cumsum(axis=1)).mean(axis=1)
        middles.append(float(distances.mean()))
        means.append(float(sums.mean()) / ((len(frequencies) + 1) / 2))
    return np.array(middles), np.array(means)


def distinct(scheme: Scheme) -> Iterator[tuple[int, Scheme]]:
    """The first layer that has each of the schemes that the layers have, and it."""
    seen: set[int] = set()
    for n in range(scheme.shape.num_layers):
        layer = scheme.layer(n)
        if id(layer) not in seen:
            seen.add(id(layer))
            yield n, layer
