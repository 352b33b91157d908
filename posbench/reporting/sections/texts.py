"""Losses on other text than the runs were trained on: a section a text."""

from __future__ import annotations

from dataclasses import replace

from posbench.data.splitting import WHOLE
from posbench.evaluation.protocols import PROTOCOLS, VALIDATION
from posbench.reporting.findings import Findings
from posbench.reporting.sections.lengths import change_tables, perplexity_table
from posbench.reporting.sections.ngrams import bits_text
from posbench.reporting.sections.section import Section
from posbench.reporting.tables import DASH, Table, gap_text, half_text, length_text, plus_minus
from posbench.reporting.texts import OtherText


def other_texts(findings: Findings) -> list[Section]:
    """A section for each text that any of the compared runs was scored on and none was trained on."""
    return [_section(findings, text) for text in findings.texts]


def _section(findings: Findings, text: OtherText) -> Section:
    here = replace(findings, measurements=text.measurements, variants=text.variants)
    title = f"Loss on other text: {text.name}"
    words = [
        f"The runs were trained on data={findings.config.data.name} and are ranked by it alone; this is another text, "
        f"cut by their own tokenizer. {_scored(here)}",
        "Compare schemes by their gaps, which are paired by seed as in the loss table. ± is half the 95% interval over "
        "seeds, “by texts” that over documents; these pairs are not tested. Compare texts by bits per byte and not by "
        "nats per token: a tokenizer made for one text cuts another into shorter tokens.",
        _overlap_words(text),
    ]
    tables = [loss_table(here, title)] if here.at(VALIDATION.name) else []
    for protocol in (p for p in PROTOCOLS.values() if p.is_by_length and here.lengths(p.name)):
        tables += [
            replace(table, title=f"{table.title}, on {text.name}")
            for table in (perplexity_table(here, protocol.name), *change_tables(here, protocol.name))
        ]
    return Section(title, words, tables)


def loss_table(findings: Findings, title: str) -> Table:
    """The loss at the training length: one row a scheme, in the order of the ranking on the runs' own text."""
    there, base = findings.at(VALIDATION.name), findings.baseline
    has_gaps = base in there
    headers = ["scheme", "loss\nnats/token"]
    headers += [f"gap to {base}\nnats/token", "gap\nby texts"] if has_gaps else []
    headers += ["bits\nper byte"]
    rows = []
    for m in (there[scheme] for scheme in findings.schemes if scheme in there):
        is_base = m.scheme == base
        row = [m.scheme, plus_minus(m.loss.mean, m.loss.half_width)]
        if has_gaps:
            row += [gap_text(m.gap.mean, m.gap.half_width, is_base), DASH if is_base else half_text(m.gap_documents)]
        rows.append([*row, bits_text(m.bits_per_byte, m.loss)])
    return Table(title, headers, rows)


def _scored(findings: Findings) -> str:
    """How much of the text stands behind the tables, by protocol."""
    parts: dict[str, str] = {}
    for m in findings.measurements:
        split = "the whole text" if m.split == WHOLE else f"its {m.split} split"
        at = f" at {length_text(m.length)}" if m.protocol == VALIDATION.name else ""
        parts.setdefault(m.protocol, f"{m.protocol}{at}: {m.targets:,} tokens of {m.documents:,} documents ({split})")
    return f"Scored: {'; '.join(parts.values())}."


def _overlap_words(text: OtherText) -> str:
    known = {split: share for split, share in text.overlaps.items() if share is not None}
    if not known:
        return "How much of it also occurs in the text that the runs were trained on was not measured."
    shares = ", ".join(f"{share:.1%}" + (f" ({split})" if len(known) > 1 else "") for split, share in known.items())
    return f"Of its 13-grams of words {shares} also occur in the text that the runs were trained on."
