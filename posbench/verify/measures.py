"""Measure the errors of the certificates, one function each. 0 is perfect."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import TypeGuard

import numpy as np
import torch
from torch import Tensor

from posbench.attention import Softmax
from posbench.attention.kernels import Scoring
from posbench.reference.definition import Array
from posbench.reference.kinds import softmax_weights
from posbench.reference.rotations import rotation
from posbench.schemes import Scheme, rotate
from posbench.schemes.earlier import EarlierRows
from posbench.schemes.rotary import Rotary, Turn
from posbench.verify.gradients import training_errors
from posbench.verify.random_model import SHIFT, VOCAB, RandomModel, set_kernels

OUT = 1024  # tokens by which `shift` moves relative schemes as well
PIECE = 56  # tokens: three pieces, the last one short


def distance(a: Tensor, b: Tensor) -> float:
    """Return the largest absolute difference between entries of `a` and `b`, in float64."""
    return float((a.double().cpu() - b.double().cpu()).abs().max())


def shift(random_model: RandomModel) -> float:
    """Return the largest change of a logit when every position grows by `SHIFT`, per radian that a token adds."""
    model, tokens, scheme = random_model.wide, random_model.tokens, random_model.wide.scheme
    # Tokens beyond the scheme's longest input are dropped.
    if scheme.longest is not None:
        tokens = tokens[:, : max(1, scheme.longest - SHIFT)]
    moves = [(0, SHIFT)]  # positions of the first token whose logits are compared
    if scheme.longest is None:
        # FIRE is absolute only beyond the training length, so schemes that promise to be absolute are also tested
        # there. Schemes that promise to be relative are also tested further out.
        beyond = 2 * scheme.shape.context_length
        move = (0, OUT) if scheme.is_relative else (beyond, beyond + SHIFT)
        moves.append(move)
    change = max(distance(model(tokens, offset=start), model(tokens, offset=end)) for start, end in moves)
    # Cosines of large angles round in proportion to the angle, so a change may grow with the angles.
    return change / radians_per_token(random_model)


def radians_per_token(random_model: RandomModel) -> float:
    """Return the mean angle by which the fastest rotation grows per token: at least 1 (RoPE's), at most pi."""
    fastest = 1.0
    for scheme in random_model.wide.scheme.modules():
        if not isinstance(scheme, Scheme):
            continue
        turns = random_model.hook_positions(scheme)["k"]
        # Schemes whose hooks do not receive a `Turn` count as 1. Angles are known only up to whole turns.
        if isinstance(turns, Turn):
            z = torch.complex(turns.cos, turns.sin)
            # The angle from each token to the next, of the pair with the largest mean.
            fastest = max(fastest, float((z[..., 1:, :] * z[..., :-1, :].conj()).angle().abs().mean(-2).max()))
    return fastest


def norm(random_model: RandomModel) -> float:
    """Return the largest relative change of the norm of a random q, k, v or o by the scheme."""
    changes = []
    for scheme in random_model.schemes:
        positions = random_model.hook_positions(scheme)
        for site, x in random_model.heads.items():
            placed = scheme.call_hook(site, x, positions[site], EarlierRows())
            change = placed.norm(dim=-1) / x.norm(dim=-1) - 1
            changes.append(float(change.abs().max()))
    return max(changes)


def rotates(scheme: Scheme) -> TypeGuard[Rotary]:
    """Return whether a scheme rotates at least one of q, k, v and o, and keeps their norms."""
    return isinstance(scheme, Rotary) and bool(scheme.sites) and scheme.keeps_norms


def round_trip(random_model: RandomModel) -> float:
    """Return the largest difference between random vectors and the same rotated and rotated back."""
    worst = 0.0
    for scheme in random_model.schemes:
        if rotates(scheme):
            pos, r = random_model.hook_positions(scheme)["q"], scheme.width
            angles = scheme.angles(torch.arange(random_model.length), random_model.length)
            for site in scheme.sites:
                turned = getattr(scheme, site)(random_model.heads[site], pos)
                # The hook `o` is itself the inverse rotation.
                back = torch.cat((rotate(turned[..., :r], angles, inverse=site != "o"), turned[..., r:]), dim=-1)
                worst = max(worst, distance(back, random_model.heads[site]))
    return worst


def schemes_rotating_values(random_model: RandomModel) -> list[Rotary]:
    """Return the schemes that rotate both values and outputs, if attention is softmax."""
    return [s for s, _ in _value_rotations(random_model)]


def _value_rotations(random_model: RandomModel) -> list[tuple[Rotary, Softmax]]:
    architecture = random_model.wide.architecture
    pairs = dict(zip(architecture.scheme, architecture.kinds, strict=True)).items()
    return [(s, kind) for s, kind in pairs if isinstance(kind, Softmax) and rotates(s) and {"v", "o"} <= s.sites]


def offset_form(random_model: RandomModel) -> float:
    """Return how far the output with rotated values and outputs is from `sum_j a_ij R_(j-i) v_j`, at most.

    a_ij are the softmax weights, and R_d is the rotation by d positions.
    """
    return max(_offset_form_error(random_model, scheme, kind) for scheme, kind in _value_rotations(random_model))


def _offset_form_error(random_model: RandomModel, scheme: Rotary, kind: Softmax) -> float:
    x, D, T = random_model.heads, scheme.shape.head_dim, random_model.length
    pos = scheme.prepare(torch.arange(T), T)
    frequencies = tuple(scheme.angles(torch.ones(1), T)[0].tolist())
    q, k, v = (getattr(scheme, site)(x[site], pos) for site in "qkv")
    o = scheme.o(kind.attend(q, k, v, Scoring(kind.scale, sink=kind.sink)), pos)[0]
    # Explicit matrices, and one query at a time, as in the definition.
    R = {p: rotation(p, D, frequencies) for p in range(1 - T, T)}

    def turned(site: str, h: int) -> Array:
        rows = x[site][0, h].numpy()
        if site not in scheme.sites:
            return rows
        return np.stack([R[p] @ rows[p] for p in range(T)])

    worst = 0.0
    sinks = scheme.shape.num_heads * [-math.inf]  # a logit without weight
    if kind.sink is not None:
        sinks = kind.sink.tolist()
    for h in range(scheme.shape.num_heads):
        kv = h // (scheme.shape.num_heads // scheme.shape.num_kv_heads)
        queries, keys, values = turned("q", h), turned("k", kv), x["v"][0, kv].numpy()
        for i in range(T):
            a = softmax_weights(list(keys[: i + 1] @ queries[i] / math.sqrt(D)), sinks[h])
            expected = np.zeros(D)
            for j in range(i + 1):
                expected = expected + a[j] * R[j - i] @ values[j]
            worst = max(worst, distance(o[h, i], torch.from_numpy(expected)))
    return worst


def future(random_model: RandomModel) -> float:
    """Return the largest change of earlier logits when more tokens follow, or all tokens from t on change.

    Infinity if the logits at t do not change.
    """
    model, tokens, T = random_model.wide, random_model.tokens, random_model.length
    logits = model(tokens)
    # Five times as many tokens also run another kernel of attention. Not if logits depend on the input's length.
    times = 5 if model.scheme.is_streaming else 1
    more = tokens.repeat(1, times)[:, : model.scheme.longest]
    worst = distance(logits, model(more)[:, :T])
    for t in (1, T // 2, T - 1):
        changed = model(torch.cat((tokens[:, :t], (tokens[:, t:] + 1) % VOCAB), dim=1))
        # A model that ignores its input would pass.
        if torch.equal(logits[:, t], changed[:, t]):
            return float("inf")
        worst = max(worst, distance(logits[:, :t], changed[:, :t]))
    return worst


def batch(random_model: RandomModel) -> float:
    """Return the largest difference of logits of two sequences, at positions with gaps, in one batch and alone."""
    model, (tokens, positions) = random_model.wide, random_model.batch
    single = [model(tokens[n : n + 1], positions=positions[n : n + 1]) for n in range(2)]
    return distance(model(tokens, positions=positions), torch.cat(single))


def growth(random_model: RandomModel) -> float:
    """Return the largest change of a logit when the window grows to twice the training length or more."""
    model, tokens, T = random_model.wide, random_model.tokens, random_model.length
    times = 2 * -(-max(model.scheme.shape.context_length, T) // T)
    return distance(model(tokens), model(tokens.repeat(1, times))[:, :T])


def decode(random_model: RandomModel) -> float:
    """Return the largest difference between logits decoded with caches and in one forward pass."""
    model, tokens = random_model.wide, random_model.tokens
    caches = model.caches(random_model.length)
    steps = [model.unembedding(model.hidden(tokens[:, t : t + 1], SHIFT, caches)) for t in range(random_model.length)]
    return distance(torch.cat(steps, dim=1), model(tokens, offset=SHIFT))


def definition(random_model: RandomModel) -> float:
    """Return the largest difference between the model's logits and `posbench.reference`'s."""
    return distance(random_model.wide(random_model.tokens, offset=SHIFT)[0], random_model.defined_logits(SHIFT))


def roundings(random_model: RandomModel, dtype: torch.dtype, rounding: float) -> tuple[float, str]:
    """Return the largest error of all code paths in `dtype`, in units of `rounding`, and its path."""
    errors = dict(path_errors(random_model, dtype, rounding, random_model.compiled))
    worst = max(errors, key=lambda path: (math.isnan(errors[path]), errors[path]))
    return errors[worst], worst


def path_errors(
    random_model: RandomModel, dtype: torch.dtype, rounding: float, compiled: bool, devices: Sequence[str] | None = None
) -> Iterator[tuple[str, float]]:
    """Yield the name and error of each code path: attention kernels, windows read in pieces, schemes and training.

    An error is the norm of the difference from the float64 result, divided by that result's norm, by `rounding`, the
    relative rounding of `dtype`, and, unless it is a hook's, by `stretch` and the attention's sensitivity: how much
    scheme and attention enlarge roundings.
    Arguments: compiled, whether to test compiled training too; devices, by default the CPU, and a GPU if there is one.
    """

    def error(result: Tensor, expected: Tensor) -> float:
        difference = result.double().cpu() - expected
        return float(difference.norm() / (expected.norm() or 1.0)) / rounding

    stretch = _stretch(random_model)
    if devices is None:
        devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    for device in devices:
        narrow = copy.deepcopy(random_model.narrow).to(device)
        narrow.compute_dtype = dtype
        tokens = random_model.tokens.to(device)
        usual = [None for _ in narrow.architecture.kinds]  # None: attention chooses
        whole = ((name, kernels, None) for name, kernels in random_model.kernels(narrow).items())
        # Every kernel on the whole window, then the usual ones in pieces.
        for path, kernels, piece in [*whole, ("pieces", usual, PIECE)]:
            narrow.piece = piece
            set_kernels(narrow, kernels)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "flex_attention called without torch.compile")  # that takes a minute
                logits = narrow(tokens, offset=random_model.far)[0]
            yield f"{device} {path}", error(logits, random_model.far_logits) / stretch / random_model.sensitivity
        # Each hook by itself, with weights in float32 against the same scheme in float64.
        for scheme, exact in zip(dict.fromkeys(narrow.scheme), random_model.schemes, strict=True):
            rounded = random_model.hook_positions(scheme, random_model.far, device)
            precise = random_model.hook_positions(exact, random_model.far)
            for site, heads in random_model.heads.items():
                x = heads.to(device, dtype)
                expected = exact.call_hook(site, x.double().cpu(), precise[site], EarlierRows())
                yield f"{device} hook {site}", error(scheme.call_hook(site, x, rounded[site], EarlierRows()), expected)
        if compiled or device == "cuda":
            for path, roundings in training_errors(random_model, narrow, dtype, rounding, compiled):
                yield f"{device} {path}", roundings / stretch  # divided by the sensitivity already


def _stretch(random_model: RandomModel) -> float:
    # A scheme that enlarges q . k, as SSMax does, enlarges its rounding error alike.
    stretch = 1.0
    for scheme in random_model.schemes:
        if not scheme.keeps_norms:
            positions, D = random_model.hook_positions(scheme, random_model.far), scheme.shape.head_dim
            q, k = random_model.heads["q"], random_model.heads["k"]
            hooked_q, hooked_k = (
                scheme.call_hook(site, x, positions[site], EarlierRows()) for site, x in (("q", q), ("k", k))
            )
            # Count only the original channels: appended ones were measured to need no allowance.
            stretch = max(stretch, _products(hooked_q[..., :D], hooked_k[..., :D]) / _products(q, k))
    return stretch


def _products(q: Tensor, k: Tensor) -> float:
    return float((q * k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)).abs().mean())
