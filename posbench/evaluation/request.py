"""Define a request to score finished runs: the lengths, protocols, text and options of the scheme."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posbench.config import Config, ConfigError, DataConfig, check_name, scored_length
from posbench.system.options import AtStep, ConfigDir, SchemeChanged, SchemeFiles, optional

if TYPE_CHECKING:  # the command line reads this module, and `--help` needs no torch
    from posbench.evaluation.protocols import EvalProtocol

_COMMA = r",(?![^\[]*\]|[^{]*})"  # separates values, except inside brackets and braces


def _listed(value: Any) -> list[Any]:
    # In the Python API, a single word or number stands for a list of one.
    return [value] if isinstance(value, (str, int, Path)) else list(value)


@dataclass(frozen=True)
class Request:
    """Options of `posbench eval` and `posbench.evaluate`. Missing lengths or protocols come from the run's config.

    Lengths without a protocol apply only to protocols that follow them. On another text (`data`), the loss at the
    training length is scored and, if lengths are given, perplexity by the run's own protocols.
    Raises: ConfigError for an unknown protocol, a bad length or option, or a text whose name cannot be used.
    """

    lengths: Annotated[
        tuple[int, ...],
        Annotated[
            list[str] | None,
            optional(
                "--length",
                "-l",
                help="Tokens, such as 4096 or 8k (8192); items for tasks. Repeat it, or separate by commas. Default: "
                "as in the run's experiment.",
            ),
        ],
    ] = ()
    protocols: Annotated[
        tuple[str, ...],
        Annotated[
            list[str] | None,
            optional(
                "--protocol",
                "-p",
                help="How to score, such as fixed or order; an unknown name lists them all. Default: as in the "
                "run's experiment.",
            ),
        ],
    ] = ()
    under: Annotated[
        tuple[str, ...],
        Annotated[
            list[str] | None,
            optional(
                metavar="KEY=VALUE",
                help="Change an option for this evaluation only. Scheme options: rescale=pi, ntk, dynamic_ntk, yarn or "
                "yarn_code (factor=4; default: length / training length), base=1e6. Another scheme: scheme=nope, or "
                "any other without learnt parameters. Task options: ignored=0.98. Values separated by commas are "
                "evaluated in turn (rescale=pi,yarn); repeat --under to change several options.",
            ),
        ],
    ] = ()
    data: Annotated[
        DataConfig | None,
        Annotated[
            list[str] | None,
            optional(
                metavar="NAME",
                help="A text that the runs were not trained on, with their own tokenizers: a choice of conf/data, such "
                "as wikitext103. Its validation and test splits are scored, or all of it if it has none. Give its "
                "settings in further --data: --data files --data data.path=~/notes --data data.name=notes.",
            ),
        ],
    ] = None
    at_step: AtStep = None
    device: Annotated[str, typer.Option(help="auto, cpu, cuda.")] = "auto"
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16.")] = "auto"
    again: Annotated[bool, typer.Option("--again", help="Rescore even if a result exists.")] = False
    piece: Annotated[
        int | None,
        optional(
            help="Split sequences longer than this many tokens into pieces, to use less memory. Default: the run's.",
            min=1,
        ),
    ] = None
    jobs: Annotated[int, typer.Option("--jobs", "-j", help="How many runs to score at a time; -1: one per core.")] = 1
    scheme_files: Annotated[tuple[Path, ...], SchemeFiles] = ()
    scheme_changed: SchemeChanged = False
    config_dir: ConfigDir = None

    def __post_init__(self) -> None:
        # Imported here: the command line reads this module, and `--help` needs no torch.
        from posbench.evaluation.protocols import trust_protocols
        from posbench.evaluation.texts import text_named

        data = self.data
        if not isinstance(data, DataConfig):
            words = _listed(data or ())
            if self.config_dir:
                words.append(f"--config-dir={self.config_dir}")
            data = text_named(words)
        lengths = [word for length in _listed(self.lengths) for word in str(length).split(",")]
        protocols = [name for names in _listed(self.protocols) for name in names.split(",")]
        trust_protocols(protocols)
        checked = {
            "lengths": tuple(scored_length("--length", word) for word in lengths),
            "protocols": tuple(protocols),
            "under": tuple(_listed(self.under)),
            "data": data,
            "scheme_files": tuple(map(Path, _listed(self.scheme_files))),
        }
        # The dataclass is frozen, and its fields are checked before anybody sees it.
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if data is not None:
            check_name("data.name", data.name)

    @property
    def variants(self) -> list[Request]:
        """Return a request for each combination of values of `under`, first one without options.

        So `rescale=pi,yarn` gives three: none, pi and yarn.
        """
        values = []
        # `a=1,2` means two evaluations, and several options are combined.
        for option in self.under:
            name, _, several = option.partition("=")
            values.append([f"{name}={value}" for value in re.split(_COMMA, several)])
        return [replace(self, under=combination) for combination in dict.fromkeys([(), *product(*values)])]

    def protocols_of(self, configured: Sequence[str]) -> Sequence[str]:
        """Return the requested protocols, by default those of `configured` that apply."""
        from posbench.evaluation.protocols import VALIDATION, protocol_named, trust_protocols

        if self.protocols:
            # Again, because this may be a worker.
            return trust_protocols(self.protocols)
        if self.data is not None:
            # On another text: the loss, and with lengths the protocols by length.
            by_length = (name for name in configured if self.lengths and protocol_named(name).is_by_length)
            return [VALIDATION.name, *by_length]
        return [name for name in configured if not self.lengths or protocol_named(name).follows_lengths]

    def lengths_of(self, protocol: EvalProtocol, config: Config, split: Any) -> list[int]:
        """Return the lengths to score by a protocol, ascending: the requested ones, else the run's.

        Raises: ConfigError for a window of text with less than two tokens.
        """
        trained_length, lengths_asked = config.trained_length, set(self.lengths)
        # If only lengths were asked for, the training length is added, as the reference for the change with length.
        if (
            lengths_asked
            and not self.protocols
            and self.data is None
            and (protocol.is_by_length or not protocol.of_text)
        ):
            is_in_range = protocol.shortest(config.evaluation) <= trained_length <= max(lengths_asked)
            if is_in_range:
                lengths_asked.add(trained_length)
        lengths = protocol.lengths(sorted(lengths_asked), trained_length, split, config.evaluation.lengths)
        if lengths and lengths[0] < config.data.shortest:
            raise ConfigError(f"length {lengths[0]} is too short for text: ask for 2 tokens or more")
        return lengths
