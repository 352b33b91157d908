"""Choose windows of a split, compute a model's loss on each token in them, and tabulate the losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

if TYPE_CHECKING:
    from posbench.data import Split
    from posbench.model.decoder import ScoredModel


@dataclass(frozen=True)
class Window:
    """A window of a split: a model reads `length` tokens from `start` on and is scored on the last `scored` targets."""

    start: int
    length: int
    scored: int


def choose_evenly(counts: np.ndarray, number: int) -> np.ndarray:
    """Choose `number` windows, spread evenly over all documents: each gives equally many, or all it has.

    Arguments: counts, how many windows each document has, int [documents].
    Returns: the indices of the chosen windows, counted over all documents, ascending; all if there are fewer.
    """
    number = min(number, int(counts.sum()))
    # Documents give windows in rounds, one each. Bisect: the most whole rounds that give at most `number` windows.
    rounds, most_rounds = 0, int(counts.max(initial=0))
    while rounds < most_rounds:
        middle = (rounds + most_rounds + 1) // 2
        if int(np.minimum(counts, middle).sum()) <= number:
            rounds = middle
        else:
            most_rounds = middle - 1
    shares = np.minimum(counts, rounds).astype(np.int64)  # windows of each document, after the whole rounds
    # In the incomplete last round, the documents that give a window are spaced evenly among all that could.
    has_more = np.flatnonzero(counts > rounds)
    missing = number - int(shares.sum())
    shares[has_more[_evenly(missing, len(has_more))]] += 1
    # The chosen windows of a document are spaced evenly within it.
    firsts = np.cumsum(counts) - counts  # index of each document's first window
    chosen = [first + _evenly(share, n) for first, share, n in zip(firsts, shares, counts, strict=True) if share]
    if not chosen:
        return np.empty(0, np.int64)
    return np.concatenate(chosen).astype(np.int64)


def _evenly(number: int, total: int) -> np.ndarray:
    # The middles of `number` equal parts of 0 .. `total`.
    return (2 * np.arange(number) + 1) * total // (2 * max(1, number))


def losses_of(
    model: ScoredModel,
    rows: np.ndarray,
    scored: int,
    batch_tokens: int,
    advance: Callable[[int], object] = lambda tokens: None,
) -> np.ndarray:
    """Return the losses on the last `scored` targets of each row, nats, float32 [N, scored]; NaN becomes infinity.

    Arguments: rows, windows of tokens [N, T + 1]; batch_tokens, the most tokens of a forward pass; advance, called
    after each pass with its number of tokens.
    """
    import torch

    device, length = model.device, rows.shape[1] - 1
    losses, rows_per_pass = [], max(1, batch_tokens // length)
    for n in range(0, len(rows), rows_per_pass):
        tokens = torch.from_numpy(rows[n : n + rows_per_pass].astype(np.int64)).to(device)
        with torch.no_grad():
            losses.append(model.nll(tokens[:, :-1], tokens[:, 1:], last=scored).cpu())
        advance(len(tokens) * length)
    # Count NaN as infinite: pandas leaves NaN out of its sums, so the mean would be too good.
    return torch.cat(losses).nan_to_num(nan=math.inf, posinf=math.inf).numpy()


def scored_targets(losses: np.ndarray, windows: Sequence[Window], split: Split, bos_id: int) -> pd.DataFrame:
    """Return a row per scored target: window (its number), document, target (token index), nll (nats)."""
    scored = windows[0].scored  # the same number in all windows
    firsts = np.array([w.start + w.length - scored + 1 for w in windows])
    index = (firsts[:, None] + np.arange(scored)).ravel()
    rows = {"window": np.repeat(np.arange(len(windows)), scored), "target": index, "nll": losses.ravel().astype(float)}
    # BOS tokens are not scored, because they are not part of the text.
    is_text = np.asarray(split.tokens[index]) != bos_id
    return pd.DataFrame(rows)[is_text].assign(document=split.document_of(index[is_text]))


def tabulate_windows(losses: np.ndarray, windows: Sequence[Window], split: Split, bos_id: int) -> pd.DataFrame:
    """Return a row per window and document: document, start (first scored target), targets, nll (sum, nats), bytes."""
    rows = scored_targets(losses, windows, split, bos_id)
    table = rows.groupby(["window", "document"], sort=True).agg(
        start=("target", "min"), end=("target", "max"), targets=("target", "size"), nll=("nll", "sum")
    )
    table["bytes"] = [split.token_bytes(lo, hi + 1) for lo, hi in zip(table["start"], table["end"], strict=True)]
    return table.reset_index()[["document", "start", "targets", "nll", "bytes"]].astype({"targets": np.int32})


def too_long(split: Split, length: int, scope: str, tokens: int) -> str:
    """Return the error message for a length that is longer than the text.

    Arguments: scope, the part of it that has `tokens` tokens, such as "in all".
    """
    return (
        f"length {length} is longer than the text: the {split.name} split has {tokens} tokens {scope} "
        f"({split.num_documents} documents); ask for a shorter length or give longer text"
    )
