"""Build the tables of a report as DataFrames of text: a row per scheme, best first, numbers rounded."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from posbench.config.units import DASH, number, plus_minus, short_count
from posbench.evaluation.protocols.order import count_onsets
from posbench.evaluation.protocols.section import half, text_table, with_interval
from posbench.reporting.comparison import Comparison
from posbench.reporting.published_comparison import Agreement
from posbench.reporting.statistics import best_rate, interval, letters, significant_pairs, verdict

Text = Mapping[str, str]


def loss_table(c: Comparison) -> pd.DataFrame:
    """Return a row per scheme: loss and gap to the baseline; with enough seeds also a verdict and letters.

    Schemes that share a letter do not differ significantly.
    """
    validation, groups = c.validation(), letters(c.ranked, significant_pairs(c.pairs)) if c.can_rank else {}
    differ = c.losses.notna().sum().nunique() > 1
    gaps = c.losses.sub(c.losses[c.baseline], axis=0)
    rows = []
    for scheme in c.schemes:
        losses = c.losses[scheme].dropna()
        cell = validation.loc[scheme] if scheme in validation.index else None
        row = {"scheme": name_with_remarks(c, scheme)}
        if differ:
            row["seeds"] = str(len(losses))
        caught = {"distant order": count_onsets(c.onsets[scheme])} if c.has_onsets else {}
        if c.can_rank:
            row |= {"group": groups.get(scheme, DASH), "loss": plus_minus(losses.mean(), half(cell, "value"))} | caught
            row[f"gap to {c.baseline}"] = "0" if scheme == c.baseline else with_interval(cell, "gap", sign=True)
            row["verdict"] = "" if scheme == c.baseline else verdict(c.pairs, scheme, c.baseline, "baseline")
        else:
            row |= {"loss": number(losses.mean()), **caught}
            row[f"gap to {c.baseline}"] = number(gaps[scheme].mean(), sign=True)
            if len(c.seeds) > 1:
                seed_gaps = ", ".join(number(gap, sign=True) for gap in gaps[scheme].dropna())
                row["gap of each seed"] = seed_gaps if scheme != c.baseline else ""
            if scheme == c.baseline:
                row[f"gap to {c.baseline}"] = "0"
        rows.append(row)
    return text_table(rows)


def name_with_remarks(c: Comparison, scheme: str) -> str:
    """Return the scheme's name, with a remark in brackets if runs diverged or use only some of its layers."""
    is_scheme = c.runs["scheme"] == scheme
    remarks = []
    layers = c.runs["scheme.layers"][is_scheme].iloc[0] if "scheme.layers" in c.runs else None
    num_layers = c.runs["model.num_layers"][is_scheme].iloc[0]
    if isinstance(layers, str) and len(json.loads(layers)) > num_layers:
        remarks.append(f"{num_layers} of {len(json.loads(layers))} layers")
    diverged = int(c.runs["diverged"][is_scheme].notna().sum())
    if diverged:
        remarks.append(f"{diverged} diverged")
    return f"{scheme} ({', '.join(remarks)})" if remarks else scheme


def costs_table(c: Comparison) -> tuple[pd.DataFrame, Text]:
    """Return a table of parameters and FLOPs by scheme, and a dict of those figures that all schemes share instead.

    Measured speeds are left out: runs of one experiment are trained one after another, on a more or less busy machine.
    """
    runs = c.runs.reindex(columns=["scheme", "parameters", "training_flops"]).groupby("scheme")
    rows = []
    for scheme in c.schemes:
        scheme_runs = runs.get_group(scheme)
        row = {
            "scheme": scheme,
            "parameters": count_text(scheme_runs["parameters"].mean()),
            "training FLOPs": flops_text(scheme_runs["training_flops"].mean()),
        }
        rows.append(row)
    table = text_table(rows)
    same = {name: table[name].iloc[0] for name in table.columns[1:] if table[name].nunique() == 1}
    return table.drop(columns=list(same)), {name: value for name, value in same.items() if value != DASH}


def primary_table(c: Comparison) -> pd.DataFrame:
    """Return a row per pair that the experiment fixed before training: schemes, difference in loss, p, verdict."""
    rows = []
    for pair in c.pairs.dropna(subset="p_primary").to_dict("records"):
        half_width = (pair["difference_high"] - pair["difference_low"]) / 2
        outcome = verdict(c.pairs, pair["left"], pair["right"], "primary")
        row = {"lower loss": pair["left"], "higher loss": pair["right"]}
        row["difference"] = plus_minus(pair["difference"], half_width)
        if pair["allowed"]:
            row["p at these rates"] = f"{pair['p_primary_at_rates']:.2g}"
        row["p"] = f"{pair['p_primary']:.2g}"
        rows.append(row | {"verdict": {"better": "differ"}.get(outcome, outcome)})
    return text_table(rows)


def rate_table(rates: pd.DataFrame) -> pd.DataFrame:
    """Return a row per scheme: its best learning rate, and the losses at this rate, at half and at twice this rate.

    A column `trained at` is added if some scheme was not trained at its best rate.
    Arguments: rates, a row per rate (`posbench.reporting.table.rates` or `posbench.reporting.search.at_best_rates`).
    """
    rows = []
    for (experiment, scheme), pilots in rates.groupby(["experiment", "scheme"], sort=False):
        tried = pilots.set_index("train.lr")
        best = best_rate(dict(zip(pilots["train.lr"], pilots["loss"].fillna(math.inf), strict=True)))
        edge = " (edge)" if best in (pilots["train.lr"].min(), pilots["train.lr"].max()) else ""
        row = {"scheme": str(scheme), "experiment": str(experiment), "best rate": f"{best:g}{edge}"}
        for title, rate in (("loss", best), ("at half", best / 2), ("at twice", best * 2)):
            loss, status = (tried[name].get(rate, math.nan) for name in ("loss", "status"))
            row[title] = "died" if status == "died" else number(loss, 4)
        trained_at = pilots["trained_at"].iloc[0]
        rows.append(row | ({} if trained_at == best else {"trained at": f"{trained_at:g}"}))
    return text_table(rows).drop(columns=[] if rates["experiment"].nunique() > 1 else "experiment")


def published_table(agreement: Agreement) -> pd.DataFrame:
    """Return a row per scheme: published value and gap next to our gap, in the published order."""
    rows = []
    for scheme, figures in agreement.table.iterrows():
        row = {"scheme": str(scheme), "published": f"{figures['published']:g}"}
        is_base = scheme == agreement.baseline
        row["published gap"] = "0" if is_base else number(figures["published_gap"], sign=True)
        if agreement.theirs.metric in ("loss", "perplexity"):
            del row["published"]
        row["our gap"] = "0" if is_base else with_interval(figures, "gap", sign=True)
        rows.append(row)
    return text_table(rows)


def by_tables(groups: Mapping[Any, Comparison], is_rate: bool) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return two tables of schemes by groups: mean loss, and mean gap to the baseline over the seeds that both have.

    Each scheme's lowest loss is bold; `*` marks a gap that is significant in its group.
    Arguments: is_rate, whether groups are learning rates; if so, the first table also has the gap to the baseline at
    each scheme's best rate.
    """
    validations = {value: c.validation() for value, c in groups.items()}
    means = pd.DataFrame({value: c.losses.mean() for value, c in groups.items()})
    best, lowest = means.idxmin(axis=1), means.min(axis=1)
    schemes = sorted(means.index, key=lambda s: (lowest[s] if is_rate else _mean_gap(groups, s), s))
    at_best = {scheme: groups[best[scheme]].losses[scheme] for scheme in schemes}
    base = next(iter(groups.values())).wanted_baseline
    losses, gaps = [], []
    for scheme in schemes:
        loss_row, gap_row = ({"scheme": scheme} | dict.fromkeys(map(text_of, groups), DASH) for _ in range(2))
        for value, c in groups.items():
            if scheme not in c.schemes:
                continue
            title, validation = text_of(value), validations[value]
            cell = validation.loc[scheme] if scheme in validation.index else None
            text = plus_minus(means[value][scheme], half(cell, "value"))
            loss_row[title] = f"**{text}**" if value == best[scheme] and len(groups) > 1 else text
            if scheme == c.wanted_baseline:
                gap_row[title] = "0"
            elif c.wanted_baseline in c.schemes:
                mark = "\\*" if verdict(c.pairs, scheme, c.baseline, "baseline") in ("better", "worse") else ""
                gap_row[title] = with_interval(cell, "gap", sign=True) + mark
        if is_rate and base in at_best:
            gap = (at_best[scheme] - at_best[base]).dropna()
            mean, low, high = interval(gap)
            text = plus_minus(mean, (high - low) / 2, sign=True)
            loss_row[f"gap to {base} at best rates"] = "0" if scheme == base else text
        losses.append(loss_row)
        gaps.append(gap_row)
    return text_table(losses), text_table(gaps)


def _mean_gap(groups: Mapping[Any, Comparison], scheme: str) -> float:
    return float(
        np.mean([(c.losses[scheme] - c.losses[c.baseline]).mean() for c in groups.values() if scheme in c.losses])
    )


def markdown(table: pd.DataFrame) -> str:
    """Return the table in GitHub's Markdown, the first column aligned to the left, the others to the right."""
    rule = [":--", *["--:"] * (len(table.columns) - 1)]
    lines = [list(table.columns), rule, *table.to_numpy().tolist()]
    return "\n".join(" | ".join(line) for line in lines)


def latex(table: pd.DataFrame, caption: str, label: str) -> str:
    """Return the table in LaTeX (`booktabs`), with bold text and special characters translated."""
    signs = {"±": r"$\pm$", DASH: "--", "≥": r"$\geq$", "\\*": "*"}

    def text(value: str) -> str:
        value = value.replace("\\*", "*")
        for special in "&%$#_":
            value = value.replace(special, f"\\{special}")
        for sign, shown in signs.items():
            value = value.replace(sign, shown)
        return re.sub(r"\*\*(.+?)\*\*", r"\\textbf{\1}", value)

    escaped = table.rename(columns=text).map(text)
    layout = "l" + "r" * (len(table.columns) - 1)
    return str(escaped.to_latex(index=False, caption=text(caption), label=label, column_format=layout, position="t"))


def count_text(value: Any) -> str:
    """Return a count as text: `399,360`; a dash for NaN."""
    return DASH if math.isnan(value) else f"{value:,.0f}"


def flops_text(flops: Any) -> str:
    """Return a number of FLOPs as text: `6.15e12`; a dash for NaN."""
    return DASH if math.isnan(flops) else f"{flops:.2e}".replace("e+", "e")


def text_of(value: Any) -> str:
    """Format the value of a group of runs: `0.005`, `1.02M`, `demo`; the values in a tuple are joined by spaces."""
    if isinstance(value, tuple):
        return " ".join(map(text_of, value))
    if isinstance(value, int | float | np.number) and not isinstance(value, bool):
        return short_count(float(value)) if value >= 10_000 else f"{value:g}"
    return str(value)


def round_down(value: float) -> str:
    """Return a number rounded down to two digits, as text: `0.23` for 0.2339; `0` if it is not above 0."""
    if not value > 0:
        return "0"
    digits = max(0, 1 - math.floor(math.log10(value)))
    return f"{math.floor(value * 10**digits) / 10**digits:.{digits}f}"
