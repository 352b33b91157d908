"""The errors that certificates measure, one function each; 0 is perfect."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import TypeGuard, cast

import numpy as np
import torch
from torch import Tensor

from posbench.attention import Softmax
from posbench.reference.definition import Array
from posbench.reference.kinds import softmax_weights
from posbench.reference.rotations import rotation
from posbench.schemes import Scheme, rotate
from posbench.schemes.rotary import Rotary
from posbench.verify.gradients import training_errors
from posbench.verify.specimen import SHIFT, VOCAB, Specimen, set_kernel

OUT = 1024  # tokens
PIECE = 56  # tokens: three pieces, the last one short


def distance(one: Tensor, other: Tensor) -> float:
    """The largest difference of an entry, in float64."""
    return float((one.double().cpu() - other.double().cpu()).abs().max())


def shift(specimen: Specimen) -> float:
    """How far the logits move when every position grows by `SHIFT`. Tokens beyond `scheme.longest` are dropped.

    A scheme may be absolute beyond the training length alone (FIRE), so one that promises to be is asked there too; one
    that promises to be relative is asked further out.
    """
    model, tokens, scheme = specimen.wide, specimen.tokens, specimen.wide.scheme
    if scheme.longest is not None:
        tokens = tokens[:, : max(1, scheme.longest - SHIFT)]
    moves = [(0, SHIFT)]
    if scheme.longest is None:
        beyond = 2 * scheme.shape.context_length
        moves.append((0, OUT) if scheme.is_relative else (beyond, beyond + SHIFT))
    return max(distance(model(tokens, offset=start), model(tokens, offset=end)) for start, end in moves)


def norm(specimen: Specimen) -> float:
    """How far the hooks change the length of a vector, as a part of it."""
    return max(
        float((getattr(scheme, site)(x, places[site]).norm(dim=-1) / x.norm(dim=-1) - 1).abs().max())
        for scheme in specimen.schemes
        for places in [specimen.places(scheme)]
        for site, x in specimen.heads.items()
    )


def rotates(scheme: Scheme) -> TypeGuard[Rotary]:
    """Whether a scheme rotates some site, and does no more there than that."""
    return isinstance(scheme, Rotary) and bool(scheme.sites) and scheme.keeps_norms


def round_trip(specimen: Specimen) -> float:
    """How far the inverse rotation misses the vector that a rotated site began with."""
    worst = 0.0
    for scheme in specimen.schemes:
        if rotates(scheme):
            pos, r = specimen.places(scheme)["q"], scheme.width
            angles = scheme.angles(torch.arange(specimen.length), specimen.length)
            for site in scheme.sites:
                turned = getattr(scheme, site)(specimen.heads[site], pos)
                back = torch.cat((rotate(turned[..., :r], angles, inverse=site != "o"), turned[..., r:]), dim=-1)
                worst = max(worst, distance(back, specimen.heads[site]))
    return worst


def turning_values(specimen: Specimen) -> list[Rotary]:
    """The schemes that turn values and outputs together, under softmax attention."""
    is_softmax = isinstance(specimen.wide.architecture.kinds[0], Softmax)
    return [s for s in specimen.schemes if is_softmax and rotates(s) and {"v", "o"} <= s.sites]


def offset_form(specimen: Specimen) -> float:
    """How far V with O is from `sum_j a_ij R_(j-i) v_j`, which knows distances alone."""
    return max(_offset_form_of(specimen, scheme) for scheme in turning_values(specimen))


def _offset_form_of(specimen: Specimen, scheme: Rotary) -> float:
    x, D, T = specimen.heads, scheme.shape.head_dim, specimen.length
    pos = scheme.prepare(torch.arange(T), T)
    frequencies = tuple(scheme.angles(torch.ones(1), T)[0].tolist())
    kind = cast(Softmax, specimen.wide.architecture.kinds[0])
    q, k, v = (getattr(scheme, site)(x[site], pos) for site in "qkv")
    o = scheme.o(kind.attend(q, k, v, None, kind.scale), pos)[0]
    R = {p: rotation(p, D, frequencies) for p in range(1 - T, T)}

    def turned(site: str, h: int) -> Array:
        rows = x[site][0, h].numpy()
        return np.stack([R[p] @ rows[p] for p in range(T)]) if site in scheme.sites else rows

    worst, sinks = 0.0, scheme.shape.num_heads * [-math.inf] if kind.sink is None else kind.sink.tolist()
    for h in range(scheme.shape.num_heads):
        kv = h // (scheme.shape.num_heads // scheme.shape.num_kv_heads)
        queries, keys, values = turned("q", h), turned("k", kv), x["v"][0, kv].numpy()
        for i in range(T):
            a = softmax_weights(list(keys[: i + 1] @ queries[i] / math.sqrt(D)), sinks[h])
            expected = sum((a[j] * R[j - i] @ values[j] for j in range(i + 1)), np.zeros(D))
            worst = max(worst, distance(o[h, i], torch.from_numpy(expected)))
    return worst


def future(specimen: Specimen) -> float:
    """How far logits before t move when all tokens from t on are others, for several t; infinite if those at t stay.

    And when so many follow that attention runs on another kernel, unless the scheme says that their number matters.
    """
    model, tokens, T = specimen.wide, specimen.tokens, specimen.length
    before = model(tokens)
    more = tokens.repeat(1, 5 if model.scheme.is_streaming else 1)[:, : model.scheme.longest]
    worst = distance(before, model(more)[:, :T])
    for t in (1, T // 2, T - 1):
        other = torch.cat((tokens[:, :t], (tokens[:, t:] + 1) % VOCAB), dim=1)
        after = model(other)
        if torch.equal(before[:, t], after[:, t]):
            return float("inf")
        worst = max(worst, distance(before[:, :t], after[:, :t]))
    return worst


def batch(specimen: Specimen) -> float:
    """How far the logits of two sequences in a batch are from those of each alone, at positions that leave some out."""
    model, (tokens, positions) = specimen.wide, specimen.batch
    alone = [model(tokens[n : n + 1], positions=positions[n : n + 1]) for n in range(2)]
    return distance(model(tokens, positions=positions), torch.cat(alone))


def growth(specimen: Specimen) -> float:
    """How far the logits move when the window goes on to twice the training length and more."""
    model, tokens, T = specimen.wide, specimen.tokens, specimen.length
    times = 2 * -(-max(model.scheme.shape.context_length, T) // T)
    return distance(model(tokens), model(tokens.repeat(1, times))[:, :T])


def decode(specimen: Specimen) -> float:
    """How far the logits are off when tokens come one by one, and each layer has what its kind kept of those before."""
    model, tokens = specimen.wide, specimen.tokens
    caches = model.caches(specimen.length)
    steps = [model.unembedding(model.hidden(tokens[:, t : t + 1], SHIFT, caches)) for t in range(specimen.length)]
    return distance(torch.cat(steps, dim=1), model(tokens, offset=SHIFT))


def definition(specimen: Specimen) -> float:
    """How far the logits are from those of `posbench.reference`."""
    return distance(specimen.wide(specimen.tokens, offset=SHIFT)[0], specimen.defined_logits(SHIFT))


def roundings(specimen: Specimen, dtype: torch.dtype, rounding: float) -> tuple[float, str]:
    """The largest error of any path in a number format, and which path: root mean squares, in roundings."""
    errors = dict(path_errors(specimen, dtype, rounding, specimen.compiled))
    worst = max(errors, key=lambda path: (math.isnan(errors[path]), errors[path]))
    return errors[worst], worst


def path_errors(
    specimen: Specimen, dtype: torch.dtype, rounding: float, compiled: bool, devices: Sequence[str] | None = None
) -> Iterator[tuple[str, float]]:
    """Each path that can run here, and its error: every kernel of the kind, in pieces, each hook alone, and training's.

    Arguments: devices, by default the CPU and, where there is one, a GPU.
    """

    def error(result: Tensor, expected: Tensor) -> float:
        difference = result.double().cpu() - expected
        return float(difference.norm() / (expected.norm() or 1.0)) / rounding

    stretch = _stretch(specimen)
    for device in devices or ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
        narrow = copy.deepcopy(specimen.narrow).to(device)
        narrow.compute_dtype = dtype
        tokens = specimen.tokens.to(device)
        kernels = narrow.architecture.kinds[0].kernels(
            specimen.schemes, specimen.has_bias, narrow.embedding.weight.device
        )
        for path, kernel, piece in [*((name, each, None) for name, each in kernels.items()), ("pieces", None, PIECE)]:
            narrow.piece = piece
            set_kernel(narrow, kernel)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "flex_attention called without torch.compile")  # that takes a minute
                yield f"{device} {path}", error(narrow(tokens, offset=specimen.far)[0], specimen.far_logits) / stretch
        for scheme, exact in zip(dict.fromkeys(narrow.scheme), specimen.schemes, strict=True):
            rounded, precise = specimen.places(scheme, specimen.far, device), specimen.places(exact, specimen.far)
            for site, heads in specimen.heads.items():
                x = heads.to(device, dtype)
                expected = getattr(exact, site)(x.double().cpu(), precise[site])
                yield f"{device} hook {site}", error(getattr(scheme, site)(x, rounded[site]), expected)
        if compiled or device == "cuda":
            for path, roundings in training_errors(specimen, narrow, dtype, rounding, compiled):
                yield f"{device} {path}", roundings / stretch


def _stretch(specimen: Specimen) -> float:
    """How many times larger hooks make the products of q and k, at least 1: they are rounded in proportion (SSMax)."""
    stretch = 1.0
    for scheme in specimen.schemes:
        if not scheme.keeps_norms:
            places, D = specimen.places(scheme, specimen.far), scheme.shape.head_dim
            q, k = specimen.heads["q"], specimen.heads["k"]
            # Of the channels that came in: those that are appended were measured to need no allowance.
            products = (
                _products(scheme.q(q, places["q"])[..., :D], scheme.k(k, places["k"])[..., :D]),
                _products(q, k),
            )
            stretch = max(stretch, products[0] / products[1])
    return stretch


def _products(q: Tensor, k: Tensor) -> float:
    """The mean size of `q_c k_c` at one position."""
    return float((q * k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)).abs().mean())
