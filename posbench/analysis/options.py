"""Define the options of `posbench judge`, the same for the Python function."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from posbench.config import ConfigError
from posbench.system.options import optional

MARGIN = 0.01  # nats per token: losses closer than this (1 % in perplexity) count as equal
# What is judged, and the margin below which two values count as equal, in nats per token.
METRICS = {"loss": MARGIN, "order": 0.001}


@dataclass(frozen=True)
class JudgeOptions:
    """Options that select the pairs of schemes to judge, and how many of them are planned.

    Raises: ConfigError for a margin that is not above 0, an unknown metric, a family or a number of confirmations below
    1, a confirmation without a scheme or with a family, or places of a confirmation without one.
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
    also: Annotated[
        Sequence[str | Path],
        Annotated[
            list[str],
            typer.Option(
                metavar="NAME",
                help="With --confirm: an experiment of another size or text, where the winner must be better too. May "
                "be repeated.",
                show_default=False,
            ),
        ],
    ] = ()
    setups: Annotated[
        bool,
        typer.Option(
            "--setups",
            help="Judge over the setups of an experiment with factors: better if the mean gap is below 0 and no "
            "replicated setup is certainly worse by more than the margin.",
        ),
    ] = False
    metric: Annotated[
        str,
        typer.Option(
            metavar="loss|order",
            help="What is judged: the loss, or what order more than 32 tokens back is worth (posbench eval --protocol "
            "order).",
        ),
    ] = "loss"
    margin: Annotated[
        float | None,
        typer.Option(
            help=f"Values closer than this count as equal (nats per token). Default: {MARGIN} for the loss, "
            f"{METRICS['order']} for order.",
            show_default=False,
        ),
    ] = None

    @property
    def equal_below(self) -> float:
        """Return the margin, or the metric's."""
        return METRICS[self.metric] if self.margin is None else self.margin

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            raise ConfigError(f"--metric {self.metric} is not known: give {' or '.join(METRICS)}")
        check_margin(self.equal_below)
        if self.family is not None and self.family < 1:
            raise ConfigError(f"--family {self.family} must be 1 or more: the number of candidates that you may try")
        if self.confirm is not None and self.confirm < 1:
            raise ConfigError(f"--confirm {self.confirm} must be 1 or more: the number of winners that you may confirm")
        if self.confirm and (self.family or not self.scheme):
            raise ConfigError("--confirm tests one winner on fresh seeds: give --scheme, and leave out --family")
        if self.setups and (self.family or self.confirm or self.metric != "loss"):
            raise ConfigError("--setups judges losses over setups: leave out --family, --confirm and --metric")
        if self.also and not self.confirm:
            raise ConfigError(f"--also {self.also[0]} names where a winner is confirmed too: add --confirm N")


def is_loss_table(place: str | Path) -> bool:
    """Return whether a place is the file of a table of losses, not a folder or a pack of runs."""
    return Path(place).suffix in (".csv", ".tsv")


def check_margin(margin: float) -> None:
    """Raise ConfigError for a margin that is not above 0 or not finite."""
    if not 0 < margin < math.inf:
        raise ConfigError(f"--margin {margin} must be above 0: it is a difference in nats per token, such as {MARGIN}")
