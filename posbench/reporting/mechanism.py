"""The part of a report that shows what heads do: a table of the best, and pictures of all heads, a row a scheme."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from scipy.special import stdtrit

from posbench.evaluation.protocols import MECHANISM
from posbench.evaluation.protocols.section import text_table
from posbench.reporting.figures import BLUE, GRID, INK, VERMILLION, WIDTH, style
from posbench.runs import run_at

PLACE = ["scheme", "seed", "measure", "layer", "head", "first", "last"]
FIGURES = {
    "attention": "Share of a head's attention by distance; 0 is the token itself. The buckets of a head add up to 1.",
    "frequencies": "Norm of the channel pairs of queries (blue) and keys (red), the fastest rotation first.",
    "biases": "What the scheme adds to a head's scores by distance, nats, less what it adds at distance 0.",
}


def read(runs: pd.DataFrame, schemes: Sequence[str], length: int) -> pd.DataFrame:
    """A row for each scheme, measure, layer, head and place: `value`, the mean over windows, and half its interval.

    Of the first seed of each scheme that was scored by `mechanism` at this length; empty where none was.
    """
    found = []
    for scheme in schemes:
        for run in runs[runs["scheme"] == scheme].sort_values("seed").itertuples():
            results, _ = run_at(str(run.path)).results()
            of = [r for r in results if (r.protocol, r.length) == (MECHANISM.name, length) and not r.key.under]
            if of:
                found.append(of[0].windows.assign(scheme=scheme, seed=int(str(run.seed))))
                break
    if not found:
        return pd.DataFrame(columns=[*PLACE, "value", "value_windows"])
    rows = pd.concat(found, ignore_index=True)
    rows["value"] /= rows["queries"]
    windows = rows.groupby(PLACE, sort=False)["value"].agg(["mean", "sem", "size"]).reset_index()
    windows["value_windows"] = windows["sem"] * stdtrit(windows["size"] - 1, 0.975)
    return windows[[*PLACE, "mean", "value_windows"]].rename(columns={"mean": "value"})


def heads_table(heads: pd.DataFrame) -> pd.DataFrame:
    """Of each scheme, the head with the highest previous-token score and induction score, and what first tokens get."""
    table = []
    for scheme, of in heads.groupby("scheme", sort=False):
        row = {"scheme": str(scheme)}
        places = {"previous token": ("attention", 1), "induction": ("induction", 0)}
        for name, (measure, first) in places.items():
            scored = of[(of["measure"] == measure) & (of["first"] == first)].sort_values("value")
            for _, best in scored.tail(1).iterrows():
                row[name] = f"{best['value']:.2f} ± {best['value_windows']:.2f} ({best['layer']}.{best['head']})"
        table.append(row | {"first token": f"{of.loc[of['measure'] == 'first_token', 'value'].mean():.2f}"})
    return text_table(table)


def draw(heads: pd.DataFrame) -> dict[str, Figure]:
    """File stem -> figure, those that have data."""
    if heads.empty:
        return {}
    biases = heads[heads["measure"] == "bias"].copy()
    biases["value"] -= biases.groupby(["scheme", "layer", "head"])["value"].transform("first")
    varied = biases.groupby("scheme")["value"].transform(lambda values: np.ptp(values) > 0).astype(bool)
    of = {
        "attention": heads[heads["measure"] == "attention"],
        "frequencies": heads[heads["measure"].isin(["q_norm", "k_norm"])],
        "biases": biases[varied],
    }
    with style():
        return {name: _by_head(rows, name) for name, rows in of.items() if len(rows)}


def _by_head(rows: pd.DataFrame, name: str) -> Figure:
    """A row of panels a scheme, a panel a layer, all on one scale; a line a head."""
    schemes, layers = list(dict.fromkeys(rows["scheme"])), sorted(set(rows["layer"]))
    figure = Figure(figsize=(WIDTH, 0.6 + 1.15 * len(schemes)), layout=ConstrainedLayoutEngine(w_pad=0.03, h_pad=0.03))
    panels: Any = figure.subplots(len(schemes), len(layers), sharex=True, sharey=True, squeeze=False)
    by_pair = name == "frequencies"
    for (scheme, layer, measure, _), of in rows.groupby(["scheme", "layer", "measure", "head"], sort=False):
        axes = panels[schemes.index(scheme), layers.index(layer)]
        colour = VERMILLION if measure == "k_norm" else BLUE
        x = of["first"] if by_pair else np.where(of["first"] == 0, 0.5, np.sqrt(of["first"] * of["last"]))
        axes.plot(x, of["value"], "-", color=colour, alpha=0.75, linewidth=1)
        axes.fill_between(
            x,
            of["value"] - of["value_windows"],
            of["value"] + of["value_windows"],
            color=colour,
            alpha=0.12,
            linewidth=0,
        )
    for scheme, line in zip(schemes, panels, strict=True):
        line[0].set_ylabel(scheme, rotation=0, ha="right", va="center")
    for layer, axes in zip(layers, panels[0], strict=True):
        axes.set_title(f"layer {layer}")
    for axes in panels.flat:
        if not by_pair:
            axes.set_xscale("log", base=2)
            farthest = math.ceil(math.log2(rows["last"].max()))
            ticks = [0.5, *(2.0**n for n in range(0, farthest, 2))]
            axes.set_xticks(ticks, ["0", *(f"{tick:g}" for tick in ticks[1:])])
            axes.minorticks_off()
        if name == "biases":
            axes.set_yscale("symlog", linthresh=1)
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.axhline(0, color=GRID, linewidth=0.6)
    figure.supxlabel("channel pair" if by_pair else "distance, tokens", fontsize=9, color=INK)
    return figure
