"""Define the options of `posbench report`, the same for the Python function."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from posbench.analysis.options import MARGIN, check_margin
from posbench.config import ConfigError
from posbench.system.options import optional


@dataclass(frozen=True)
class ReportOptions:
    """Options that select the runs to compare and the files to write.

    Raises: ConfigError for a margin that is not above 0, or a seed that is not a whole number.
    """

    against: Annotated[
        str | None,
        optional(
            help="Published results to compare with, such as kexue-10862; an unknown name lists all.",
        ),
    ] = None
    beside: Annotated[
        str | Path | None,
        Annotated[
            str | None,
            optional(
                metavar="NAME",
                help="Add these runs to the tables of a reference experiment, such as demo_cpu, if they are "
                "comparable; if not, show what differs and how to train a comparable row.",
            ),
        ],
    ] = None
    baseline: Annotated[str | None, optional(help="Scheme that gaps are measured against.")] = None
    by: Annotated[
        str | None,
        optional(
            metavar="COLUMN",
            help="Group runs by a setting: train.lr, tokens, model.name (several with commas).",
        ),
    ] = None
    margin: Annotated[float, typer.Option(help="Losses closer than this count as equal (nats per token).")] = MARGIN
    schemes: Annotated[
        Sequence[str],
        Annotated[str | None, optional(help="Only these schemes, separated by commas. Default: all.")],
    ] = ()
    seeds: Annotated[
        Sequence[int],
        Annotated[str | None, optional(help="Only these seeds, separated by commas. Default: all.")],
    ] = ()
    as_json: Annotated[bool, typer.Option("--json", help="Print the first screen as one JSON object, for scripts.")] = (
        False
    )
    every_length: Annotated[
        bool, typer.Option("--every-length", help="Also show lengths just past the training length (T+1, T+10, ...).")
    ] = False
    title: Annotated[str | None, optional(help="The report's title. Default: the experiment's name.")] = None
    latex: Annotated[
        bool, typer.Option("--latex", help="Also write LaTeX tables and PDF figures, in OUTPUT/latex.")
    ] = False
    wandb: Annotated[bool, typer.Option("--wandb", help="Also log the folder to wandb as an artifact.")] = False
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False
    output: Annotated[
        str | Path | None,
        Annotated[
            str | None,
            optional(
                parser=os.path.expanduser,
                metavar="PATH",
                help="Folder for the files. Default: report in the experiment's folder, or in runs/reports for a "
                "reference experiment. Reports with --by, --schemes or --seeds have folders of their own.",
            ),
        ],
    ] = None

    def __post_init__(self) -> None:
        check_margin(self.margin)
        # On the command line, lists are words with commas.
        for name in ("schemes", "seeds"):
            words = getattr(self, name)
            if isinstance(words, str):
                words = [word.strip() for word in words.split(",")]
                object.__setattr__(self, name, [word for word in words if word])
        if wrong := [seed for seed in self.seeds if not str(seed).isdecimal()]:
            raise ConfigError(f"--seeds {wrong[0]} is not a seed: give whole numbers with commas, such as 0,1,2")
        object.__setattr__(self, "seeds", list(map(int, self.seeds)))
