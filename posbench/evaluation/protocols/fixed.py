"""The same targets at every length, inside one document: only the left context grows (the default)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from posbench.config import ConfigError, EvaluationConfig
from posbench.evaluation.protocols.windowed import ByLength
from posbench.evaluation.windows import Window, spread, too_long

if TYPE_CHECKING:
    from posbench.data import Split

JUST_PAST = (1, 10, 50, 100)  # tokens past the training length, where absolute schemes turn


class Fixed(ByLength):
    """`windows` groups of `targets` tokens with `anchor` tokens of their own document before their last one."""

    name = "fixed"
    caption = "Fixed targets: the same tokens are scored at every length, only the context to their left grows."
    facts: ClassVar[Mapping[str, type]] = {**ByLength.facts, "anchor": int}
    crosses_documents: ClassVar[bool] = False
    has_anchor: ClassVar[bool] = True
    same_rows: ClassVar[bool] = True
    shares_windows: ClassVar[tuple[str, ...]] = ("fixed",)

    def windows(self, split: Split, length: int, settings: EvaluationConfig, anchor: int) -> list[Window]:
        """The groups depend on `anchor` (the longest length of the comparison) and never on `length`.

        They are spread evenly over all documents that are long enough. Groups do not overlap, and no window crosses a
        document.
        """
        targets = settings.targets
        if targets > length:
            raise ConfigError(
                f"evaluation.targets={targets} does not fit into length {length}: lower it, or ask for longer lengths"
            )
        assert length <= anchor
        ends = [
            np.arange(begin + anchor, end, targets)  # the index of the last target of a group
            for begin, end in zip(split.starts[:-1], split.starts[1:], strict=True)
        ]
        places = np.concatenate(ends)
        if not len(places):
            raise ConfigError(too_long(split, anchor, "in its longest document", _longest_document(split)))
        chosen = places[spread(np.array([len(of_document) for of_document in ends]), settings.windows)]
        return [Window(int(last) - length, length, targets) for last in chosen]

    def tokens_read(self, settings: EvaluationConfig, length: int, anchor: int) -> int:
        return settings.windows * length

    def default_lengths(self, context_length: int, split: Split | None = None) -> list[int]:
        """Those of every protocol, and just past the training length; as far as the longest document reaches."""
        lengths = {*super().default_lengths(context_length), *(context_length + past for past in JUST_PAST)}
        return sorted(length for length in lengths if split is None or length <= _longest_document(split))


def _longest_document(split: Split) -> int:
    """Its tokens that have one before them."""
    return int(np.diff(split.starts).max()) - 1
