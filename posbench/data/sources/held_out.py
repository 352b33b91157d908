"""Text that a finished model is scored on and that no run is trained on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from posbench.data.sources.base import Source


class HeldOut(Source):
    """The validation and test splits of another source; all of it where it comes without such splits.

    Nothing of its train split is read where it has others: those of a large data set cost a minute, not a day.
    """

    by_document = False
    is_trained_on = False

    def __init__(self, source: Source) -> None:
        super().__init__(source.config)
        self.source = source

    def identity(self) -> Any:
        return ["held out", self.source.identity()]

    def remarks(self) -> list[str]:
        return self.source.remarks()

    def streams(self) -> dict[str, Iterable[str]]:
        """Those that are not train; `train` alone stands for the whole text."""
        streams = self.source.streams()
        return {split: texts for split, texts in streams.items() if split != "train"} or streams

    def name(self, split: str, number: int, text: str) -> str:
        return self.source.name(split, number, text)

    def describe(self, split: str) -> str:
        return self.source.describe(split)
