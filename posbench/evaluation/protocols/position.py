"""Loss by position: how much of it stands near a window's start, and where a scheme turns past its training length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from posbench.evaluation.protocols.protocol import Score
from posbench.evaluation.protocols.windowed import Windowed, stretches
from posbench.evaluation.windows import Window

if TYPE_CHECKING:
    import pandas as pd

    from posbench.config import EvaluationConfig
    from posbench.data import Split

BUCKETS_AN_OCTAVE = 2


class Position(Windowed):
    """The windows of `nonoverlapping`, their losses added up by document and log-spaced bucket of positions."""

    name = "position"
    caption = "Loss by position in non-overlapping windows, in log-spaced buckets."
    columns: ClassVar[tuple[str, ...]] = ("document", "bucket_start", "bucket_end", "targets", "nll")
    has_anchor: ClassVar[bool] = True
    shares_windows: ClassVar[tuple[str, ...]] = ("nonoverlapping", "position")
    groups: ClassVar[tuple[str, ...]] = ("bucket_start", "bucket_end")
    scores: ClassVar[tuple[Score, ...]] = (Score("loss", lambda sums: sums["nll"] / sums["targets"]),)

    def windows(self, split: Split, length: int, settings: EvaluationConfig, anchor: int) -> list[Window]:
        return stretches(split, anchor, length, settings)

    def tabulate(self, losses: np.ndarray, windows: Sequence[Window], split: Split, bos_id: int) -> pd.DataFrame:
        return tabulate_positions(losses, windows, split, bos_id)


def bucket_edges(length: int) -> np.ndarray:
    """Log-spaced edges of buckets over positions 0 .. length - 1, the first positions each alone, int64.

    No bucket is narrower than the one before it: what is left over at the end belongs to the last.
    """
    octaves = int(np.ceil(np.log2(length)))
    edges = 2.0 ** (np.arange(0, octaves * BUCKETS_AN_OCTAVE + 1) / BUCKETS_AN_OCTAVE) - 1
    edges = np.unique(np.append(edges[edges < length].round().astype(np.int64), length))
    widths = np.diff(edges)
    return np.delete(edges, -2) if len(widths) > 1 and widths[-1] < widths[-2] else edges


def tabulate_positions(losses: np.ndarray, windows: Sequence[Window], split: Split, bos_id: int) -> pd.DataFrame:
    """One row a document and bucket: document, bucket_start, bucket_end (not in it), targets, nll (summed, nats).

    A target's position is the number of tokens read before it, less one: position 0 has seen one token.
    """
    import pandas as pd

    length = windows[0].length
    edges = bucket_edges(length)
    index = np.array([w.start for w in windows])[:, None] + np.arange(1, length + 1)[None, :]
    kept = np.asarray(split.tokens[index.ravel()]) != bos_id
    bucket = np.broadcast_to(np.searchsorted(edges, np.arange(length), side="right") - 1, losses.shape).ravel()[kept]
    document = (np.searchsorted(split.starts, index.ravel(), side="right") - 1)[kept]
    flat = pd.DataFrame({"document": document, "bucket": bucket, "nll": losses.ravel()[kept].astype(np.float64)})
    table = (
        flat.groupby(["document", "bucket"], sort=True).agg(targets=("nll", "size"), nll=("nll", "sum")).reset_index()
    )
    table.insert(1, "bucket_start", edges[table["bucket"]])
    table.insert(2, "bucket_end", edges[table["bucket"] + 1])
    return table.drop(columns="bucket")
