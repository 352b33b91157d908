"""What a model of the last few tokens loses: Kneser-Ney models of the run's own batches, on its validation windows.

No trained model is asked, so all schemes of a seed share one result (`posbench.evaluation.ngrams` makes it). It lies in
the `eval/` folder of one of their runs, with the fingerprint of the batches in its header.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from posbench.evaluation.protocols.protocol import Protocol

if TYPE_CHECKING:
    import pandas as pd

    from posbench.config import EvaluationConfig
    from posbench.data import Split


class Ngram(Protocol):
    """One row a window, document and order (n): the tokens that a model looks at, the predicted one included."""

    name = "ngram"
    caption = "Kneser-Ney models of the last n - 1 tokens, counted on the same batches and scored on the same targets."
    columns: ClassVar[tuple[str, ...]] = ("order", "document", "start", "targets", "nll", "bytes")
    split: ClassVar[str] = "validation"
    follows_lengths: ClassVar[bool] = False

    def lengths(
        self,
        asked: Sequence[int],
        context_length: int,
        split: Split | None = None,
        configured: Sequence[int] = (),
    ) -> list[int]:
        """None: it is not scored run by run."""
        return []

    def score(self, *_: Any) -> tuple[pd.DataFrame, dict[str, Any]]:
        raise AssertionError("n-gram models are scored by `posbench.evaluation.ngrams`")

    def tokens_read(self, settings: EvaluationConfig, length: int, anchor: int) -> int:
        return 0
