"""What to measure on finished runs: which lengths, protocols and text, and with which options of the scheme."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from posbench.config import Config, ConfigError, DataConfig, check_name
from posbench.data import ProblemSplit, Split
from posbench.evaluation.protocols import NGRAM, VALIDATION, Protocol, protocol_named

_COMMA = r",(?![^\[]*\])"  # one in brackets separates no values


@dataclass(frozen=True)
class Request:
    """What is asked of a run. No lengths, or no protocols: those of the run's own configuration.

    Lengths without a protocol are asked of the protocols that follow them (`Protocol.follows_lengths`), and of no
    others. Of another text the loss at the training length is asked and, where lengths are given, perplexity by the
    run's own protocols.

    Raises: ConfigError for an unknown protocol, words that cannot be options, or a text whose name cannot be used.
    """

    lengths: tuple[int, ...] = ()  # tokens
    protocols: tuple[str, ...] = ()
    under: tuple[str, ...] = ()  # options of the scheme or the task at evaluation alone; several values: `variants`
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
        if self.data is not None:
            check_name("data.name", self.data.name)

    @property
    def variants(self) -> list[Request]:
        """Return a request for each combination of values in `under`, such as `rescale=pi,yarn`.

        The first one has no options: results under options are compared with those as trained, on the same windows.
        """
        options = [option.partition("=") for option in self.under]
        values = [[f"{name}={value}" for value in re.split(_COMMA, several)] for name, _, several in options]
        return [replace(self, under=under) for under in dict.fromkeys([(), *product(*values)])]

    @property
    def wants_ngrams(self) -> bool:
        """Whether n-gram models are scored too: by name, or where all that belongs to a run is asked for."""
        return NGRAM.name in self.protocols or not (self.protocols or self.lengths or self.data)

    def protocols_of(self, own: Sequence[str]) -> Sequence[str]:
        """The names of those to score by; `own`, of the run's configuration."""
        if self.protocols:
            return self.protocols
        if self.data is not None:
            return [VALIDATION.name, *(name for name in own if self.lengths and protocol_named(name).is_by_length)]
        return [name for name in own if not self.lengths or protocol_named(name).follows_lengths]

    def lengths_of(self, protocol: Protocol, config: Config, split: Split | ProblemSplit) -> list[int]:
        """The lengths to score by a protocol, ascending: those asked for, else those of the run's configuration.

        With lengths and no protocols the training length is scored too, so that there is a change to see.
        Raises: ConfigError for a window of text with less than two tokens.
        """
        trained_at, asked = config.trained_length, set(self.lengths)
        if asked and not self.protocols and self.data is None and (protocol.is_by_length or config.is_task):
            asked |= {trained_at} if trained_at >= protocol.shortest(config.evaluation) else set()
        lengths = protocol.lengths(sorted(asked), trained_at, split, config.evaluation.lengths)
        if lengths and lengths[0] < 2 and not config.is_task:
            raise ConfigError(f"length {lengths[0]} is too short for text: ask for 2 tokens or more")
        return lengths
