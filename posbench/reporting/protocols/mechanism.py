"""Show what attention heads do: tables of the best heads, and pictures of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from posbench.analysis.comparison import Comparison
from posbench.analysis.subjects import ModelComparison
from posbench.analysis.table import where
from posbench.analysis.tasks import TaskComparison
from posbench.evaluation.protocols import MECHANISM
from posbench.evaluation.protocols.mechanism import PLACE
from posbench.reporting.page import prose
from posbench.reporting.section import Format, Plot, Section, Table
from posbench.runs import run_at


def sections(c: Comparison) -> list[Section]:
    # The options of a model that was not trained here share its heads.
    schemes = [c.baseline] if isinstance(c, ModelComparison) else c.schemes
    heads = read_heads(c.runs, schemes, c.training_length)
    if heads.empty:
        return []
    title, plots = "What heads do", head_plots(heads)
    # A task's page has a heading already, and other pages may have more tasks.
    if isinstance(c, TaskComparison):
        title, plots = "", [replace(plot, name=f"{plot.name}-{c.name}") for plot in plots]
        heads = heads.assign(data=c.name)
    note, files = prose("heads", c), {"mechanism.csv": heads}
    return [Section(title, plots=plots, table=heads_table(heads), note=note, files=files)]


def read_heads(runs: pd.DataFrame, schemes: Sequence[str], length: int) -> pd.DataFrame:
    """Return the measures of attention heads that runs have stored, averaged over windows.

    Arguments: runs, a row per run and its path; length, in tokens or items.
    Returns: a row per scheme, measure, layer, head and distance (or channel pair), with the mean over windows (`value`)
    and half of its 95 % interval (`value_windows`).
    """
    from scipy.special import stdtrit  # not needed to train or to score

    stored = []
    for scheme in schemes:
        of_scheme = runs[runs["scheme"] == scheme].sort_values("seed")
        for run in of_scheme.itertuples():
            for result in run_at(str(run.path)).results()[0]:
                if result.protocol == MECHANISM.name and not result.key.under:
                    stored.append((scheme, int(str(run.seed)), result))
    lengths = [result.length for _, _, result in stored]
    # At the stored length nearest to `length`, and of each scheme only the first seed that was scored at it.
    nearest = min(lengths, key=lambda n: abs(n - length), default=length)
    # Reversed, because a later entry of a dict replaces an earlier one.
    first_result = {scheme: (seed, result) for scheme, seed, result in reversed(stored) if result.length == nearest}
    tables = []
    for scheme in schemes:
        if scheme in first_result:
            seed, result = first_result[scheme]
            tables.append(result.windows.assign(scheme=scheme, seed=seed))
    if not tables:
        return pd.DataFrame(columns=[*PLACE, "value", "value_windows"])
    rows = pd.concat(tables, ignore_index=True)
    rows["value"] /= rows["queries"]  # from a sum over queries to their mean
    windows = rows.groupby(PLACE, sort=False)["value"].agg(["mean", "sem", "size"]).reset_index()
    windows["value_windows"] = windows["sem"] * stdtrit(windows["size"] - 1, 0.975)
    return windows[[*PLACE, "mean", "value_windows"]].rename(columns={"mean": "value"})


def heads_table(heads: pd.DataFrame) -> Table:
    """Return a row per scheme: its best previous-token head, its best induction head, and the first token's share."""
    rows = []
    # Column -> the measure, and the distance in its column `first`: 1 is the token before.
    places = {"previous token": ("attention", 1), "induction": ("induction", 0)}
    for scheme, measured in heads.groupby("scheme", sort=False):
        row: dict[str, Any] = {"scheme": str(scheme)}
        for name, (measure, first) in places.items():
            scored = where(measured, measure=measure, first=first).sort_values("value")
            # The head with the largest share; none if this was not measured.
            for _, best in scored.tail(1).iterrows():
                row[name] = best["value"]
                row[f"{name}: after"] = f" ±{best['value_windows']:.3f} ({best['layer']}.{best['head']})"
        first_token = measured.loc[measured["measure"] == "first_token", "value"].mean()
        rows.append(row | {"first token": first_token})
    return Table.of(rows, {name: Format(after=f"{name}: after") for name in places})


def head_plots(heads: pd.DataFrame) -> list[Plot]:
    """Return plots of each head's attention, norms and biases, as far as they were measured."""
    heads = heads.assign(line=heads["head"].map("head {}".format))
    norms = heads[heads["measure"].isin(["q_norm", "k_norm"])]
    norms = norms.assign(line=norms["measure"].map({"q_norm": "queries", "k_norm": "keys"}))
    biases = heads[heads["measure"] == "bias"].copy()
    # A constant added to all scores of a query changes nothing, so biases are shown relative to distance 0.
    biases["value"] -= biases.groupby(["scheme", "layer", "head"])["value"].transform("first")
    # Schemes whose biases are the same at all distances are left out.
    varied = biases.groupby("scheme")["value"].transform(lambda values: np.ptp(values) > 0).astype(bool)
    biases, in_layers = biases[varied], ""
    of_layers = biases.pivot_table(index=["scheme", "head", "first"], columns="layer", values="value")
    # Fixed biases are the same in all layers: one panel shows them.
    if of_layers.shape[1] > 1 and of_layers.eq(of_layers.iloc[:, 0], axis=0).all(axis=None):
        biases, in_layers = biases[biases["layer"] == of_layers.columns[0]], ", the same in all layers"
    plots = [
        Plot(
            "attention",
            "heads",
            "Share of a head's attention by distance; 0 is the token itself. The buckets of a head add up to 1.",
            heads[heads["measure"] == "attention"],
            "distance, tokens",
            "share of attention",
        ),
        Plot(
            "frequencies",
            "heads",
            "Norm of the channel pairs of queries and keys, the fastest rotation first; a line is a head. With base "
            "b, pair n of p turns once in 2π b^(n/p) tokens, unless it is rescaled.",
            norms,
            "channel pair",
            "norm",
            x_scale="pairs",
        ),
        Plot(
            "biases",
            "heads",
            f"What the scheme adds to a head's scores by distance, minus its value at distance 0{in_layers}. "
            "The scale is logarithmic beyond 1 nat.",
            biases,
            "distance, tokens",
            "nats",
            y_scale="symlog",
        ),
    ]
    return [plot for plot in plots if len(plot.points)]
