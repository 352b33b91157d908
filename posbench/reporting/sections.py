"""Build the sections of a comparison's report as data, in their order.

Each evaluation protocol builds the sections about its results (`posbench.evaluation.protocols`).
`posbench.reporting.figures` draws the pictures; the notes are in `templates/notes.j2`.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import pandas as pd

from posbench.analysis.comparison import Comparison
from posbench.analysis.published import Published
from posbench.analysis.published_comparison import agreements, link_verdict
from posbench.analysis.search import RateSearch
from posbench.analysis.statistics import conclusions
from posbench.config.units import DASH, count_of, short_count
from posbench.evaluation.protocols import PROTOCOLS
from posbench.evaluation.protocols.section import Plot, Section, joined, text_table
from posbench.reporting import tables
from posbench.reporting.onset import onset_gaps
from posbench.reporting.pages import environment

MOST_PAIRS = 30  # pairs in the table of a report by groups


def sections_of(c: Comparison, margin: float, every_length: bool) -> list[Section]:
    """Return all sections of a comparison's report as data, in order.

    Arguments: c, the compared runs; margin, nats per token below which losses count as equal; every_length, whether to
    show lengths that are neither a multiple nor a divisor of the training length.
    """
    brought = chain.from_iterable(protocol.sections(c, every_length) for protocol in PROTOCOLS.values())
    return [
        losses(c, margin),
        *(all_pairs(c, margin) if c.can_rank else []),
        *joined(sorted(brought, key=lambda section: section.is_last), c.schemes),
        *onset_gaps(c),
        *([Section("", files={"ngrams.csv": c.ngrams})] if len(c.ngrams) else []),
        *([learning_rates(c, c.search)] if c.search else []),
        *while_training(c),
        costs(c),
        *published(c),
    ]


def losses(c: Comparison, margin: float) -> Section:
    """Return the section with losses and gaps to the baseline, which has no heading and follows the opening line.

    Arguments: c, the compared runs; margin, nats per token below which losses count as equal.
    """
    table, interval = tables.loss_table(c), "; bars are 95 % intervals over seeds" if c.can_rank else ""
    caption = f"Gap to {c.baseline} {c.scope}: mean and each seed as a small dot{interval}."
    if c.can_rank:
        caption += f" Filled marks: the pair with {c.baseline} is decided, by the test of the table; open: it is not."
    plots = [Plot("gaps", "gaps", caption, c.losses)] if len(c.schemes) > 1 else []
    latex = ("loss", f"Loss on held-out text, nats/token. {models(c)}.")
    return Section("", plots=plots, table=table, note=_note("losses", c, table, margin), latex=latex)


def all_pairs(c: Comparison, margin: float) -> list[Section]:
    """Return a section on the pairs fixed before training, if there are any, and one with a picture of all pairs.

    Up to three schemes need no picture.
    Arguments: c, the compared runs; margin, nats per token below which losses count as equal.
    """
    summary = conclusions(c.ranked, c.pairs)
    fixed = Section("Pairs fixed before training", table=tables.claims_table(c), note=_note("claims", c))
    legend = f"; =: equal to within {margin} nats" if summary["equal"] else ""
    caption = f"How much better the row's scheme is than the column's, nats/token. ●: decided {c.scope}{legend}."
    plot = Plot("pairs", "matrix", caption, c.pairs)
    return [
        *([fixed] if c.num_fixed_pairs else []),
        *([Section("Who beats whom", plots=[plot], note=_note("pairs", c, summary))] if len(c.schemes) > 3 else []),
    ]


def learning_rates(c: Comparison, search: RateSearch) -> Section:
    """Return the section with the losses at all learning rates that were tried."""
    caption = "Loss against the learning rate: each seed, and the mean as a line. Open: never used distant order."
    plot = Plot("rates", "rates", caption, search.table)
    note = _note("rates", c, search)
    return Section(
        "Learning rates", plots=[plot], table=tables.rate_table(search), note=note, files={"rates.csv": search.table}
    )


def while_training(c: Comparison) -> list[Section]:
    """Return a section with the training losses, and the gaps in validation loss if runs were validated on the way."""
    caption = "Loss of the training batches, mean over seeds; learning rates fall towards the end."
    plots = [Plot("training", "training", caption, c.logged("train", ["loss"]))]
    validation = c.logged("validation", ["loss"])
    if len(c.schemes) > 1 and validation.groupby("scheme")["tokens"].nunique().max() > 2:
        plots.append(Plot("curves", "curves", f"Gap to {c.baseline} on validation text.", validation))
    return [Section("While training", plots=plots)] if len(plots[0].points) else []


def costs(c: Comparison) -> Section:
    """Return the section with the costs of each scheme."""
    table, same = tables.costs_table(c)
    sizes = c.runs.groupby("scheme")["parameters"].first().astype(float)
    shares = {scheme: sizes[scheme] / sizes[c.baseline] - 1 for scheme in c.schemes}
    other_sizes = [f"{scheme} {share:+.1%}" for scheme, share in shares.items() if abs(share) >= 0.005]
    return Section(
        "Costs",
        table=table if len(table.columns) > 1 else None,
        note=_note("costs", c, same, other_sizes),
        latex=("costs", "Costs. " + "; ".join(f"{name} {value}" for name, value in same.items())),
    )


def published(c: Comparison) -> list[Section]:
    """Return a section for each column of the published table that our runs can be compared with.

    The list is empty if the report is compared with no publication.
    """
    if c.published is None or not (columns := agreements(c.published, c)):
        return []
    claims = [link_verdict(c, link) for link in c.published.links(c.schemes)] if c.can_rank else []
    table = pd.concat([a.table.assign(measurement=a.theirs.description) for a in columns]).reset_index()
    return [
        Section(
            f"Compared with {c.published.title}" + (f": {agreement.theirs.description}" if columns[1:] else ""),
            table=tables.published_table(agreement),
            note=_note(
                "published", c.published, agreement, list(filter(None, claims)), n == 0, n == len(columns) - 1, c.scope
            ),
            files={"against.csv": table},
        )
        for n, agreement in enumerate(columns)
    ]


def by_sections(
    groups: Mapping[Any, Comparison], group_by: str, published: Published | None, margin: float
) -> list[Section]:
    """Return the sections of a report about groups of runs: losses, gaps, results of protocols, published claims.

    Arguments: groups, {value that a group of runs shares: their Comparison}; group_by, the column with these values;
    margin, nats per token below which losses count as equal.
    """
    names, is_rate = {value: tables.text_of(value) for value in groups}, group_by == "train.lr"
    loss, gap = tables.by_tables(groups, is_rate)
    by_name = {names[value]: c for value, c in groups.items()}
    claims = [
        {
            "claim": " ".join(link).replace(" / ", " ~ ").replace(" , ", " > "),
            **{names[value]: link_verdict(c, link) or DASH for value, c in groups.items()},
        }
        for link in (published.links({scheme for c in groups.values() for scheme in c.schemes}) if published else ())
        if any(c.can_rank for c in groups.values())
    ]
    latex = ("loss", f"Loss by scheme and {group_by}, nats/token; bold: the best of each row.")
    sections = [Section(f"Loss by scheme and {group_by}", table=loss, note=_note("losses_by", is_rate), latex=latex)]
    latex = ("gap", f"Gap to the baseline by scheme and {group_by}, nats/token.")
    sections += [
        Section(f"Gap to the baseline by scheme and {group_by}", table=gap, note=_note("gaps_by"), latex=latex)
    ]
    by_pair = tables.pairs_by_group(groups)
    if not is_rate and 0 < len(by_pair) <= MOST_PAIRS:
        sections.append(Section(f"Pairs by {group_by}", table=by_pair, note=_note("pairs_by", groups, names)))
    differences, figures = tables.interactions(groups)
    if len(differences):
        note = _note("interactions", [names[value] for value in groups], _own_matrices(groups))
        files = {"interaction.csv": figures}
        title = f"Difference of gaps between two values of {group_by}"
        sections.append(Section(title, table=differences, note=note, files=files))
    sections += chain.from_iterable(protocol.group_sections(by_name) for protocol in PROTOCOLS.values())
    if published and claims:
        note = _note("claims_by", published, margin)
        sections.append(Section(f"Published claims by {group_by}", table=text_table(claims), note=note))
    return sections


def _own_matrices(groups: Mapping[str, Comparison]) -> list[str]:
    """Return the schemes with matrices of their own, which AdamW trains beside Muon."""
    runs = pd.concat([c.runs for c in groups.values()])
    if "own_matrices" not in runs:
        return []
    return sorted(set(runs.loc[runs["own_matrices"].fillna(0) > 0, "scheme"]))


def _note(name: str, *content: Any) -> str:
    """Return the text of the Jinja macro `name` in the template `notes.j2`, called with the arguments `content`."""
    return str(getattr(environment().get_template("notes.j2").module, name)(*content)).strip("\n")


def models(c: Comparison) -> str:
    """Return one line about the trained models: schemes, seeds, parameters, tokens, data and context."""
    runs = c.runs
    parameters = runs.loc[runs["scheme"] == c.baseline, "parameters"].iloc[0]
    return (
        f"{count_of(len(c.schemes), 'position scheme')}, {count_of(len(c.seeds), 'seed')}; models of "
        f"{short_count(parameters)} parameters after {short_count(runs['tokens'].iloc[0])} tokens of "
        f"{c.config['data']['name']}, context {c.training_length}"
    )
