"""Build the tables of a report as DataFrames of text: a row per scheme, best first, numbers rounded."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd

from posbench.analysis.comparison import Comparison
from posbench.analysis.published_comparison import Agreement
from posbench.analysis.search import RateSearch
from posbench.analysis.statistics import (
    beaten_by,
    conclusions,
    fixed_pairs,
    interaction,
    interval,
    letters,
    significant_pairs,
    verdict,
)
from posbench.config.units import DASH, number, plus_minus, short_count
from posbench.evaluation.protocols.order import count_onsets
from posbench.evaluation.protocols.section import half, text_table, with_interval

Text = Mapping[str, str]


def loss_table(c: Comparison) -> pd.DataFrame:
    """Return a row per scheme: seeds, loss and gap to the baseline; with enough seeds also what the tests decide.

    Schemes that share a letter do not differ significantly; there are letters if all pairs are claimed (tested), not
    only some that the experiment fixed before training. "2/3": of three claimed pairs with this scheme, it beats the
    other in two.
    """
    validation = c.validation()
    is_lettered = c.can_rank and conclusions(c.ranked, c.pairs)["has_letters"]
    groups = letters(c.ranked, significant_pairs(c.pairs)) if is_lettered else {}
    gaps = c.losses.sub(c.losses[c.baseline], axis=0)
    tests = {f"beats {c.scope}": "p_claimed"} | (
        {"beats at these rates": "p_at_rates_claimed"} if c.is_at_best_rates else {}
    )
    rows = []
    for scheme in c.schemes:
        losses = c.losses[scheme].dropna()
        cell = validation.loc[scheme] if scheme in validation.index else None
        row = {"scheme": name_with_remarks(c, scheme), "seeds": str(len(losses))}
        caught = {"distant order": count_onsets(c.onsets[scheme])} if c.has_onsets else {}
        if c.can_rank:
            row |= {"group": groups.get(scheme, DASH)} if is_lettered else {}
            row |= {"loss": plus_minus(losses.mean(), half(cell, "value"))} | caught
            row[f"gap to {c.baseline}"] = "0" if scheme == c.baseline else with_interval(cell, "gap", sign=True)
            outcome = verdict(c.pairs, scheme, c.baseline)
            row[f"verdict {c.scope}"] = "" if scheme == c.baseline else outcome
            for title, test in tests.items():
                claims = c.pairs[(c.pairs["left"] == scheme) | (c.pairs["right"] == scheme)][test].notna().sum()
                row[title] = f"{len(beaten_by(scheme, c.schemes, c.pairs, test))}/{claims}"
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


def numbers(c: Comparison) -> list[dict[str, Any]]:
    """Return the numbers of `loss_table`, a dict per scheme, best first: seeds, loss, gap to the baseline, verdict.

    The verdict is better, worse, equal or open; None for the baseline, and for pairs that are not tested.
    """
    rows = []
    for scheme in c.schemes:
        losses = c.losses[scheme].dropna()
        row: dict[str, Any] = {"scheme": scheme, "baseline": c.baseline, "scope": c.scope.removeprefix("at ")}
        row["seeds"] = losses.index.to_list()
        for name, values in (("loss", losses), ("gap", (losses - c.losses[c.baseline]).dropna())):
            row[name], row[f"{name}_low"], row[f"{name}_high"] = interval(values)
        rows.append(row | {"verdict": (verdict(c.pairs, scheme, c.baseline) if c.can_rank else "") or None})
    return rows


def name_with_remarks(c: Comparison, scheme: str) -> str:
    """Return the scheme's name, with a remark in brackets if runs diverged or if it has more layers than the model."""
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
    """Return a table of parameters and FLOPs by scheme, and {name: value} of the figures that all schemes share.

    Shared figures are not in the table. Measured speeds are left out: runs of one experiment are trained one after
    another, on a more or less busy machine.
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


def claims_table(c: Comparison) -> pd.DataFrame:
    """Return a row per claimed pair: schemes, difference at these rates, p at these and at best rates, verdict.

    Claimed pairs are those that the experiment fixed before training, or all pairs. "These rates" are the learning
    rates of the compared runs, "best rates" those that a finished search chose; without one, there is only one p.
    """
    rows = []
    for pair in c.pairs.dropna(subset="p_claimed").to_dict("records"):
        half_width = (pair["difference_high"] - pair["difference_low"]) / 2
        row = {"lower loss": pair["left"], "higher loss": pair["right"], "seeds": str(pair["seeds"])}
        row["difference"] = plus_minus(pair["difference"], half_width)
        if c.is_at_best_rates:
            row["p at these rates"] = f"{pair['p_at_rates_claimed']:.2g}"
        row[f"p {c.scope}"] = f"{pair['p_claimed']:.2g}"
        outcome = verdict(c.pairs, pair["left"], pair["right"])
        rows.append(row | {f"verdict {c.scope}": {"better": "differ"}.get(outcome, outcome)})
    return text_table(rows)


def rate_table(search: RateSearch) -> pd.DataFrame:
    """Return a row per scheme and a column per learning rate: mean loss and, in brackets, the number of seeds.

    Rates that the search kept for more seeds are bold. The last column is the number of runs left to train.
    """
    rates = sorted(set(search.runs["train.lr"]))
    rows = []
    for scheme, losses in search.losses.items():
        kept, row = search.kept(scheme), {"scheme": scheme}
        for rate in rates:
            tried = losses.get(rate, pd.Series(dtype=float)).dropna()
            text = "diverged" if np.isinf(tried).any() else number(tried.mean())
            text = f"{text} ({len(tried)})" if len(tried) else DASH
            row[f"{rate:g}"] = f"**{text}**" if rate in kept else text
        rows.append(row | {"left to train": str(search.left(scheme))})
    return text_table(rows)


def published_table(agreement: Agreement) -> pd.DataFrame:
    """Return a row per scheme: published value and gap next to our gap, in the published order.

    Arguments: agreement, a column of a published table next to our results.
    """
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
    Arguments: groups, {value that a group of runs shares: their Comparison}; is_rate, whether groups are learning
    rates; if so, the first table also has the gap to the baseline at each scheme's best rate.
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
                mark = "\\*" if c.can_rank and verdict(c.pairs, scheme, c.baseline) in ("better", "worse") else ""
                gap_row[title] = with_interval(cell, "gap", sign=True) + mark
        if is_rate and base in at_best:
            gap = (at_best[scheme] - at_best[base]).dropna()
            mean, low, high = interval(gap)
            text = plus_minus(mean, (high - low) / 2, sign=True)
            loss_row[f"gap to {base} at best rates"] = "0" if scheme == base else text
        losses.append(loss_row)
        gaps.append(gap_row)
    return text_table(losses), text_table(gaps)


def pairs_by_group(groups: Mapping[Any, Comparison]) -> pd.DataFrame:
    """Return a row per claimed pair of schemes: its difference in each group of runs, and whether the signs agree.

    Claimed pairs are those that the experiment fixed before training, or all pairs; shown are those that all groups
    have. Each difference has its verdict: differ, equal, open or, if the group ranks nothing, not tested.
    Arguments: groups, {value that a group of runs shares: their Comparison}.
    """
    rows: dict[frozenset[str], dict[str, str]] = {}
    signs: dict[frozenset[str], set[str]] = {}
    for value, c in groups.items():
        claimed = fixed_pairs(c.config.get("experiment", {}).get("primary") or ()) or set(
            map(frozenset, combinations(c.schemes, 2))
        )
        for pair in c.pairs.to_dict("records"):
            name = frozenset((pair["left"], pair["right"]))
            if name not in claimed:
                continue
            row = rows.setdefault(name, {"lower loss": pair["left"], "higher loss": pair["right"]})
            sign = 1 if row["lower loss"] == pair["left"] else -1
            signs.setdefault(name, set()).add(pair["left"])
            half_width = (pair["difference_high"] - pair["difference_low"]) / 2
            outcome = verdict(c.pairs, pair["left"], pair["right"]) if c.can_rank else ""
            outcome = {"better": "differ", "": "not tested"}.get(outcome, outcome)
            text = plus_minus(sign * pair["difference"], half_width, sign=True)
            row[f"{text_of(value)}, {c.scope}"] = f"{text} {outcome}"
    shared = [name for name in rows if len(rows[name]) == len(groups) + 2]
    return text_table([rows[name] | {"same sign": "yes" if len(signs[name]) == 1 else "no"} for name in shared])


def interactions(groups: Mapping[Any, Comparison]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return how the gaps of claimed pairs differ between two groups of runs: a table of text, and one of numbers.

    Both are empty unless there are two groups. A pair is tested if both groups can rank.
    Arguments: groups, {value that a group of runs shares: their Comparison}.
    """
    if len(groups) != 2:
        return pd.DataFrame(), pd.DataFrame()
    (first_name, first), (second_name, second) = groups.items()
    fixed = fixed_pairs(first.config.get("experiment", {}).get("primary") or ())
    shared = [scheme for scheme in first.schemes if scheme in second.schemes]
    pairs = [pair for pair in combinations(shared, 2) if not fixed or frozenset(pair) in fixed]
    figures = interaction(first.losses, second.losses, pairs)
    if not (first.can_rank and second.can_rank):
        figures["p"] = math.nan
    rows = []
    for pair in figures.to_dict("records"):
        row = {"lower loss": pair["left"], "higher loss": pair["right"], "seeds": str(pair["seeds"])}
        row[f"gap, {text_of(first_name)}"] = number(pair["first_gap"], sign=True)
        row[f"gap, {text_of(second_name)}"] = number(pair["second_gap"], sign=True)
        half_width = (pair["difference_high"] - pair["difference_low"]) / 2
        row["difference"] = plus_minus(pair["difference"], half_width, sign=True)
        rows.append(row | {"p": "not tested" if math.isnan(pair["p"]) else f"{pair['p']:.2g}"})
    return text_table(rows), figures


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
    """Return the table in LaTeX (`booktabs`), with bold text and special characters translated.

    Arguments: table, of text in Markdown; label, for references to the table.
    """
    signs = {"±": r"$\pm$", DASH: "--", "≥": r"$\geq$", "\\*": "*"}

    def text(value: str) -> str:
        value = value.replace("\\*", "*")
        for special in "&%$#_":
            value = value.replace(special, f"\\{special}")
        for sign, shown in signs.items():
            value = value.replace(sign, shown)
        value = re.sub(r"(?<![\w.])-(?=\d)", "$-$", value)  # a minus sign, not a hyphen
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
    """Return the value that a group of runs shares as text: `0.005`, `1.02M`, `demo`.

    The values in a tuple are joined by spaces.
    """
    if isinstance(value, tuple):
        return " ".join(map(text_of, value))
    if isinstance(value, int | float | np.number) and not isinstance(value, bool):
        return short_count(float(value)) if value >= 10_000 else f"{value:g}"
    return str(value)
