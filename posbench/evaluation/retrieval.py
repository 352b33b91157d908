"""The retrieval probe: is a passage easier for having been read `gap` tokens before, and is its order what helps?

    again      [ passage               | other text, gap tokens | the passage ]
    shuffled   [ its tokens, shuffled  | the same other text    | the passage ]
    control    [ another passage       | the same other text    | the passage ]

The three readings end with the same tokens at the same positions. Two scores, losses in nats per token:

    drop       control - again     the benefit of repetition. Expecting words that were seen before is enough for it.
    by_order   shuffled - again    the part that needs the order of the passage: both readings hold the same words.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
import torch

from posbench.config import ConfigError, EvaluationConfig
from posbench.data import Split
from posbench.model import Decoder


def places(split: Split, length: int, settings: EvaluationConfig, bos_id: int) -> list[tuple[int, int, int]]:
    """Where passage, other text and the other passage begin in the stream, for each trial; the same for every scheme.

    Trials are spread evenly over the split; the other text begins a third of the split further on, the other passage
    two thirds, so neither overlaps the passage. Passages hold no beginning of a document.
    """
    passage = settings.passage
    gap = length + 1 - 2 * passage
    if gap < 0:
        raise ConfigError(
            f"length {length} has no room for two passages of evaluation.passage={passage} tokens: ask for "
            f"{2 * passage} or more"
        )
    total = split.num_tokens
    third = total // 3
    if gap + 2 * passage > third:
        raise ConfigError(
            f"length {length} is too long for the retrieval probe: the {split.name} split has {total} tokens, "
            "and a third of it must hold the text between the passages"
        )
    found = []
    for start in np.linspace(0, total - 1, settings.windows, endpoint=False).astype(np.int64):
        spots = [
            _clear_of_documents(split, (int(start) + n * third) % total, size)
            for n, size in ((0, passage), (2, passage))
        ]
        middle = min((int(start) + third) % total, total - gap)
        if all(spot is not None for spot in spots) and not _overlap(spots[0], passage, middle, gap):
            found.append((spots[0], middle, spots[1]))
    if not found:
        raise ConfigError(
            f"the {split.name} split holds no place for the retrieval probe at length {length}: give longer "
            "text or ask for a shorter length"
        )
    return found  # type: ignore[return-value]


def _clear_of_documents(split: Split, start: int, size: int) -> int | None:
    """The first place from `start` on where `size` tokens lie inside one document, past its first token, or None."""
    document = int(np.searchsorted(split.starts, start, side="right") - 1)
    while document < split.num_documents:
        begin, end = int(split.starts[document]) + 1, int(split.starts[document + 1])
        start = max(start, begin)
        if start + size <= end:
            return start
        document += 1
        start = end
    return None


def _overlap(a: int | None, a_size: int, b: int, b_size: int) -> bool:
    assert a is not None
    return a < b + b_size and b < a + a_size


@torch.no_grad()
def probe(
    model: Decoder,
    split: Split,
    length: int,
    settings: EvaluationConfig,
    bos_id: int,
    advance: Callable[[int], object] = lambda tokens: None,
) -> pd.DataFrame:
    """One row a trial: document, start, gap (tokens), targets, and summed losses in nats of the passage.

    first_nll: read for the first time, at the start of the reading. second_nll: read again after the gap.
    control_nll: at the same place after the same gap, but read for the first time. shuffled_nll: after its own tokens
    in another order, that of a permutation drawn from `start`. The passage's first token is no target: nothing
    announces it.
    """
    passage, gap = settings.passage, length + 1 - 2 * settings.passage
    device = model.embedding.weight.device
    trials = places(split, length, settings, bos_id)
    size = max(1, settings.batch_tokens // length)
    rows = []
    for n in range(0, len(trials), size):
        batch = trials[n : n + size]
        of = [
            [
                np.asarray(split.tokens[at : at + count])
                for at, count in zip(trial, (passage, gap, passage), strict=True)
            ]
            for trial in batch
        ]
        again = np.stack([np.concatenate((p, text, p)) for p, text, _ in of])
        control = np.stack([np.concatenate((other, text, p)) for p, text, other in of])
        orders = [np.random.default_rng(start).permutation(passage) for start, _, _ in batch]
        shuffled = np.stack([np.concatenate((p[o], text, p)) for o, (p, text, _) in zip(orders, of, strict=True)])
        losses = []
        for reading in (again[:, :passage], again, control, shuffled):
            tokens = torch.from_numpy(reading.astype(np.int64)).to(device)
            nll = model.nll(tokens[:, :-1], tokens[:, 1:], last=passage - 1)
            losses.append(nll.double().sum(1).cpu().numpy())
            advance(reading.size)
        for (start, _, _), *sums in zip(batch, *losses, strict=True):
            document = int(np.searchsorted(split.starts, start, side="right") - 1)
            rows.append((document, start, gap, passage - 1, *sums))
    names = [f"{name}_nll" for name in ("first", "second", "control", "shuffled")]
    return pd.DataFrame(rows, columns=["document", "start", "gap", "targets", *names])
