"""Score the losses of non-overlapping windows by position.

How much of the loss comes from the start of windows? At which position past the training length does it rise?
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import pandas as pd

from posbench.config import EvaluationConfig
from posbench.data import Split
from posbench.evaluation.protocols.protocol import Score
from posbench.evaluation.protocols.section import ComparedRuns, Plot, Section, in_order
from posbench.evaluation.protocols.windowed import Windowed, stretches
from posbench.evaluation.windows import Window, scored_targets

BUCKETS_AN_OCTAVE = 2  # buckets per doubling of the position


class Position(Windowed):
    """Evaluation protocol for the loss by position in windows back to back, by log-spaced bucket of positions.

    The losses are summed by document and bucket.
    """

    name = "position"
    rank = 5
    shares_targets: ClassVar[bool] = True
    groups: ClassVar[tuple[str, ...]] = ("bucket_start", "bucket_end")
    scores: ClassVar[tuple[Score, ...]] = (Score("loss", "nll"),)

    def windows(self, split: Split, length: int, settings: EvaluationConfig, anchor: int) -> list[Window]:
        return stretches(split, anchor, length, settings)

    def sections(self, compared: ComparedRuns, every_length: bool) -> list[Section]:
        cells, holes = compared.at(self.name, metric="loss"), compared.holes.get((self.name, ""), [])
        title = "Loss by position"
        if cells.empty:
            return [Section(title, holes)] if holes else []
        cells = cells[(cells["length"] == cells["length"].max()) & (cells["scheme"] != compared.baseline)]
        cells = cells[cells["last"] > 0]
        plot = Plot(
            self.name,
            "distances",
            f"Gap to {compared.baseline} by position in the longest windows.",
            in_order(cells, compared.schemes).assign(
                x=lambda placed: np.sqrt((placed["first"] + 1) * (placed["last"] + 1)), y=lambda placed: placed["gap"]
            ),
            self.name,
            f"gap to {compared.baseline}, nats/token",
        )
        return [Section(title, holes, [plot], note="The numbers are in table.csv.")]

    def tabulate(self, losses: np.ndarray, windows: Sequence[Window], split: Split, bos_id: int) -> pd.DataFrame:
        """Return the table to store: a row per document and bucket of positions, with the sum of losses.

        Columns: document, bucket_start, bucket_end (exclusive), targets, nll (sum, nats). A target's position is the
        number of tokens before it, less one: the target at position 0 follows one token.
        Arguments: losses, [windows, scored] in nats; windows and split, the text that was scored; bos_id, the id of the
        BOS token, which is not scored.
        """
        rows = scored_targets(losses, windows, split, bos_id)
        position = rows["target"] - np.array([w.start + 1 for w in windows])[rows["window"]]
        edges = bucket_edges(windows[0].length)
        bucket = np.searchsorted(edges, position, side="right") - 1
        rows = rows.assign(bucket_start=edges[bucket], bucket_end=edges[bucket + 1])
        buckets = rows.groupby(["document", "bucket_start", "bucket_end"], sort=True)
        return buckets.agg(targets=("nll", "size"), nll=("nll", "sum")).reset_index()


def bucket_edges(length: int) -> np.ndarray:
    """Return log-spaced edges of buckets over positions 0 .. length - 1, int64. The first buckets hold one position.

    No bucket is narrower than the previous one, so the last bucket also takes the remainder.
    """
    octaves = int(np.ceil(np.log2(length)))
    edges = 2.0 ** (np.arange(0, octaves * BUCKETS_AN_OCTAVE + 1) / BUCKETS_AN_OCTAVE) - 1
    edges = np.unique(np.append(edges[edges < length].round().astype(np.int64), length))
    widths = np.diff(edges)
    return np.delete(edges, -2) if len(widths) > 1 and widths[-1] < widths[-2] else edges
