"""Losses of a model over windows of a split, token by token."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
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
