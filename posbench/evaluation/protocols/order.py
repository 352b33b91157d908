"""Measure how far back order matters: the loss when everything more than d tokens back is shuffled or replaced.

    whole      [ x_0 ... x_m-1               | x_m ... x_L ]    m = L // 2
    shuffled   [ the same tokens, shuffled   | x_m ... x_L ]
    other      [ tokens of another document  | x_m ... x_L ]

After Khandelwal et al. 2018 (arXiv 1805.04623). L is the length. All three end with the same tokens at the same
positions. There are d = t - m intact tokens, 1 or more, between the target x_t and the destroyed part. Two scores by d,
in nats per token:

    lost_order       shuffled - whole    what the order of tokens more than d back is worth (the tokens are the same)
    lost_identity    other - whole       what these tokens are worth at all

Copyable targets are those that a copier predicts correctly: it copies what followed the longest match of at least 4
tokens, more than 32 tokens back in the window. Their losses are stored apart, because order far back is worth most
there: `copyable_order` is lost_order over them.

"Order beyond 32" has one definition: the mean of lost_order over the targets with d = 33 to 64. During training
(`train.order_every`), it is scored too. A run's onset is the number of tokens trained on until it is worth ONSET.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pandas as pd

from posbench.config import ConfigError, EvaluationConfig
from posbench.data.text.overlap import copied
from posbench.evaluation.protocols.protocol import Advance, EvalProtocol, Metric, Scored
from posbench.evaluation.windows import choose_evenly, losses_of, too_long

if TYPE_CHECKING:
    from posbench.data import Corpus, Split
    from posbench.model.decoder import ScoredModel

FAR = "order_beyond_32"  # key of the rows of metrics.jsonl that decides the onset
FAR_FIRST, FAR_LAST = 33, 64  # distances d over which order beyond 32 is averaged, in results and while training
ONSET = 0.05  # nats/token; a model has begun to use long-range order when FAR is worth this
NEAR = (8, 16, 32)  # tokens; during training, the order of everything further back is scored for each of these
WINDOWS = 64  # windows of the validation text for these scores
REACH = 0.01  # nats/token that order must be worth, at the lower end of its interval, to count as used
LOSSES = ("nll", "shuffled_nll", "other_nll")  # columns of the three sequences, in their order
COPY_DISTANCE, COPY_MATCH = 32, 4  # of a copyable target: it is further back, after at least so many matching tokens
COPYABLE = "copyable_"  # beginning of the columns of targets and losses over copyable targets only
LOST_ORDER, LOST_IDENTITY = "lost_order", "lost_identity"  # metrics
COPYABLE_ORDER = "copyable_order"  # metric: lost_order over copyable targets only


class Order(EvalProtocol):
    """Evaluation protocol for the order of distant tokens: how much the loss rises if it is destroyed.

    Targets are in the second half of each window.
    """

    name = "order"
    rank = 3
    follows_lengths: ClassVar[bool] = False  # it is about distances within the training length
    decided_by: ClassVar[tuple[str, ...]] = ("order_windows",)
    figure_names: ClassVar[tuple[str, ...]] = (LOST_ORDER, LOST_IDENTITY)
    headline: ClassVar[str] = "loss without order, nats/token,"
    headline_key: ClassVar[str] = LOST_ORDER
    columns: ClassVar[Mapping[str, tuple[str, str]]] = {
        FAR: ("what order more than 32 tokens back is worth at the end (train.order_every)", "nats a token"),
        "onset_tokens": (
            f"trained until order more than 32 tokens back was worth {ONSET} nats; inf: not by the end",
            "tokens",
        ),
    }

    def score(
        self,
        model: ScoredModel,
        corpus: Corpus,
        split: Split,
        length: int,
        settings: EvaluationConfig,
        anchor: int,
        advance: Advance,
    ) -> Scored:
        starts = window_starts(split, length, settings.order_windows)
        scored = losses(model, split, starts, length, settings.batch_tokens, advance)
        rows = tabulate(scored, copyable_targets(split, starts, length), starts, split)
        sums = rows[["targets", *LOSSES]].sum()
        # How much the loss rises without the order, and without the tokens themselves, nats per token.
        lost = (sums[["shuffled_nll", "other_nll"]] - sums["nll"]) / sums["targets"]
        return rows, {
            "windows": len(starts),
            "documents": int(rows["document"].nunique()),
            "targets_total": int(sums["targets"]),
            "nll_mean": float(sums["nll"] / sums["targets"]),
            LOST_ORDER: float(lost["shuffled_nll"]),
            LOST_IDENTITY: float(lost["other_nll"]),
        }

    def metrics(self, columns: Any) -> Sequence[Metric]:
        targets = columns["targets"].astype(float)
        metrics = [
            (LOST_ORDER, columns["shuffled_nll"] - columns["nll"], targets),
            (LOST_IDENTITY, columns["other_nll"] - columns["nll"], targets),
        ]
        if f"{COPYABLE}targets" in columns:  # old results lack them
            lost = columns[f"{COPYABLE}shuffled_nll"] - columns[f"{COPYABLE}nll"]
            metrics.append((COPYABLE_ORDER, lost, columns[f"{COPYABLE}targets"].astype(float)))
        return metrics

    def tokens_read(self, settings: EvaluationConfig, length: int, anchor: int) -> int:
        return 3 * settings.order_windows * length

    def of_training(self, logged: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Return what the order of tokens more than 32 back was worth during training, and when that reached ONSET.

        Returns: its worth at the end (key FAR, nats per token), and `onset_tokens`, infinite if it is worth less than
        ONSET at the end; {} if `logged` has no such scores.
        """
        rows = [row for row in logged if row["kind"] == self.name]
        if not rows:
            return {}
        tokens = [row["tokens"] for row in rows]
        worth = [row[FAR] for row in rows]
        return {FAR: worth[-1], "onset_tokens": onset(tokens, worth, ONSET)}


def onset(tokens: Any, worth: Any, threshold: float) -> float:
    """Return the tokens until long-range order is worth `threshold`, or infinity."""
    # A run that has lost it again by the end counts as one that never used it.
    if worth[-1] < threshold:
        return math.inf
    # `crossing` finds where a curve falls, so both are negated.
    return crossing(tokens, np.negative(worth), -threshold)


def crossing(places: Any, values: Any, goal: float) -> float:
    """Return where a curve first falls to `goal`, linear between its points; infinity if never."""
    x, y = np.asarray(places), np.asarray(values)
    at_or_below = np.flatnonzero(y <= goal)
    if not len(at_or_below):
        return math.inf
    n = at_or_below[0]
    # Nothing is known before the first point.
    if n == 0:
        return float(x[0])
    return float(x[n - 1] + (x[n] - x[n - 1]) * (y[n - 1] - goal) / (y[n - 1] - y[n]))


def window_starts(split: Split, length: int, count: int) -> list[int]:
    """Return the sorted starts of `count` windows of `length` + 1 tokens, or of all windows if the text has fewer.

    Windows do not overlap or cross documents, and leave out a document's first token. Raises: ConfigError if no
    document is long enough.
    """
    document_sizes = np.diff(split.starts) - 1  # without the first token of each
    span = length + 1
    counts = document_sizes // span  # windows that each document can give
    if not counts.any():
        raise ConfigError(too_long(split, length, "in its longest document", int(document_sizes.max()) - 1))
    begins = []
    for begin, num_windows, spare in zip(split.starts[:-1], counts, document_sizes % span, strict=True):
        # The tokens that fill no window are left out at both ends of the document.
        begins.append(begin + 1 + spare // 2 + span * np.arange(num_windows))
    # Spread evenly over all documents that are long enough.
    return [int(begin) for begin in np.concatenate(begins)[choose_evenly(counts, count)]]


def sequences(split: Split, starts: Sequence[int], length: int, count: int = 3) -> np.ndarray:
    """Return three token sequences per window: `whole`, `shuffled` and `other`.

    Arguments: count, how many of the three to return, in this order.
    Returns: int64 [count, windows, length + 1]. Raises: ConfigError if no other document is half as long as a window.
    """
    middle = length // 2  # the first half is destroyed, except in `whole`
    document_sizes = np.diff(split.starts) - 1  # without the first token of each
    donors = np.flatnonzero(document_sizes >= middle)  # documents that can replace the first half
    versions = np.empty((count, len(starts), length + 1), dtype=np.int64)
    for n, start in enumerate(starts):
        # The window's start is the seed, so every scheme reads the same sequences.
        random = np.random.default_rng(start)
        versions[:, n] = split.tokens[start : start + length + 1]
        versions[1, n, :middle] = versions[0, n, :middle][random.permutation(middle)]
        # `other` is not wanted, so no second document is needed.
        if count < 3:
            continue
        candidates = donors[donors != split.document_of(start)]
        if not len(candidates):
            raise ConfigError(
                f"order at length {length} needs a second document of {middle} tokens, and the {split.name} split has "
                f"{split.num_documents} documents, one so long: give more text or ask for a shorter length"
            )
        donor = int(random.choice(candidates))
        begin = int(split.starts[donor]) + 1 + int(random.integers(document_sizes[donor] - middle + 1))
        versions[2, n, :middle] = split.tokens[begin : begin + middle]
    return versions


def worth_beyond_near(model: ScoredModel, split: Split, length: int, batch_tokens: int) -> dict[str, float]:
    """Return {`order_beyond_<d>`: nats per token}, what the order of tokens more than d back is worth, for d in NEAR.

    The key `copyable_order_beyond_32` is over copyable targets only. A d is left out if half a window is shorter than 2
    d.
    """
    middle = length // 2
    starts = window_starts(split, length, WINDOWS)
    # No figure needs the tokens after the last of these targets, so the model does not read them.
    scored = min(length - middle, FAR_LAST)
    versions = sequences(split, starts, length, 2)[:, :, : middle + scored + 1]
    whole, shuffled = (losses_of(model, version, scored, batch_tokens).astype(float) for version in versions)
    worth = shuffled - whole  # [windows, targets]; target i has i + 1 intact tokens before it
    # For each d in NEAR, the targets with d + 1 to 2 d intact tokens before them.
    figures = {f"order_beyond_{d}": float(worth[:, d : 2 * d].mean()) for d in NEAR if 2 * d <= worth.shape[1]}
    distances = slice(COPY_DISTANCE, 2 * COPY_DISTANCE)  # the targets of FAR
    is_copyable = copyable_targets(split, starts, length)[:, distances]
    if FAR in figures and is_copyable.any():
        figures[f"{COPYABLE}{FAR}"] = float(worth[:, distances][is_copyable].mean())
    return figures


def copyable_targets(split: Split, starts: Sequence[int], length: int) -> np.ndarray:
    """Return which targets of the windows' second halves are copyable, bool [windows, distances from 1]."""
    windows = np.stack([split.tokens[start : start + length + 1] for start in starts])
    return copied(windows, COPY_DISTANCE, COPY_MATCH)[:, length // 2 + 1 :]


def losses(
    model: ScoredModel,
    split: Split,
    starts: Sequence[int],
    length: int,
    batch_tokens: int,
    advance: Advance = lambda tokens: None,
) -> np.ndarray:
    """Return the losses of targets in the windows' second halves, nats, float64 [3, windows, distances from 1].

    The three are whole, shuffled and other. The distance is the number of tokens between the target and the first half.
    """
    versions = sequences(split, starts, length)
    return np.stack(
        [losses_of(model, version, length - length // 2, batch_tokens, advance) for version in versions]
    ).astype(float)


def bucket_edges(distances: int) -> np.ndarray:
    """Return int64 edges, ends exclusive, that cut d = 1 .. `distances` into buckets 1, 2, 3-4, 5-8, ..."""
    doublings = int(np.ceil(np.log2(distances)))
    powers = 1 + 2 ** np.arange(doublings)
    return np.unique(np.concatenate(([1], powers, [distances + 1])))


def tabulate(losses: np.ndarray, is_copyable: np.ndarray, starts: Sequence[int], split: Split) -> pd.DataFrame:
    """Return a table, a row per document and bucket of d, the distance to the shuffled or replaced first half.

    Columns: document, bucket_start, bucket_end (exclusive), targets, the sums of LOSSES in nats, and the same of
    copyable targets. Arguments: losses, [sequences, windows, d]; is_copyable, [windows, d].
    """
    _, windows, distances = losses.shape
    edges = bucket_edges(distances)
    bucket = np.searchsorted(edges, np.arange(1, distances + 1), side="right") - 1  # the bucket of each d
    columns: dict[str, Any] = {
        "document": np.repeat(split.document_of(starts), distances),
        "bucket_start": np.tile(edges[bucket], windows),
        "bucket_end": np.tile(edges[bucket + 1], windows),
        "targets": 1,
    }
    by_name = dict(zip(LOSSES, losses, strict=True))
    for name, nll in by_name.items():
        columns[name] = nll.ravel()
    columns[f"{COPYABLE}targets"] = is_copyable.ravel().astype(int)
    for name, nll in by_name.items():
        columns[f"{COPYABLE}{name}"] = (nll * is_copyable).ravel()
    flat = pd.DataFrame(columns)
    return flat.groupby(["document", "bucket_start", "bucket_end"], sort=True).sum().reset_index()
