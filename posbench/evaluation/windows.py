"""Windows over a split, the losses of a model in them token by token, and the table of these losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

if TYPE_CHECKING:
    from posbench.data import Split
    from posbench.model.decoder import Decoder


@dataclass(frozen=True)
class Window:
    """Tokens `start .. start + length - 1` are read; the last `scored` of the targets after each are scored."""

    start: int
    length: int
    scored: int


def choose_evenly(rooms: np.ndarray, number: int) -> np.ndarray:
    """`number` of all places, spread evenly over all documents: each has as many as the others, or all it has room for.

    Documents are dealt places in rounds. Those of the last round, which not all can have, are evenly spaced among the
    documents with room, and the places of a document are evenly spaced within it.

    Arguments: rooms, how many places each document has, int [documents].
    Returns: int64, ascending; place 0 is the first of the first document, and so on. All places where they are fewer.
    """
    number = min(number, int(rooms.sum()))
    low, high = 0, int(rooms.max(initial=0))  # the most whole rounds that `number` pays for
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if int(np.minimum(rooms, middle).sum()) <= number else (low, middle - 1)
    shares = np.minimum(rooms, low).astype(np.int64)
    has_room = np.flatnonzero(rooms > low)
    left = number - int(shares.sum())
    shares[has_room[_evenly(left, len(has_room))]] += 1
    firsts = np.cumsum(rooms) - rooms
    chosen = [first + _evenly(share, room) for first, share, room in zip(firsts, shares, rooms, strict=True) if share]
    return np.concatenate(chosen).astype(np.int64) if chosen else np.empty(0, np.int64)


def _evenly(number: int, room: int) -> np.ndarray:
    """`number` different places of `room`, each in the middle of its part."""
    return (2 * np.arange(number) + 1) * room // (2 * max(1, number))


def rooms_of(split: Split, targets: np.ndarray) -> np.ndarray:
    """How many of the places with these first `targets` (indices of tokens, ascending) each document has."""
    return np.bincount(split.document_of(targets), minlength=split.num_documents)


def losses_of(
    model: Decoder,
    rows: np.ndarray,
    scored: int,
    batch_tokens: int,
    advance: Callable[[int], object] = lambda tokens: None,
) -> np.ndarray:
    """Negative log-likelihoods of the last `scored` targets of rows of tokens [N, T + 1], nats, float32 [N, scored].

    `batch_tokens` bounds the tokens of a forward pass; `advance` gets the tokens done.
    """
    import torch

    device, length = model.embedding.weight.device, rows.shape[1] - 1
    losses, size = [], max(1, batch_tokens // length)
    for n in range(0, len(rows), size):
        tokens = torch.from_numpy(rows[n : n + size].astype(np.int64)).to(device)
        with torch.no_grad():
            losses.append(model.nll(tokens[:, :-1], tokens[:, 1:], last=scored).cpu())
        advance(len(tokens) * length)
    # A loss that is not a number counts as infinite: pandas leaves NaN out of its sums, and the mean would be too good.
    return torch.cat(losses).nan_to_num(nan=math.inf, posinf=math.inf).numpy()


def scored_targets(losses: np.ndarray, windows: Sequence[Window], split: Split, bos_id: int) -> pd.DataFrame:
    """One row a scored target: window (its number), document, target (index of the token), nll (nats).

    Beginning-of-document tokens are not scored: they are ours, not the text's.
    """
    scored = windows[0].scored
    firsts = np.array([w.start + w.length - scored + 1 for w in windows])
    index = (firsts[:, None] + np.arange(scored)).ravel()
    rows = {"window": np.repeat(np.arange(len(windows)), scored), "target": index, "nll": losses.ravel().astype(float)}
    kept = np.asarray(split.tokens[index]) != bos_id
    return pd.DataFrame(rows)[kept].assign(document=split.document_of(index[kept]))


def tabulate_windows(losses: np.ndarray, windows: Sequence[Window], split: Split, bos_id: int) -> pd.DataFrame:
    """One row a window and document: document, start (first scored target), targets, nll (summed, nats), bytes."""
    rows = scored_targets(losses, windows, split, bos_id)
    table = rows.groupby(["window", "document"], sort=True).agg(
        start=("target", "min"), end=("target", "max"), targets=("target", "size"), nll=("nll", "sum")
    )
    table["bytes"] = [split.token_bytes(lo, hi + 1) for lo, hi in zip(table["start"], table["end"], strict=True)]
    return table.reset_index()[["document", "start", "targets", "nll", "bytes"]].astype({"targets": np.int32})


def too_long(split: Split, length: int, where: str, tokens: int) -> str:
    """The message for a length that the text does not reach."""
    return (
        f"length {length} is longer than the text: the {split.name} split has {tokens} tokens {where} "
        f"({split.num_documents} documents); ask for a shorter length or give longer text"
    )
