"""Our results beside published ones."""

from __future__ import annotations

import math

from posbench.reporting.findings import Findings
from posbench.reporting.published import FEWEST, SETUP, Comparison
from posbench.reporting.sections.section import Section
from posbench.reporting.statistics import Pair
from posbench.reporting.tables import Table, gap_text, millions, number, perplexity_text, plus_minus


def against(findings: Findings, c: Comparison) -> Section:
    """Ours beside one published column: values, gaps, the agreement of the orders, and how the set-ups differ."""
    title, short = f"Against {c.published.title}: {c.measurement.what}", f"Against {c.published.name}"
    if not c.rows:
        why = "none of its schemes was trained here" if c.where else "there is no evaluation here at its lengths"
        return Section(title, [f"Not compared: {why}."], on_terminal=False, short=short)
    words = [f"Ours: {c.where}. Gaps are in nats/token; a token is each side's own."]
    if not c.measurement.is_loss:
        words = [f"Ours: {c.where}, the loss. The published figure is not a loss, so only the orders are compared."]
    tables = [values_table(c)]
    if len(c.rows) > 1:
        by_seed = f"; by seed {min(c.taus):.2f} to {max(c.taus):.2f}" if len(c.taus) > 1 else ""
        tau = f": {c.tau:.2f} over {len(c.rows)} schemes (p = {c.p:.2g} for unrelated orders{by_seed})."
        few = f" needs at least {FEWEST} schemes; there are {len(c.rows)}."
        words.append(f"Kendall's tau of the two orders{tau if len(c.rows) >= FEWEST else few}")
        if c.disagreements:
            tables.append(disagreements_table(c))
        else:
            words.append("No pair is reversed.")
    words += c.published.notes
    if c is findings.against[0]:
        tables.append(setup_table(findings, c))
    return Section(title, words, tables, short=short)


def values_table(c: Comparison) -> Table:
    """The gaps side by side, and the published figures (ours are in the loss table)."""
    base, is_perplexity = c.baseline or "?", c.measurement.metric == "perplexity"
    headers = ["scheme", f"published gap\nto {base}", f"our gap\nto {base}", f"published\n{c.measurement.metric}"]
    rows = [
        [
            row.scheme,
            gap_text(row.their_gap, math.nan, row.scheme == base and c.measurement.is_loss),
            gap_text(row.our_gap.mean, row.our_gap.half_width, row.scheme == base),
            perplexity_text(row.theirs) if is_perplexity else number(row.theirs),
        ]
        for row in c.rows
    ]
    return Table("Published gaps and ours", headers, rows)


def disagreements_table(c: Comparison) -> Table:
    """The pairs whose order is reversed in our runs, and whether our difference is significant."""
    headers = ["published better, worse", "published\nworse - better", "ours\nworse - better", "ours\nsignificant?"]
    rows = [
        [
            f"{d.better}, {d.worse}",
            number(d.their_difference, sign=True),
            plus_minus(-d.pair.difference, d.pair.interval.half_width, sign=True),
            _significance(d.pair),
        ]
        for d in c.disagreements
    ]
    return Table("Pairs in reversed order", headers, rows, left=frozenset({0, 3}))


def _significance(pair: Pair) -> str:
    if pair.seeds < 2:
        return "1 seed: not tested"
    if not pair.is_tested:
        return "not tested: not in the chosen family of pairs"
    return f"{'yes' if pair.is_decided else 'no'} (p = {pair.p_holm:.2g})"


def setup_table(findings: Findings, c: Comparison) -> Table:
    """What they trained, what we trained, and what they did not publish."""
    config, runs = findings.config, findings.joined.runs
    ours = {
        "runs a scheme": str(len(findings.joined.seeds)),
        "parameters": millions(runs["parameters"].max()),
        "architecture": f"LLaMA-style decoder, {config.model.num_layers} layers of {config.model.d_model}",
        "data": f"{config.data.name}, {c.rows[0].ours.split} split",
        "training tokens": millions(runs["tokens"].max()),
        "context length": str(config.train.context_length),
        "learning rate": f"{config.train.lr:g}",
        "seeds": ", ".join(map(str, findings.joined.seeds)),
        "unit": f"a token of {config.tokenizer.kind}, {findings.vocab_size or 'unknown'} entries",
    }
    rows = [[what, c.published.setup.get(what, "not recorded here"), ours[what]] for what in SETUP]
    return Table("Set-up", ["", "published", "ours"], rows, left=frozenset({0, 1, 2}))
