"""Score the same targets at every length, inside one document, so that only the context before them grows.

This is the default protocol.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from posbench.config import ConfigError, EvaluationConfig
from posbench.data import Split
from posbench.evaluation.protocols.windowed import Windowed
from posbench.evaluation.windows import Window, choose_evenly, too_long

JUST_PAST = (1, 10, 50, 100)  # tokens past the training length, at which the loss of absolute schemes rises


class Fixed(Windowed):
    """Evaluation protocol that scores the same targets at every length, with more context before them if longer.

    There are `evaluation.windows` groups of `evaluation.targets` tokens. At least `anchor` tokens are before the last
    of a group; `anchor` is the longest length of the comparison.
    """

    name = "fixed"
    rank = 0
    is_by_length: ClassVar[bool] = True
    caption = "Fixed targets: the same tokens are scored at every length, only the context before them grows."
    shares_targets: ClassVar[bool] = True

    def windows(self, split: Split, length: int, settings: EvaluationConfig, anchor: int) -> list[Window]:
        """Return the windows to score, one per group of targets that are the same at every length.

        Groups depend on `anchor`, the longest length of the comparison. They do not overlap, and no window crosses a
        document.
        """
        targets = targets_within(length, settings)
        assert length <= anchor
        ends = []  # of each document: the index of the last target of each group
        for begin, end in zip(split.starts[:-1], split.starts[1:], strict=True):
            ends.append(np.arange(begin + anchor, end, targets))
        group_ends = np.concatenate(ends)
        if not len(group_ends):
            raise ConfigError(too_long(split, anchor, "in its longest document", _longest_document(split)))
        # Spread evenly over all documents that are long enough.
        chosen = group_ends[choose_evenly(np.array([len(of_document) for of_document in ends]), settings.windows)]
        return [Window(int(last) - length, length, targets) for last in chosen]

    def shortest(self, settings: EvaluationConfig) -> int:
        return settings.targets

    def tokens_read(self, settings: EvaluationConfig, length: int, anchor: int) -> int:
        return settings.windows * length

    def default_lengths(self, context_length: int, split: Split | None = None) -> list[int]:
        """Return the default lengths in tokens, up to the longest document."""
        # The training length times 0.5, 1, 2, 4 ... 32, and some lengths just past it.
        lengths = {*super().default_lengths(context_length), *(context_length + past for past in JUST_PAST)}
        return sorted(length for length in lengths if split is None or length <= _longest_document(split))


def targets_within(length: int, settings: EvaluationConfig) -> int:
    """Return `evaluation.targets`, the targets at every length. Raises: ConfigError if `length` is less."""
    if settings.targets > length:
        raise ConfigError(
            f"evaluation.targets={settings.targets} does not fit into length {length}: lower it, or ask for longer "
            "lengths"
        )
    return settings.targets


def _longest_document(split: Split) -> int:
    # The first token of a document has nothing before it.
    return int(np.diff(split.starts).max()) - 1
