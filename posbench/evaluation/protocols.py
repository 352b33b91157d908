"""The protocols by name: each scores a model at one length and gives a table to store and the figures to print.

validation      the final held-out loss at the training length (training writes it)
fixed           the same targets at every length, only the left context grows
nonoverlapping  windows back to back, every target scored
sliding         windows moved by a stride, the last targets of each scored
position        loss by position within non-overlapping windows, in log-spaced buckets
retrieval       how much a passage's loss drops when it was read before, and by its order, against the gap
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from posbench.config import PROTOCOLS as ASKED_FOR
from posbench.config import ConfigError, EvaluationConfig, nearest
from posbench.data import Corpus, Split
from posbench.evaluation.positions import tabulate_positions
from posbench.evaluation.retrieval import probe
from posbench.evaluation.scoring import score, tabulate_windows
from posbench.evaluation.windows import Window, fixed, nonoverlapping, sliding
from posbench.model import Decoder

Advance = Callable[[int], object]


class Protocol(ABC):
    """One way to score. `crosses_documents` says whether a window may hold parts of several documents."""

    crosses_documents: bool
    has_anchor = False  # whether its targets depend on the longest length of the comparison

    @abstractmethod
    def run(
        self,
        model: Decoder,
        corpus: Corpus,
        split: Split,
        length: int,
        settings: EvaluationConfig,
        anchor: int,
        advance: Advance,
    ) -> tuple[pd.DataFrame, dict[str, Any]]:
        """The rows to store, and figures: `nll_mean` (nats per target), `bits_per_byte`, `targets_total`, ..."""


@dataclass(frozen=True)
class Windowed(Protocol):
    """Windows over the split, their losses put into a table."""

    windows: Callable[[Split, int, EvaluationConfig, int], list[Window]]
    tabulate: Callable[[np.ndarray, Sequence[Window], Split, int], pd.DataFrame]
    crosses_documents: bool = True
    has_anchor: bool = False

    def run(
        self,
        model: Decoder,
        corpus: Corpus,
        split: Split,
        length: int,
        settings: EvaluationConfig,
        anchor: int,
        advance: Advance,
    ) -> tuple[pd.DataFrame, dict[str, Any]]:
        windows = self.windows(split, length, settings, anchor)
        losses = score(model, split, windows, settings.batch_tokens, advance)
        rows = self.tabulate(losses, windows, split, corpus.bos_id)
        figures: dict[str, Any] = {"windows": len(windows), "documents": int(rows["document"].nunique())}
        nll, targets = float(rows["nll"].sum()), int(rows["targets"].sum())
        figures |= {"targets_total": targets, "nll_mean": nll / targets}
        if "bytes" in rows:
            figures["bits_per_byte"] = nll / math.log(2) / int(rows["bytes"].sum())
        return rows, figures


@dataclass(frozen=True)
class Retrieval(Protocol):
    """The retrieval probe; the length is that of the whole reading, both passages and what lies between."""

    crosses_documents: bool = True

    def run(
        self,
        model: Decoder,
        corpus: Corpus,
        split: Split,
        length: int,
        settings: EvaluationConfig,
        anchor: int,
        advance: Advance,
    ) -> tuple[pd.DataFrame, dict[str, Any]]:
        rows = probe(model, split, length, settings, corpus.bos_id, advance)
        targets = int(rows["targets"].sum())
        names = ("first", "second", "control", "shuffled")
        mean = {name: float(rows[f"{name}_nll"].sum()) / targets for name in names}
        return rows, {
            "windows": len(rows),
            "documents": int(rows["document"].nunique()),
            "targets_total": targets,
            "gap": int(rows["gap"].iloc[0]),
            "nll_mean": mean["second"],
            "first_nll_mean": mean["first"],
            "control_nll_mean": mean["control"],
            "shuffled_nll_mean": mean["shuffled"],
            "drop": mean["control"] - mean["second"],
            "by_order": mean["shuffled"] - mean["second"],
        }


PROTOCOLS: Mapping[str, Protocol] = {
    "fixed": Windowed(fixed, tabulate_windows, crosses_documents=False, has_anchor=True),
    "nonoverlapping": Windowed(nonoverlapping, tabulate_windows),
    "sliding": Windowed(sliding, tabulate_windows),
    "position": Windowed(nonoverlapping, tabulate_positions),
    "retrieval": Retrieval(),
    "validation": Windowed(nonoverlapping, tabulate_windows),
}
assert set(PROTOCOLS) == {*ASKED_FOR, "validation"}


def protocol_named(name: str) -> Protocol:
    """The protocol of that name. Raises: ConfigError naming the nearest."""
    if name not in ASKED_FOR:
        raise ConfigError(f"protocol {name!r} is not known{nearest(name, ASKED_FOR)} (known: {', '.join(ASKED_FOR)})")
    return PROTOCOLS[name]
