"""The sections of a comparison's report as data, in their order: each function returns those about one question.

A protocol brings the sections about its own results (`posbench.evaluation.protocols`). `posbench.reporting.figures`
draws the pictures, and the template prints titles, tables and notes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import pandas as pd

from posbench.config.units import count_of, number, short_count
from posbench.evaluation.protocols import PROTOCOLS
from posbench.evaluation.protocols.section import Plot, Section, joined
from posbench.reporting import tables
from posbench.reporting.against import agreements, link_verdict
from posbench.reporting.comparison import Comparison
from posbench.reporting.pages import words
from posbench.reporting.statistics import decided, equivalent


def sections_of(c: Comparison, margin: float, every_length: bool) -> list[Section]:
    """Return all sections of the report.

    Arguments: margin, below which losses count as equal, nats a token; every_length, whether to show lengths that are
    neither a multiple nor a part of the training length.
    """
    brought = chain.from_iterable(protocol.sections(c, every_length) for protocol in PROTOCOLS.values())
    return [
        losses(c, margin),
        *fixed_before_training(c),
        *all_pairs(c, margin),
        *joined(sorted(brought, key=lambda section: section.is_last), c.schemes),
        *([Section("", files={"ngrams.csv": c.ngrams})] if len(c.ngrams) else []),
        *learning_rates(c),
        costs(c),
        *published(c),
    ]


def losses(c: Comparison, margin: float) -> Section:
    """Return the loss table with the gaps to the baseline, which continues the head of the page."""
    table = tables.loss_table(c)
    lines = []
    if c.can_rank:
        equal = f"; equal: closer than {margin}" if "equal" in table["verdict"].values else ""
        not_decided = "; open: not decided" if "open" in table["verdict"].values else ""
        lines.append(
            "±: half the 95 % interval over seeds; gaps are paired by seed. Schemes that share a letter do not differ "
            f"significantly (paired t-tests of all {len(c.pairs)} pairs, Holm's correction). Verdict: against "
            f"{c.baseline}, corrected over {len(c.schemes) - 1} pairs{equal}{not_decided}."
        )
        if c.allowed:
            lines.append(
                f"Gaps are tested beyond {c.allowed:.2g} nats, which a rate beside the best would typically cost."
            )
    elif len(c.seeds) == 2:
        lines.append("Gaps are paired by seed. Two seeds give no useful intervals.")
    if c.has_onsets:
        lines.append(
            "Caught on: seeds that use order more than 32 tokens back by the end; where only some do, look at the "
            "seeds and not at the mean."
        )
    if any(" layers" in name for name in table["scheme"]):
        lines.append("“of ... layers”: the pattern of the scheme has more layers than the model.")
    if len(c.ngrams):
        ngrams = ", ".join(f"{number(n.loss)} (n={n.order})" for n in c.ngrams.itertuples())
        lines.append(f"\nFor scale, n-gram models of the same text lose {ngrams}.")
    diverged = "; ".join(
        f"{r.scheme} seed {r.seed}, {r.diverged}" for r in c.runs.dropna(subset="diverged").itertuples()
    )
    if diverged:
        lines.append(f"\nDiverged: {diverged}. A diverged run that finished stays in all means.")
    interval = ", 95 % interval over seeds" if c.can_rank else ""
    caption = f"Gap to {c.baseline}: mean{interval}, and each seed as a small dot."
    plots = [Plot("gaps", "gaps", caption, c.losses)] if len(c.schemes) > 1 else []
    latex = ("loss", f"Loss on held-out text, nats/token. {models(c)}.")
    return Section("", plots=plots, table=table, note="\n".join(lines), latex=latex)


def fixed_before_training(c: Comparison) -> list[Section]:
    """Return the tests of the pairs that the experiment fixed before it was trained."""
    table = tables.primary_table(c) if c.can_rank else pd.DataFrame()
    if table.empty:
        return []
    beyond = f" of a difference beyond {c.allowed:.2g} nats, what the choice of rates may cost" if c.allowed else ""
    note = (
        f"p: paired t-test{beyond}, Holm's correction over {c.num_fixed_pairs} pairs; ± is half the 95 % interval, not "
        "corrected. “differ” needs p of at most 0.05, and a sign test over seeds that does not speak against it."
    )
    return [Section("Pairs fixed before training", table=table, note=note)]


def all_pairs(c: Comparison, margin: float) -> list[Section]:
    """Return the picture of all pairs of schemes."""
    if not c.can_rank:
        return []
    equal = len(equivalent(c.pairs))
    legend = f"; =: equal to within {margin} nats" if equal else ""
    caption = f"How much better the row's scheme is than the column's. ●: significant over all pairs{legend}."
    note = f"{len(decided(c.pairs))} of {len(c.pairs)} pairs differ significantly"
    note += f", {equal} are equal (pairs.csv)." if equal else " (pairs.csv)."
    return [Section("Who beats whom", plots=[Plot("pairs", "matrix", caption, c.pairs)], note=note)]


def learning_rates(c: Comparison) -> list[Section]:
    """Return the losses at the rates that were tried."""
    if c.rates.empty:
        return []
    table = tables.rate_table(c.rates)
    if c.has_pilots:
        note = (
            "Mean loss of pilots at each rate, with other seeds and on text that no table scores (`posbench tune`, "
            "rates.csv)."
        )
    else:
        note = (
            "Mean loss at each rate (rates.csv). The best rate was chosen with the seeds of this table, so its loss "
            "looks a little better than it is."
        )
    note += (
        " The same rates for all schemes that were tuned together; edge: the best is the lowest or the highest. Of "
        "rates within 0.01 of the lowest loss the middle one is the best."
    )
    if "trained at" in table:
        note += " Trained at: where the runs have another rate than the best."
    plot = Plot("rates", "rates", f"Loss {'of the pilots ' if c.has_pilots else ''}against the learning rate.", c.rates)
    return [Section("Learning rates", plots=[plot], table=table, note=note)]


def costs(c: Comparison) -> Section:
    """Return what each scheme costs, and the losses during training."""
    table, same = tables.costs_table(c)
    shared = "; ".join(f"{name} {value}" for name, value in same.items())
    note = f"The same for all: {shared}. " if same else ""
    if sizes := _other_sizes(c):
        note += f"Other sizes than {c.baseline}, which mix into the gap: {', '.join(sizes)}. "
    note += "FLOPs are theoretical. `posbench bench` compares speeds fairly; those in runs.csv depend on what else the "
    note += "machine did."
    caption = f"Gap to {c.baseline} during training; learning rates come down towards the end."
    is_drawn = len(c.schemes) > 1 and c.curves.groupby("scheme")["tokens"].nunique().max() > 2
    plots = [Plot("curves", "curves", caption, c.curves)] if is_drawn else []
    differ = len(table.columns) > 1
    latex = ("costs", f"Costs. {shared}") if differ else None
    return Section("Costs", plots=plots, table=table if differ else None, note=note, latex=latex)


def published(c: Comparison) -> list[Section]:
    """Return a section for each published column that has a counterpart here."""
    theirs = c.published
    found = agreements(theirs, c) if theirs else []
    if not theirs or not found:
        return []
    claims = [verdict for link in theirs.links(c.schemes) if (verdict := link_verdict(c, link))] if c.can_rank else []
    sections = []
    for n, agreement in enumerate(found):
        table, note = tables.published_table(agreement), ""
        if len(table) > 3:
            tau = f"{agreement.tau:.2f} over {len(table)} schemes (p = {agreement.p:.2g})"
            note += f"Kendall's tau of the two orders: {tau}. "
        if n == 0 and len(claims) > 1:
            note += f"Of {len(claims)} published claims, {_verdicts(claims)}. "
        note += f"Ours: {agreement.where}."
        if n == len(found) - 1:
            note += (
                f" Theirs: {theirs.models}. Tokenizers differ, so compare the order, not the size. <{theirs.source}>"
            )
        title = f"Compared with {theirs.title}" + (f": {agreement.theirs.what}" if found[1:] else "")
        stated = pd.concat([a.table.assign(measurement=a.theirs.what) for a in found]).reset_index()
        sections.append(Section(title, table=table, note=note, files={"against.csv": stated}))
    return sections


def _verdicts(claims: Sequence[str]) -> str:
    """Return `2 hold, 1 fails and 5 are open`."""
    forms = {"holds": ("holds", "hold"), "fails": ("fails", "fail"), "open": ("is open", "are open")}
    counts = {word: claims.count(word) for word in forms}
    return words([f"{n} {forms[word][n > 1]}" for word, n in counts.items() if n])


def models(c: Comparison) -> str:
    """Return what was trained, in one line."""
    runs = c.runs
    parameters = runs.loc[runs["scheme"] == c.baseline, "parameters"].iloc[0]
    return (
        f"{count_of(len(c.schemes), 'position scheme')}, {count_of(len(c.seeds), 'seed')}; models of "
        f"{short_count(parameters)} parameters after {short_count(runs['tokens'].iloc[0])} tokens of "
        f"{c.config['data']['name']}, context {c.training_length}"
    )


def _other_sizes(c: Comparison) -> list[str]:
    """Return the schemes whose parameters differ from the baseline's by half a percent or more."""
    sizes = c.runs.groupby("scheme")["parameters"].first().astype(float)
    shares = {scheme: sizes[scheme] / sizes[c.baseline] - 1 for scheme in c.schemes}
    return [f"{scheme} {share:+.1%}" for scheme, share in shares.items() if abs(share) >= 0.005]
