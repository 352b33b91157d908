"""The loss table and the loss curves."""

from __future__ import annotations

import math

from posbench.evaluation.protocols import VALIDATION
from posbench.reporting.chains import letters
from posbench.reporting.findings import Findings
from posbench.reporting.sections.ngrams import ngram_rows, ngram_words
from posbench.reporting.sections.section import Section, pictures
from posbench.reporting.tables import DASH, Table, number, plus_minus, whole
from posbench.runs import FINISHED


def losses(findings: Findings, drawn: list[str]) -> Section:
    """The loss table and the picture of its gaps."""
    there, base, seeds = findings.at(VALIDATION.name), findings.baseline, len(findings.joined.seeds)
    words = []
    if there:
        m = next(iter(there.values()))
        words.append(
            f"Loss on the {m.split} split at the training length of {m.length:,} tokens: {m.targets:,} tokens scored "
            f"in {m.documents:,} documents, the same for every scheme."
        )
    if seeds > 1:
        words.append(
            f"± is half the 95% interval over {seeds} seeds (Student's t), each interval by itself. Gaps are paired: "
            "within a seed all schemes have the same initial weights and batches."
            + " Schemes that share a letter under “group” are not told apart by these seeds (the tests are those of "
            "the ranking below)." * findings.chain.is_tested
        )
    else:
        words.append(
            "1 seed: how much another seed would change is not known, so there are no intervals over seeds and no "
            "order is claimed."
        )
    if base and len(findings.schemes) > 1:
        words.append(
            "“By texts” is another doubt, not added to the first: half the 95% interval that the choice of documents "
            "leaves around the gap of these models."
        )
    words += ngram_words(findings)
    words.append(
        "Speed (median over seeds) and memory (mean of the runs that recorded it: on a CPU the first of each process) "
        "are of the machine as it was, not of the scheme alone: `posbench bench` compares them."
    )
    caption = f"Gap to {base}: mean{' and 95% interval' if seeds > 1 else ''} over seeds; dots below are seeds"
    caption += ", rings above are published." if findings.against else "."
    return Section("Loss on held-out text", words, [loss_table(findings)], pictures(drawn, "gaps", caption))


def loss_table(findings: Findings) -> Table:
    """One row a scheme, best first; then the schemes that have no run to compare, with what became of them.

    At its foot n-gram models.
    """
    there, base = findings.at(VALIDATION.name), findings.baseline
    published = findings.against[0] if findings.against else None
    theirs = {row.scheme: row.theirs for row in published.rows} if published else {}
    headers = ["scheme", "position", "loss\nnats/token"]
    headers += [f"gap to {base}\nnats/token"] if base else []
    groups = letters(findings.pairs) if findings.chain.is_tested else {}
    headers += ["group"] if groups else []
    headers += ["seeds"]
    headers += [f"published\n{published.measurement.metric}"] if published else []
    headers += ["gap\nby texts"] if base else []
    headers += ["bits\nper byte", "speed\ntokens/s", "memory\nMiB"]
    rows = []
    for scheme in findings.schemes:
        m = there.get(scheme)
        runs = findings.joined.runs[findings.joined.runs["scheme"] == scheme]
        row = [scheme, position_text(findings, scheme)]
        row += [plus_minus(m.loss.mean, m.loss.half_width) if m else number(runs["loss"].mean())]
        row += [gap_text(m.gap.mean, m.gap.half_width, scheme == base) if m else DASH] if base else []
        row += [groups[scheme]] if groups else []
        row += [str(len(m.seeds) if m else len(runs))]
        if published:
            digits = 3 if published.measurement.metric == "loss" else 2
            row += [number(theirs.get(scheme, math.nan), digits)]
        if base:
            row += [f"± {m.gap_documents:.4f}" if m and scheme != base and m.gap_documents >= 0 else DASH]
        row += [number(m.bits_per_byte if m else runs["bits_per_byte"].mean(), 3)]
        row += [whole(runs["tokens_per_second"].median()), whole(runs["peak_memory_bytes"].mean() / 2**20)]
        rows.append(row)
    for scheme, status in absent_schemes(findings).items():
        rows.append([scheme, DASH, status, *[DASH] * (len(headers) - 3)])
    foot = ngram_rows(findings, headers)
    return Table("Loss on held-out text", headers, rows, left=frozenset({0, 1}), foot=foot)


def position_text(findings: Findings, scheme: str) -> str:
    """What the scheme was measured to be, and what it promises where that is not the same."""
    measured = findings.measured.get(scheme, "not measured")
    runs = findings.joined.runs
    promised = runs.loc[runs["scheme"] == scheme, "is_relative"].iloc[0]
    word = {True: "relative", False: "absolute"}.get(promised, "nothing")
    return measured if measured == word else f"{measured} ({word} promised)"


def gap_text(mean: float, half_width: float, is_baseline: bool, digits: int = 4) -> str:
    """The baseline's own gap is 0 by definition and has no interval."""
    return "0" if is_baseline else plus_minus(mean, half_width, sign=True, digits=digits)


def absent_schemes(findings: Findings) -> dict[str, str]:
    """Schemes with runs of which none is compared -> what became of them."""
    gone = findings.frame[~findings.frame["scheme"].isin(findings.schemes)]
    became = gone["status"].where(gone["status"] != FINISHED, "left out")
    return {str(scheme): ", ".join(sorted(set(words))) for scheme, words in became.groupby(gone["scheme"])}


def training(drawn: list[str]) -> Section | None:
    """The loss curves."""
    caption = (
        "Validation loss while training (mean over seeds) and, below, the same as gaps to the baseline with their 95% "
        "intervals; the scale of the gaps is that of the last three quarters."
    )
    found = pictures(drawn, "curves", caption)
    return Section("Training", pictures=found, on_terminal=False) if found else None
