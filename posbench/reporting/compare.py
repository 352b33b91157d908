"""`posbench compare`: runs side by side, what differs in their settings, what came out, what it cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from posbench.config import ConfigError
from posbench.evaluation.protocols import PROTOCOLS
from posbench.reporting.comparison import TWICE, differences
from posbench.reporting.tables import DASH, count_text, flops_text, number, perplexity_text
from posbench.runs.fingerprints import flat
from posbench.table import config_of, read


def compare(paths: Sequence[str | Path], console: Console) -> None:
    """Print these runs beside each other. Raises: ConfigError for fewer than two."""
    summary, rows = read(dict.fromkeys(map(str, paths)))
    for run in summary[summary["status"] == "unreadable"].itertuples():
        raise ConfigError(f"{run.path} cannot be compared: {run.reason}")
    if len(summary) < 2:
        raise ConfigError(
            "one run is not a comparison: name two, such as runs/demo/qk_rope/seed=0 runs/demo/nope/seed=0"
        )
    parts = [Path(path).parts[-3:] for path in summary["path"]]
    levels = [n for n in range(3) if len({part[n] for part in parts}) > 1] or [2]
    for title, lines in (
        ("Settings that differ", _settings(summary)),
        ("Results", _results(summary, rows)),
        ("Costs", _costs(summary)),
    ):
        table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("")
        for part in parts:
            table.add_column(Text("\n".join(part[n] for n in levels)), justify="right")
        for line in lines:
            table.add_row(*map(Text, line))
        if lines:
            console.print(table)
    for remark in _remarks(summary):
        console.print(Text(remark), soft_wrap=False)


def _settings(summary: pd.DataFrame) -> list[list[str]]:
    """A line a field of the configurations that is not the same in all."""
    configs = [flat(config_of(path)) for path in summary["path"]]
    keys = dict.fromkeys(key for config in configs for key in config)
    lines = [[key, *(str(config.get(key, DASH)) for config in configs)] for key in keys]
    return [line for line in lines if len(set(line[1:])) > 1]


def _results(summary: pd.DataFrame, rows: pd.DataFrame) -> list[list[str]]:
    """Losses, and the loss minus that of the first run's scheme with the same seed; perplexities by length."""
    first = summary[summary["scheme"] == summary["scheme"].iloc[0]].drop_duplicates("seed").set_index("seed")["loss"]
    gaps = summary["loss"] - summary["seed"].map(first)
    lines = [
        ["status", *summary["status"]],
        ["loss, nats/token", *map(number, summary["loss"])],
        ["minus the first scheme's, same seed", *(number(gap, sign=True) for gap in gaps)],
        ["bits per byte", *map(number, summary["bits_per_byte"])],
    ]
    by_length = [name for name, protocol in PROTOCOLS.items() if protocol.is_by_length]
    of = rows[rows["protocol"].isin(by_length) & (rows["metric"] == "loss") & (rows["at_step"] == 0)]
    sums = of.groupby(["protocol", "text", "under", "length", "run"], observed=True)[["value", "count"]].sum()
    perplexities = (sums["value"] / sums["count"]).map(lambda loss: math.exp(min(loss, 700))).unstack("run")
    places: list[Any] = list(perplexities.index)
    for place, values in zip(places, perplexities.reindex(columns=summary.index).to_numpy(), strict=True):
        protocol, text, under, length = list(place)
        words = " ".join(filter(None, [f"perplexity at {length}, {protocol}", under, f"on {text}" if text else ""]))
        lines.append([words, *(DASH if math.isnan(value) else perplexity_text(value) for value in values)])
    return lines


def _costs(summary: pd.DataFrame) -> list[list[str]]:
    columns = {name: summary[name] for name in ("parameters", "tokens", "tokens_per_second", "train_seconds")}
    lines = [[name.replace("_", " "), *(count_text(float(value)) for value in of)] for name, of in columns.items()]
    return [*lines, ["training FLOPs", *map(flops_text, summary["training_flops"])], ["device", *summary["device"]]]


def _remarks(summary: pd.DataFrame) -> list[str]:
    """What makes the comparison unfair, if anything; and what went wrong."""
    runs = summary.to_dict("records")
    lines = [f"{run['path']}: {run['diverged'] or run['reason']}" for run in runs if run["diverged"] or run["reason"]]
    differ = [what for what, _ in differences(summary) if what != TWICE]
    if differ:
        lines.append(f"Not a fair comparison: these runs differ in {', '.join(differ)}.")
    if summary["seed"].nunique() > 1:
        lines.append("Seeds differ, so compare only losses of the same seed.")
    return [*lines, "`posbench report` tests such differences over paired seeds."]
