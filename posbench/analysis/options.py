"""Define the options of `posbench judge`, the same for the Python function."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from posbench.config import ConfigError
from posbench.system.options import optional

MARGIN = 0.01  # nats per token: losses closer than this (1 % in perplexity) count as equal


@dataclass(frozen=True)
class JudgeOptions:
    """Options that select the pairs of schemes to judge, and how many of them are planned.

    Raises: ConfigError for a margin that is not above 0, a family or a number of confirmations below 1, or
    a confirmation without a scheme or with a family.
    """

    scheme: Annotated[str | None, optional(help="The scheme to judge. Default: all but the baseline.")] = None
    baseline: Annotated[
        str | None,
        optional(help="The scheme to compare with. Default: the experiment's baseline."),
    ] = None
    beside: Annotated[
        str | Path | None,
        Annotated[
            str | None,
            optional(
                metavar="NAME",
                help="Add the runs of a reference experiment, as `posbench report` does.",
            ),
        ],
    ] = None
    family: Annotated[
        int | None,
        optional(
            metavar="N",
            help="Judge as one of N candidates that a loop tries against one baseline, with looks at two, five and "
            "eight seeds. Default: the report's verdict.",
            min=1,
        ),
    ] = None
    confirm: Annotated[
        int | None,
        optional(
            metavar="N",
            help="Confirm the winner of a loop, as one of N confirmations: test it on seeds 100 to 107, which no "
            "candidate has seen. Needs --scheme, not --family.",
            min=1,
        ),
    ] = None
    margin: Annotated[float, typer.Option(help="Losses closer than this count as equal (nats per token).")] = MARGIN

    def __post_init__(self) -> None:
        check_margin(self.margin)
        if self.family is not None and self.family < 1:
            raise ConfigError(f"--family {self.family} must be 1 or more: the number of candidates that you may try")
        if self.confirm is not None and self.confirm < 1:
            raise ConfigError(f"--confirm {self.confirm} must be 1 or more: the number of winners that you may confirm")
        if self.confirm and (self.family or not self.scheme):
            raise ConfigError("--confirm tests one winner on fresh seeds: give --scheme, and leave out --family")


def check_margin(margin: float) -> None:
    """Raise ConfigError for a margin that is not above 0 or not finite."""
    if not 0 < margin < math.inf:
        raise ConfigError(f"--margin {margin} must be above 0: it is a difference in nats per token, such as {MARGIN}")
