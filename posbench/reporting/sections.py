"""Build the sections of a comparison's report as data, and its page. The notes are in `templates/prose.j2`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from posbench.analysis.comparison import Comparison, SeedComparison
from posbench.analysis.loss_table import LossTable
from posbench.analysis.published import Agreement, Published, agreements
from posbench.analysis.search import RateSearch
from posbench.analysis.setups import SetupComparison
from posbench.analysis.statistics import beaten_by, interval, letters, significant_pairs, verdict
from posbench.analysis.tasks import TaskComparison
from posbench.config.units import DASH
from posbench.reporting.onset import onset_gaps
from posbench.reporting.page import prose
from posbench.reporting.protocols import sections_of_protocols
from posbench.reporting.protocols.order import count_onsets, long_range_order_section
from posbench.reporting.section import Format, Plot, Section, Table, half, in_order, joined, pivot
from posbench.reporting.setups import setup_sections
from posbench.reporting.text import as_text

SIGNED = Format(sign=True)


def sections_of(c: Comparison, published: Published | None, every_length: bool) -> list[Section]:
    """Return all sections about one comparison, in order.

    Arguments: published, results to compare with; every_length, whether to show lengths that are neither a multiple nor
    a divisor of the training length.
    """
    if isinstance(c, SetupComparison):
        return setup_sections(c)
    if isinstance(c, LossTable):
        return [losses(c), Section("Gaps while training", plots=gap_plots({"": c}))]
    of_protocols = joined(sections_of_protocols(c, every_length), c.schemes)
    if isinstance(c, TaskComparison) and c.search:
        return [*of_protocols, learning_rates(c, c.search)]
    if not isinstance(c, SeedComparison):
        return of_protocols
    sections = [losses(c)]
    if c.can_rank and c.fixed:
        sections.append(Section("Pairs fixed before training", table=claims_table(c), note=prose("claims", c)))
    sections += of_protocols
    sections += long_range_order_section(c)
    sections += onset_gaps(c)
    if c.search:
        sections.append(learning_rates(c, c.search))
    sections += while_training(c)
    sections.append(costs(c))
    if published:
        sections += beside_published(c, published)
    if len(c.seeds) > 1:
        sections.append(losses_of_seeds(c))
    return [_with_runs_in_captions(section, c) for section in sections]


def _with_runs_in_captions(section: Section, c: SeedComparison) -> Section:
    # Pictures and LaTeX tables are shown without their page, so captions name the schemes, seeds, models and text.
    models = f" {prose('models', c)}."
    dashes = "" if c.runs["is_relative"].astype(bool).all() else " Dashed: scores depend on more than distance."
    of_kind = {"lines": dashes, "panels": dashes}
    plots = [replace(plot, caption=plot.caption + of_kind.get(plot.kind, "") + models) for plot in section.plots]
    latex = section.latex and (section.latex[0], section.latex[1] + models)
    return replace(section, plots=plots, latex=latex)


# ---------------------------------------------------------------- losses


def losses(c: SeedComparison) -> Section:
    """Return the section with losses and gaps to the baseline, which has no heading."""
    table = loss_table(c)
    plots = [gaps_plot(c)] if len(c.schemes) > 1 else []
    latex = ("loss", prose("caption", c))
    return Section("", plots=plots, table=table, note=prose("losses", c, table.frame), latex=latex)


def gaps_plot(c: SeedComparison) -> Plot:
    """Return the picture of gaps to the baseline, with a dot per seed."""
    caption = f"Gap to {c.baseline} {c.scope}: mean and each seed as a small dot"
    marks = pd.DataFrame({"scheme": c.schemes, "x": c.ranking["gap"], "half": math.nan, "is_open": False})
    # With too few seeds only the dots are drawn, without intervals or tests.
    if c.can_rank:
        caption += "; bars are 95 % intervals over seeds. Filled marks: the pair with "
        caption += f"{c.baseline} is decided, by the test of the table; open: it is not"
        decided = significant_pairs(c.pairs)
        is_decided = marks["scheme"].map(lambda scheme: frozenset((scheme, c.baseline)) in decided)
        is_no_baseline = marks["scheme"] != c.baseline
        marks = marks.assign(half=half(c.ranking, "gap").where(is_no_baseline), is_open=is_no_baseline & ~is_decided)
    gaps = c.gaps.melt(var_name="scheme", value_name="x").dropna()
    x_label = f"gap to {c.baseline}, nats/token (left is better)"
    return Plot("gaps", "gaps", f"{caption}.", gaps, x_label=x_label, marks=marks)


def loss_table(c: SeedComparison) -> Table:
    """Return a row per scheme: seeds, loss and gap to the baseline; with enough seeds also what the tests decide.

    Schemes that share a letter do not differ significantly. "2/3": of three claimed pairs with this scheme, it beats
    the other in two.
    """
    gap_column, ranking = f"gap to {c.baseline}", c.ranking
    frame = pd.DataFrame({"scheme": [name_with_remarks(c, scheme) for scheme in c.schemes]})
    if c.can_rank:
        frame["verdict"] = ranking["verdict"]
    frame["seeds"] = [seeds_text(c, seeds) for seeds in ranking["seeds"]]
    # Letters need a test of every pair, not only of some that the experiment fixed before training.
    if c.conclusions.get("has_letters"):
        groups = letters(c.ranked, significant_pairs(c.pairs))
        frame["group"] = [groups.get(scheme, DASH) for scheme in c.schemes]
    frame["loss"] = ranking["loss"]
    if c.has_onsets:
        frame["order"] = [count_onsets(c.onsets[scheme]) for scheme in c.schemes]
    frame[gap_column] = ranking["gap"]
    # Too few seeds for intervals: the gap of each one is shown instead.
    if not c.can_rank:
        gaps_column = "each seed"
        if len(c.seeds) > 1:
            cells: list[Any] = []
            for scheme in c.schemes:
                of_seeds = c.gaps[scheme].dropna().to_list()
                cells.append("" if scheme == c.baseline else of_seeds)
            frame[gaps_column] = cells
        return Table(frame, {gap_column: SIGNED, gaps_column: SIGNED})
    frame["beats"] = [beaten_text(c, scheme, "p_claimed") for scheme in c.schemes]
    # After a search, the tests at these rates alone are shown too.
    if c.is_at_best_rates:
        frame["beats"] += [f" ({beaten_text(c, scheme, 'p_at_rates_claimed')})" for scheme in c.schemes]
    # `add` replaces the two plain columns from above by columns with intervals.
    table = Table(frame)
    table.add("loss", ranking["loss"], half(ranking, "loss"))
    table.add(gap_column, ranking["gap"], half(ranking, "gap").where(ranking["scheme"] != c.baseline), sign=True)
    return table


def seeds_text(c: SeedComparison, seeds: Sequence[int]) -> int | str:
    """Return how many seeds a scheme has, and how many of them the baseline has too if it lacks some."""
    shared = len({*seeds} & {*c.values[c.baseline].dropna().index})
    return len(seeds) if shared == len(seeds) else f"{len(seeds)}, {shared} shared"


def beaten_text(c: SeedComparison, scheme: str, test: str) -> str:
    """Return how many schemes this one beats, of all claimed pairs with it: `2/3`. Arguments: test, a column of p."""
    has_scheme = (c.pairs["left"] == scheme) | (c.pairs["right"] == scheme)
    return f"{len(beaten_by(scheme, c.schemes, c.pairs, test))}/{c.pairs.loc[has_scheme, test].notna().sum()}"


def name_with_remarks(c: SeedComparison, scheme: str) -> str:
    """Return the scheme's name, with a remark if runs diverged or if it has more layers than the model."""
    runs = c.runs[c.runs["scheme"] == scheme]
    remarks = []
    # JSON text with an entry per layer; None or NaN if all layers have the same scheme.
    recorded_layers = runs.iloc[0].get("scheme.layers")
    if isinstance(recorded_layers, str):
        defined, num_layers = len(json.loads(recorded_layers)), runs["model.num_layers"].iloc[0]
        if defined > num_layers:
            remarks.append(f"{num_layers} of {defined} layers")
    diverged = int(runs["diverged"].notna().sum())
    if diverged:
        remarks.append(f"{diverged} diverged")
    return f"{scheme} ({', '.join(remarks)})" if remarks else scheme


def claims_table(c: SeedComparison) -> Table:
    """Return a row per claimed pair: schemes, difference at these rates, p at these and at best rates, verdict.

    "These rates" are the learning rates of the compared runs, "best rates" those that a finished search chose; without
    one, there is only one p.
    """
    pairs = c.pairs.dropna(subset="p_claimed")
    frame = pairs[["left", "right", "seeds", "difference"]].rename(
        columns={"left": "lower loss", "right": "higher loss"}
    )
    table = Table(frame, {"p at these rates": Format("p"), f"p {c.scope}": Format("p")})
    table.add("difference", pairs["difference"], half(pairs, "difference"))
    if c.is_at_best_rates:
        frame["p at these rates"] = pairs["p_at_rates_claimed"]
    frame[f"p {c.scope}"] = pairs["p_claimed"]
    outcomes = []
    for names in zip(pairs["left"], pairs["right"], strict=True):
        # The columns already say which loss is lower.
        outcomes.append(verdict(c.pairs, *names).replace("better", "differ"))
    frame["verdict"] = outcomes
    return table


def losses_of_seeds(c: SeedComparison) -> Section:
    """Return the section with the loss of each run, a column per seed."""
    by_scheme = c.values.T.rename(columns="seed {}".format)
    table = Table(by_scheme.rename_axis("scheme").reset_index(), dict.fromkeys(map(str, by_scheme), Format(digits=4)))
    return Section("Losses of each seed", table=table)


# ---------------------------------------------------------------- learning rates, training, costs


def learning_rates(c: Comparison, search: RateSearch) -> Section:
    """Return the section with the losses at all learning rates that were tried."""
    table = rate_table(search)
    if isinstance(c, TaskComparison):
        return Section("Learning rates", table=table, note=prose("rates_of_task"))
    # Best scheme first, so that a panel holds neighbours; diverged runs have no finite loss to draw.
    runs = search.table[np.isfinite(search.table["loss"])].rename(columns={"train.lr": "x", "loss": "y"})
    means = runs.groupby(["scheme", "x"])["y"].mean().reset_index()
    means["best"] = means.groupby("scheme")["y"].transform("min")
    plot = Plot(
        "rates",
        "lines",
        "Loss against the learning rate: each seed, and the mean as a line. Open: never used long-range order.",
        means.sort_values(["best", "scheme", "x"], kind="stable"),
        "learning rate",
        "loss, nats/token",
        runs.assign(is_open=np.isinf(runs["onset_tokens"].astype(float))),
        x_scale="rates",
    )
    return Section("Learning rates", plots=[plot], table=table, note=prose("rates", c, search))


def rate_table(search: RateSearch) -> Table:
    """Return a row per scheme and a column per learning rate: mean loss and, in brackets, the number of seeds.

    Rates that the search kept for more seeds are bold. The last column is the number of runs left to train.
    """
    cells = []
    for scheme, losses in search.losses.items():
        for rate, losses_at_rate in losses.items():
            seeds = losses_at_rate.dropna()  # NaN: not trained; infinite: diverged
            # One diverged seed is enough: the mean of the others would flatter the rate.
            value = "diverged" if np.isinf(seeds).any() else seeds.mean()
            cell = {"scheme": scheme, "rate": rate, "value": value, "seeds": f" ({len(seeds)})"}
            cells.append(cell | {"is_kept": rate in search.kept(scheme)})
    rates = {rate: f"{rate:g}" for rate in sorted(set(search.runs["train.lr"]))}
    table = pivot(pd.DataFrame(cells), rates, "rate", format=Format(after="seeds", bold="is_kept"))
    table.frame["left to train"] = table.frame["scheme"].map(search.left)
    return table


def while_training(c: SeedComparison) -> list[Section]:
    """Return a section with the training losses, and the gaps in validation loss if there are any."""
    logged = in_order(c.logged("train", ["loss"]), c.schemes).rename(columns={"tokens": "x", "loss": "y"})
    if logged.empty:
        return []
    # Means of parts, because single batches are too noisy to compare.
    part = np.ceil(50 * logged["x"] / logged["x"].max())  # 1 to 50
    means = logged.groupby(["scheme", part.rename("part")], sort=False)[["x", "y"]].mean().reset_index()
    # The steep start would leave no room for the differences.
    points = means[(means["part"] > 2) & np.isfinite(means["y"])]
    caption = "Loss of the training batches, mean over seeds and 2 % of the steps; learning rates fall towards the end."
    x_label, y_label = "tokens trained on", "training loss, nats/token"
    plots = [Plot("training", "lines", caption, points, x_label, y_label, x_scale="tokens")]
    return [Section("While training", plots=[*plots, *gap_plots({"": c})])]


def gap_plots(groups: Mapping[str, SeedComparison]) -> list[Plot]:
    """Return the picture of gaps to the baseline against tokens, a panel per pair of schemes, if there are any.

    Arguments: groups, {name of a line: comparison}; with one group, all schemes are lines of one panel.
    """
    lines: list[pd.DataFrame] = []
    dots: list[pd.DataFrame] = []
    for name, c in groups.items():
        validation = c.logged("validation", ["loss"])
        # Two validations make no curve.
        if len(c.schemes) < 2 or validation.groupby("scheme")["tokens"].nunique().max() < 3:
            continue
        ends = c.ends
        for rows, parts in ((validation, lines), (ends, dots)):
            gaps = gaps_by_tokens(c, rows)
            if len(groups) > 1:
                gaps = gaps.assign(panel=[f"{scheme} − {c.baseline}" for scheme in gaps["scheme"]], scheme=name)
            parts.append(gaps)
    # In some groups, no scheme shares a seed with the baseline.
    lines, dots = ([part for part in parts if len(part)] for parts in (lines, dots))
    if not lines:
        return []
    points, marks = pd.concat(lines), pd.concat(dots)
    # Early gaps would set the scale and hide the late ones.
    points = points[points["x"] >= 0.1 * points["x"].max()]
    c = next(iter(groups.values()))
    caption = f"Gap to {c.baseline} on validation text while training, mean over seeds."
    if points["low"].notna().any():
        caption += " Bands: 95 % intervals over seeds."
    if marks["x"].nunique() > 1:
        caption += " Dots: runs that end there, after their learning rate has fallen."
    if len(groups) > 1:
        caption += "".join(f" {name}: {prose('models', c)}." for name, c in groups.items())
    marks, y_label = marks.assign(is_open=False), f"gap to {c.baseline}, nats/token"
    return [Plot("curves", "lines", caption, points, "tokens trained on", y_label, marks, level=0, x_scale="tokens")]


def gaps_by_tokens(c: SeedComparison, losses: pd.DataFrame) -> pd.DataFrame:
    """Return each scheme's loss minus the baseline's: scheme, x (tokens), y, and low and high, its 95 % interval.

    Arguments: losses, with columns scheme, seed, tokens, loss.
    """
    table = losses.pivot_table(index=["seed", "tokens"], columns="scheme", values="loss")
    # Only seeds and steps that both have are compared.
    gaps = table.sub(table[c.baseline], axis=0).drop(columns=c.baseline)
    long = gaps.reset_index().melt(["seed", "tokens"], var_name="scheme", value_name="gap").dropna()
    rows = []
    for (scheme, tokens), of_seeds in long.groupby(["scheme", "tokens"])["gap"]:
        rows.append({"scheme": scheme, "x": tokens, **dict(zip(("y", "low", "high"), interval(of_seeds), strict=True))})
    return in_order(pd.DataFrame(rows, columns=["scheme", "x", "y", "low", "high"]), c.schemes, "x")


def costs(c: SeedComparison) -> Section:
    """Return the section with the costs of each scheme."""
    # The table leaves out the figures that are equal for all schemes; the note names them.
    table, shared_figures = costs_table(c)
    sizes = c.runs.groupby("scheme")["parameters"].first().astype(float)
    shares = {scheme: sizes[scheme] / sizes[c.baseline] - 1 for scheme in c.schemes}
    # Below half a percent, sizes count as equal.
    other_sizes = [f"{scheme} {share:+.1%}" for scheme, share in shares.items() if abs(share) >= 0.005]
    shared = [f" {name} {value}." for name, value in shared_figures.items()]
    return Section(
        "Costs",
        table=table if len(table.frame.columns) > 1 else None,  # the first column only names the schemes
        note=prose("costs", c, shared_figures, other_sizes),
        latex=("costs", f"Costs.{''.join(shared)}"),
    )


def costs_table(c: SeedComparison) -> tuple[Table, dict[str, str]]:
    """Return a table of the parameters, FLOPs and caches of schemes, and {name: text} of the figures that all share.

    A shared figure that is unknown is in neither.
    """
    # Measured speeds are left out: runs of one experiment are trained one after another, on a more or less busy
    # machine.
    columns = {"parameters": "parameters", "training_flops": "training FLOPs", "cache_per_token": "cache a token"}
    means = c.runs.reindex(columns=["scheme", *columns]).groupby("scheme").mean().reindex(c.schemes)
    frame = means.rename(columns=columns).reset_index()
    table = Table(frame, {name: Format("count") for name in columns.values()} | {"training FLOPs": Format("flops")})
    texts = as_text(table)
    equal_texts = {name: texts[name].iloc[0] for name in columns.values() if texts[name].nunique() == 1}
    shared_figures = {name: text for name, text in equal_texts.items() if text != DASH}
    return Table(frame.drop(columns=list(equal_texts)), table.formats), shared_figures


# ---------------------------------------------------------------- published results


def beside_published(c: SeedComparison, published: Published) -> list[Section]:
    """Return a section for each published column that our runs can be compared with."""
    columns, sections = agreements(published, c), []
    if not columns:
        return []
    tables = [agreement.table.assign(measurement=agreement.theirs.description) for agreement in columns]
    first_files: Mapping[str, pd.DataFrame] = {"against.csv": pd.concat(tables).reset_index()}
    for agreement in columns:
        title = f"Compared with {published.title}"
        if len(columns) > 1:
            title += f": {agreement.theirs.description}"
        note = prose("published", published, agreement, agreement is columns[-1])
        sections.append(Section(title, table=published_table(agreement), note=note, files=first_files))
        # All columns share one file, which the first section carries.
        first_files = {}
    return sections


def published_table(agreement: Agreement) -> Table:
    """Return a row per scheme: published value and gap next to our gap, in the published order."""
    theirs = agreement.table
    # The baseline's gap to itself is 0 by definition and has no interval.
    is_base = theirs.index == agreement.baseline
    frame = pd.DataFrame({"scheme": theirs.index.astype(str)})
    # Of losses and perplexities the gaps are enough; other metrics have no gap in nats.
    if agreement.theirs.metric not in ("loss", "perplexity"):
        frame["published"] = theirs["published"].to_numpy()
    frame["published gap"] = theirs["published_gap"].astype(float).mask(is_base, 0.0).to_numpy()
    table = Table(frame, {"published": Format("plain"), "published gap": SIGNED})
    ours = theirs["gap"].astype(float).mask(is_base, 0.0)
    table.add("our gap", ours, half(theirs, "gap").astype(float).mask(is_base), sign=True)
    return table
