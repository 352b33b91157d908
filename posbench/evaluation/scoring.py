"""Losses of a model over windows of a split, token by token."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pandas as pd
import torch

from posbench.data import Split
from posbench.evaluation.windows import Window
from posbench.model import Decoder


@torch.no_grad()
def score(
    model: Decoder,
    split: Split,
    windows: Sequence[Window],
    batch_tokens: int,
    advance: Callable[[int], object] = lambda tokens: None,
) -> np.ndarray:
    """Negative log-likelihoods of the scored targets of each window, in their order, nats, float32 [windows, scored].

    All windows have one length. `batch_tokens` bounds the tokens of a forward pass; `advance` is told the tokens done.
    """
    device = model.embedding.weight.device
    losses = []
    for batch in _batches(windows, batch_tokens):
        length, scored = batch[0].length, batch[0].scored
        rows = np.stack([split.tokens[w.start : w.start + length + 1] for w in batch]).astype(np.int64)
        tokens = torch.from_numpy(rows).to(device)
        losses.append(model.nll(tokens[:, :-1], tokens[:, 1:], last=scored).cpu())
        advance(len(batch) * length)
    # A loss that is not a number counts as infinite: pandas leaves NaN out of its sums, and the mean would be too good.
    return torch.cat(losses).nan_to_num(nan=math.inf, posinf=math.inf).numpy()


def _batches(windows: Sequence[Window], batch_tokens: int) -> Iterator[Sequence[Window]]:
    size = max(1, batch_tokens // windows[0].length)
    for n in range(0, len(windows), size):
        yield windows[n : n + size]


def tabulate_windows(losses: np.ndarray, windows: Sequence[Window], split: Split, bos_id: int) -> pd.DataFrame:
    """One row a window and document in it: document, start (first scored target), targets, nll (summed, nats), bytes.

    Beginning-of-document tokens are not scored: they are ours, not the text's.
    """
    starts = np.array([w.start + w.length - w.scored + 1 for w in windows])
    index = starts[:, None] + np.arange(windows[0].scored)[None, :]
    kept = np.asarray(split.tokens[index.ravel()]) != bos_id
    flat = pd.DataFrame(
        {
            "window": np.repeat(np.arange(len(windows)), windows[0].scored)[kept],
            "document": (np.searchsorted(split.starts, index.ravel(), side="right") - 1)[kept],
            "start": index.ravel()[kept],
            "nll": losses.ravel()[kept].astype(np.float64),
        }
    )
    table = flat.groupby(["window", "document"], sort=True).agg(
        start=("start", "min"), end=("start", "max"), targets=("start", "size"), nll=("nll", "sum")
    )
    table["bytes"] = [split.token_bytes(lo, hi + 1) for lo, hi in zip(table["start"], table["end"], strict=True)]
    return table.reset_index()[["document", "start", "targets", "nll", "bytes"]].astype({"targets": np.int32})
