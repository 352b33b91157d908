"""Windows over a split, and the table of their losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

    from posbench.data import Split


@dataclass(frozen=True)
class Window:
    """Tokens `start .. start + length - 1` are read; the last `scored` of the targets after each are scored."""

    start: int
    length: int
    scored: int


def tabulate_windows(losses: np.ndarray, windows: Sequence[Window], split: Split, bos_id: int) -> pd.DataFrame:
    """One row a window and document in it: document, start (first scored target), targets, nll (summed, nats), bytes.

    Beginning-of-document tokens are not scored: they are ours, not the text's.
    """
    import pandas as pd

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


def too_long(split: Split, length: int, where: str, tokens: int) -> str:
    """The message for a length that the text does not reach."""
    return (
        f"length {length} is longer than the text: the {split.name} split has {tokens} tokens {where} "
        f"({split.num_documents} documents); ask for a shorter length or give longer text"
    )
