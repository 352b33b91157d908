"""Measure heads: attention by distance, previous-token and induction scores, norms by frequency, biases by distance.

Stored rows have, for each window, layer and head, a `value` that is a sum over `queries`. Their ratio is the figure:

    attention    the share of attention on distances `first` to `last`, tokens; 0 is the query itself, and 1, the token
                 before it, is the previous-token score (Olsson et al. 2022, arXiv 2209.11895)
    first_token  the share of attention on the window's first token (an attention sink, arXiv 2309.17453)
    induction    in a random sequence read twice: the share of attention on the token after the query's first occurrence
                 (the prefix-matching score of Olsson et al.)
    bias         the bias that the scheme adds to the scores at distances `first` to `last`, nats
    q_norm, k_norm   the norm of the rotated channel pair `first` of q or k, counted from the fastest (Barbero et al.
                 2024, arXiv 2410.06205)

Queries are the tokens of a window's second half, so that each sees distances up to half the length; norms are over all
tokens. Windows of a task are problems, by default of the longest trained length, and have no induction score.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import pandas as pd

from posbench.config import Config, ConfigError, EvaluationConfig
from posbench.data import ProblemSplit
from posbench.evaluation.protocols.order import bucket_edges, window_starts
from posbench.evaluation.protocols.protocol import Advance, EvalProtocol, Scored

if TYPE_CHECKING:
    from torch import Tensor

    from posbench.attention.kernels import Scoring
    from posbench.model.decoder import Decoder, ScoredModel

WINDOWS = 32  # at most; `evaluation.windows` can lower it
LONGEST = 1024  # tokens of a window: attention is computed in float64, and time grows with the square of the length
CELLS = 2**24  # attention weights of a layer in memory at a time

PLACE = ["scheme", "seed", "measure", "layer", "head", "first", "last"]

Measured = tuple[str, int, np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # measure, layer, first, last, queries, sums


class Mechanism(EvalProtocol):
    """Evaluation protocol that measures heads: attention, biases and norms in windows of one length.

    The length is by default the training length.
    """

    name = "mechanism"
    rank = 6
    of_tasks: ClassVar[bool] = True
    follows_lengths: ClassVar[bool] = False
    is_compared: ClassVar[bool] = False
    decided_by: ClassVar[tuple[str, ...]] = ("windows",)
    figure_names: ClassVar[tuple[str, ...]] = ("previous_token", "induction")
    headline: ClassVar[str] = "previous-token score of the best head,"
    headline_key: ClassVar[str] = "previous_token"
    columns: ClassVar[Mapping[str, tuple[str, str]]] = {
        "measure": ("what a head does, as in posbench/evaluation/protocols/mechanism.py", ""),
        "layer": ("counted from 0", ""),
        "head": ("counted from 0; of k_norm, a key head", ""),
        "value_windows": ("half the 95 % interval over windows", ""),
    }

    def check(self, config: Config) -> None:
        """Raise ConfigError if no layer has softmax attention, or as other protocols do."""
        from posbench.schemes.building import layer_entries

        super().check(config)
        entries = layer_entries(config.scheme, config.model.num_layers)
        kinds = [entry.attention.get("kind", "softmax") for entry in entries]
        if "softmax" not in kinds:
            raise ConfigError(f"protocol mechanism reads attention weights, and attention of kind {kinds[0]} has none")

    def settings(self, config: Config) -> EvaluationConfig:
        """Return the settings with at most WINDOWS windows."""
        return replace(config.evaluation, windows=min(WINDOWS, config.evaluation.windows))

    def score(
        self,
        model: ScoredModel,
        corpus: Any,
        split: Any,
        length: int,
        settings: EvaluationConfig,
        anchor: int,
        advance: Advance,
    ) -> Scored:
        given_positions = None  # positions of the tokens; None: consecutive ones
        repeated = None  # random sequences that are read twice; None: a task, which has no induction score
        count = min(WINDOWS, settings.windows)
        if isinstance(split, ProblemSplit):
            problems = split.at_length(length, count)
            starts, tokens, given_positions = list(range(count)), problems.tokens, problems.positions
        else:
            # Spread over all documents: windows back to back would measure one place of the text.
            starts = window_starts(split, length, count)
            tokens = np.stack([split.tokens[start : start + length + 1] for start in starts]).astype(np.int64)
            vocab_size = model.vocab_size
            repeated = np.stack([_twice(start, length, vocab_size, corpus.bos_id) for start in starts])
        parts, losses = [], []
        windows_per_pass = max(1, CELLS // (model.num_heads * tokens.shape[1] ** 2))
        for n in range(0, len(starts), windows_per_pass):
            part = slice(n, n + windows_per_pass)
            part_positions = None if given_positions is None else given_positions[part]
            nll, measured = measure(model, tokens[part], positions=part_positions)
            losses.append(nll)
            # Induction is measured in a random sequence that is read twice.
            if repeated is not None:
                measured += measure(model, repeated[part], are_repeated=True)[1]
            parts += [_table(starts[part], *entry) for entry in measured]
            advance(2 * tokens[part].size)
        rows = pd.concat(parts, ignore_index=True)
        nll = np.concatenate(losses)
        figures = {"windows": len(starts), "targets_total": nll.size, "nll_mean": float(nll.mean())}
        # Each score is the largest of all heads.
        return rows, figures | {name: float(by_head.max()) for name, by_head in scores(rows).items() if len(by_head)}

    def tokens_read(self, settings: EvaluationConfig, length: int, anchor: int) -> int:
        return 2 * min(WINDOWS, settings.windows) * length

    def lengths(
        self, asked: Sequence[int], context_length: int, split: Any = None, configured: Sequence[int] = ()
    ) -> list[int]:
        """Return the requested lengths, else the training length, each at most LONGEST."""
        return sorted({min(n, LONGEST) for n in super().lengths(asked, context_length, split, configured)})


def scores(rows: pd.DataFrame) -> dict[str, pd.Series]:
    """Return the scores `previous_token`, `first_token` and `induction` of heads, a series by (layer, head) each."""
    by_name = {}
    # Score -> its measure, and the distance in the column `first`: 1 is the token before.
    places = {"previous_token": ("attention", 1), "first_token": ("first_token", 0), "induction": ("induction", 0)}
    for name, (measure, first) in places.items():
        is_measured = (rows["measure"] == measure) & (rows["first"] == first)
        measured = rows[is_measured].groupby(["layer", "head"])
        sums = measured[["value", "queries"]].sum()
        # The share of a head's attention, from 0 to 1, averaged over windows.
        by_name[name] = sums["value"] / sums["queries"]
    return by_name


def measure(
    model: ScoredModel, tokens: np.ndarray, are_repeated: bool = False, positions: np.ndarray | None = None
) -> tuple[np.ndarray, list[Measured]]:
    """Measure all attention heads for the queries in the second halves of windows.

    Arguments: tokens, windows [B, T + 1]; are_repeated, whether the second half of a window repeats its first; then
    only `induction` is measured; positions, [B, T], if they are not consecutive.
    Returns: losses in nats, [B, T - T // 2], and a `Measured` per layer and measure, with sums [B, H, distances or
    channel pairs].
    """
    import torch

    from posbench.model.decoder import Decoder

    device = model.device
    ids, length = torch.from_numpy(tokens).to(device), tokens.shape[1] - 1
    position_ids = None if positions is None else torch.from_numpy(positions).to(device)
    measured: list[Measured] = []

    # Called with a layer's number and its weights [B, H, T, T]; a decoder of posbench gives q, k and a bias too.
    def record(n: int, layer: dict[str, Any]) -> None:
        weights = layer["weights"][:, :, length // 2 :]  # of the queries in the second half
        if are_repeated:
            # The query at T // 2 + i repeats token i, so the token after the first occurrence is i + 1.
            shares = weights.diagonal(offset=1, dim1=2, dim2=3)[..., : length // 2]
            measured.append(_by_head("induction", n, shares))
        else:
            measured.append(_by_head("first_token", n, weights[..., 0]))
            measured.extend(_by_distance(n, weights, layer.get("bias")))
            if isinstance(model, Decoder):
                measured.extend(_norms(n, model.scheme[n], layer))

    # A model of transformers records its own attention (`posbench.huggingface.subject`).
    recording = _recording(model, record) if isinstance(model, Decoder) else cast(Any, model).recording(record)
    with torch.no_grad(), recording:
        nll = model.nll(ids[:, :-1], ids[:, 1:], last=length - length // 2, positions=position_ids)
    return nll.double().cpu().numpy(), measured


def attention_weights(q: Tensor, k: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor | None]:
    """Compute softmax attention in float64; return its weights and the bias (None without one), [B, H, T, T] each.

    Arguments: q [B, H, T, .] and k [B, Hkv, T, .], with position added.
    """
    import torch

    B, H, T = q.shape[:3]
    scale, bias, sink, window, *_ = scoring
    i, j = torch.arange(T, device=q.device)[:, None], torch.arange(T, device=q.device)[None]
    # Several query heads share a key head.
    keys = k.double().repeat_interleave(H // k.shape[1], dim=1)
    scores, bias_values = (q.double() @ keys.mT) * scale, None
    if bias is not None:
        # A bias is a function of batch, head, query and key.
        b, h = torch.arange(B, device=q.device).view(-1, 1, 1, 1), torch.arange(H, device=q.device).view(-1, 1, 1)
        bias_values = bias(b, h, i, j).double().expand(B, H, T, T)
        scores = scores + bias_values
    # A query sees no later keys and, with a window, only the last `window` ones.
    is_hidden = (j > i) if window is None else (j > i) | (i - j >= window)
    scores = scores.masked_fill(is_hidden, float("-inf"))
    # A sink is one more score per head, which takes a share of the weights and has no value.
    if sink is not None:
        scores = torch.cat((scores, sink.double().view(-1, 1, 1).expand(B, H, T, 1)), dim=-1)
    return scores.softmax(-1)[..., :T], bias_values


@contextmanager
def _recording(model: Decoder, record: Callable[[int, dict[str, Any]], None]) -> Iterator[None]:
    # In a `with` block, call `record` with the number of each softmax layer and {name: tensor} of its attention.
    from posbench.attention import Softmax

    kinds = {n: kind for n, kind in enumerate(model.architecture.kinds) if isinstance(kind, Softmax)}

    def kernel(n: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        # A plain kernel in place of the fused ones, which do not give their weights.
        weights, added = attention_weights(q, k, scoring)
        recorded = {"q": q, "k": k, "weights": weights}
        if added is not None:
            recorded["bias"] = added
        # Layer by layer, so that memory holds the weights of one layer only.
        record(n, recorded)
        return (weights @ v.double().repeat_interleave(q.shape[1] // v.shape[1], dim=1)).to(v.dtype)

    kernels, piece = [kind.kernel for kind in kinds.values()], model.piece
    for n, kind in kinds.items():
        kind.kernel = partial(kernel, n)
    model.piece = None  # windows are read whole
    try:
        yield
    finally:
        for kind, usual_kernel in zip(kinds.values(), kernels, strict=True):
            kind.kernel = usual_kernel
        model.piece = piece


def _by_head(measure: str, layer: int, shares: Tensor) -> Measured:
    # A measure with one number per head, the sum of `shares` [B, H, queries], has the distance 0.
    zero, queries = np.zeros(1, np.int64), np.full(1, shares.shape[2])
    return measure, layer, zero, zero, queries, shares.sum(2, keepdim=True).cpu().numpy()


def _by_distance(layer: int, weights: Tensor, bias: Tensor | None) -> Iterator[Measured]:
    """Yield the attention and, if there is one, the bias of each head, summed by bucket of distances.

    Arguments: weights [B, H, queries, T] of the last queries; bias [B, H, T, T].
    """
    import torch

    queries, length = weights.shape[2:]
    edges = np.concatenate(([0], bucket_edges(length - 1)))
    first, last = edges[:-1], edges[1:] - 1  # of each bucket, both inclusive; the last of all is length - 1
    positions = torch.arange(length, device=weights.device)
    distance = positions[length - queries :, None] - positions
    bucket = torch.bucketize(distance, torch.from_numpy(last).to(positions.device))

    # Sum values [B, H, queries, T] by bucket. Later keys, which have negative distances, count 0.
    def summed(values: Tensor) -> np.ndarray:
        flat = torch.where(distance >= 0, values, 0.0).flatten(2)
        return flat.new_zeros(*flat.shape[:2], len(first)).index_add_(2, bucket.flatten(), flat).cpu().numpy()

    # The weights of a query sum to 1 (less with a sink), so a sum divided by the number of queries is the share of a
    # bucket.
    yield "attention", layer, first, last, np.full(len(first), queries), summed(weights)
    if bias is not None:
        # Of the bias we want the mean, so its sum is divided by the number of pairs of query and key in a bucket.
        pairs = torch.bincount(bucket[distance >= 0].flatten(), minlength=len(first)).cpu().numpy()
        yield "bias", layer, first, last, pairs, summed(bias[:, :, -queries:])


def _norms(layer: int, scheme: Any, recorded: dict[str, Tensor]) -> Iterator[Measured]:
    """Yield the norms of the channel pairs of q and k, summed over tokens, if the scheme rotates these tensors."""
    from posbench.schemes.rotary import Rotary

    # Rotation does not change these norms; what changes them in another way is not measured.
    for site in ("q", "k"):
        if isinstance(scheme, Rotary) and site in scheme.sites and scheme.keeps_norms:
            x, half = recorded[site][..., : scheme.width].double(), scheme.width // 2
            # Channel i and channel i + width / 2 are a pair.
            norms = (x[..., :half].square() + x[..., half:].square()).sqrt()
            pair = np.arange(half)
            yield f"{site}_norm", layer, pair, pair, np.full(half, x.shape[2]), norms.sum(2).cpu().numpy()


def _table(
    starts: Sequence[int], measure: str, layer: int, first: Any, last: Any, queries: Any, sums: Any
) -> pd.DataFrame:
    # A row per window (of `starts`), head and distance or channel pair; the other arguments are those of a `Measured`.
    B, heads, count = sums.shape
    return pd.DataFrame(
        {
            "start": np.repeat(starts, heads * count),
            "measure": measure,
            "layer": layer,
            "head": np.tile(np.repeat(np.arange(heads), count), B),
            "first": np.tile(first, B * heads),
            "last": np.tile(last, B * heads),
            "queries": np.tile(queries, B * heads),
            "value": sums.ravel(),
        }
    )


def _twice(seed: int, length: int, vocab_size: int, bos_id: int) -> np.ndarray:
    # Return `length` + 1 tokens: length // 2 random ones, and then the same again and again.
    half = np.random.default_rng(seed).integers(vocab_size - 1, size=length // 2)
    # Skip BOS, which only begins documents.
    half += half >= bos_id
    return np.resize(half, length + 1)
