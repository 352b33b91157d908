"""What to measure on finished runs: which lengths, protocols and text, and with which options of the scheme."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from posbench.config import DataConfig
from posbench.evaluation.protocols import VALIDATION, protocol_named
from posbench.runs.results import check_options, combinations, text_option


@dataclass(frozen=True)
class Question:
    """What is asked of a run. No lengths, or no protocols: those of the run's own configuration.

    Lengths without a protocol are asked of the protocols that follow them (`Protocol.follows_lengths`). Of another text
    the loss at the training length is asked and, where lengths are given, perplexity by the run's own protocols.

    Raises: ConfigError for an unknown protocol, words that cannot be options, or a text whose name cannot be used.
    """

    lengths: tuple[int, ...] = ()  # tokens
    protocols: tuple[str, ...] = ()
    under: tuple[str, ...] = ()  # options of the scheme at evaluation alone; several values: `variants`
    data: DataConfig | None = None  # another text than the run was trained on
    at_step: int | None = None  # of older weights; None: the last step's
    device: str = "auto"
    dtype: str = "auto"
    again: bool = False  # whether what is stored is scored once more
    piece: int | None = None  # tokens, instead of the run's own `evaluation.piece`
    scheme_files: tuple[Path, ...] = ()  # of schemes of one's own, that runs may import wherever these lie
    scheme_changed: bool = False  # go on where the file of a scheme of one's own is another one than it was

    def __post_init__(self) -> None:
        for name in self.protocols:
            protocol_named(name)
        for variant in self.variants:
            check_options(variant.under)
        _ = self.text_words

    @property
    def variants(self) -> list[Question]:
        """A question for each combination of the values that `under` gives, such as `rescale=pi,yarn`."""
        every = combinations(self.under)
        return [self] if every == [self.under] else [replace(self, under=under) for under in every]

    @property
    def text_words(self) -> tuple[str, ...]:
        """The option of a result that names the text; none for a run's own."""
        return () if self.data is None else (text_option(self.data.name),)

    def protocols_of(self, own: Sequence[str]) -> Sequence[str]:
        """The names of those to score by; `own`, of the run's configuration."""
        if self.protocols or self.data is None:
            return self.protocols or own
        by_length = [name for name in own if protocol_named(name).is_by_length]
        return [VALIDATION.name, *(by_length if self.lengths else ())]
