"""The loss table and the loss curves."""

from __future__ import annotations

import math

from posbench.evaluation.protocols import VALIDATION
from posbench.reporting.chains import letters
from posbench.reporting.findings import Findings
from posbench.reporting.sections.costs import cost_table, cost_words
from posbench.reporting.sections.diverged import diverged_count, diverged_words
from posbench.reporting.sections.ngrams import bits_text, ngram_rows, ngram_words
from posbench.reporting.sections.ranked import ranked
from posbench.reporting.sections.section import Section, pictures
from posbench.reporting.statistics import t_interval
from posbench.reporting.tables import DASH, Table, gap_text, half_text, number, plus_minus
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
            f"± is half the 95% interval over {seeds} seeds (Student's t), not corrected for their number. Gaps are "
            "paired: within a seed all schemes have the same initial weights and batches."
            + " Schemes that share a letter under “group” do not differ significantly (see the ranking below)."
            * findings.chain.is_tested
        )
    else:
        words.append(
            "1 seed: there are no intervals over seeds, and no order is claimed, because the effect of the seed is not "
            "known."
        )
    if base and len(findings.schemes) > 1:
        words.append(
            "“Gap ± by documents” is a separate uncertainty: half the 95% interval of the gap of these models over the "
            "choice of held-out documents."
            + (
                " “Gap ± both” combines the two: half the 95% interval of the gap over other seeds, trained on the "
                "same text, and other documents like the held-out ones. Another text or model size may differ by more."
            )
            * _has_joint(findings)
        )
    words += ngram_words(findings)
    words += cost_words(findings)
    caption = f"Gap to {base}: mean{' and 95% interval' if seeds > 1 else ''} over seeds; the dots below are seeds"
    caption += ", the rings above are published gaps." if findings.against else "."
    lead = " ".join([ranked(findings), *diverged_words(findings)])
    tables = [loss_table(findings), cost_table(findings)]
    return Section("Loss on held-out text", words, tables, pictures(drawn, "gaps", caption), lead=lead)


def loss_table(findings: Findings) -> Table:
    """One row a scheme, in the order of rows; at the end the schemes that are not compared, with what became of them.

    At its foot n-gram models. Seeds have a column only where they differ: a run diverged, or a scheme is not compared.
    """
    there, base, absent = findings.at(VALIDATION.name), findings.baseline, absent_schemes(findings)
    groups = letters(findings.pairs) if findings.chain.is_tested else {}
    has_seeds = bool(absent) or bool(findings.frame["diverged"].notna().any())
    headers = ["scheme", "position", "loss\nnats/token"]
    headers += [f"gap to {base}\nnats/token"] if base else []
    headers += ["group"] * bool(groups) + ["seeds"] * has_seeds
    has_joint = _has_joint(findings)
    headers += ["gap ± by\ndocuments"] if base else []
    headers += ["gap ±\nboth"] * has_joint
    headers += ["bits\nper byte"]
    rows = []
    for scheme in findings.schemes:
        m = there.get(scheme)
        runs = findings.joined.runs[findings.joined.runs["scheme"] == scheme]
        row = [scheme, position_text(findings, scheme)]
        row += [plus_minus(m.loss.mean, m.loss.half_width) if m else number(runs["loss"].mean())]
        row += [gap_text(m.gap.mean, m.gap.half_width, scheme == base) if m else DASH] if base else []
        row += [groups[scheme]] if groups else []
        row += [_seeds_text(findings, scheme, len(m.seeds) if m else len(runs))] if has_seeds else []
        row += [half_text(m.gap_documents) if m and scheme != base else DASH] if base else []
        row += [half_text(m.gap_joint) if m and scheme != base else DASH] * has_joint
        row += [bits_text(m.bits_per_byte, m.loss) if m else number(runs["bits_per_byte"].mean())]
        rows.append(row)
    for scheme, status in absent.items():
        row = [scheme, DASH, status, *[DASH] * (len(headers) - 3)]
        row[headers.index("seeds")] = _seeds_text(findings, scheme, 0)
        rows.append(row)
    foot = ngram_rows(findings, headers)
    return Table("Loss on held-out text", headers, rows, left=frozenset({0, 1}), foot=foot)


def _has_joint(findings: Findings) -> bool:
    """Whether a gap has an interval over seeds and texts together: it takes enough seeds and documents."""
    return any(not math.isnan(m.gap_joint) for m in findings.at(VALIDATION.name).values())


def _seeds_text(findings: Findings, scheme: str, compared: int) -> str:
    """`3`, `2 (1 of 3 diverged)`."""
    diverged = diverged_count(findings, scheme)
    return f"{compared} ({diverged})" if diverged else str(compared)


def position_text(findings: Findings, scheme: str) -> str:
    """What the scheme was measured to be, and what it promises where that is not the same."""
    measured = findings.measured.get(scheme, "not measured")
    runs = findings.joined.runs
    promised = runs.loc[runs["scheme"] == scheme, "is_relative"].iloc[0]
    word = {True: "relative", False: "absolute"}.get(promised, "nothing")
    return measured if measured == word else f"{measured} ({word} promised)"


def absent_schemes(findings: Findings) -> dict[str, str]:
    """Schemes with runs of which none is compared -> what is left of them, or else what became of them.

    What is left is the loss over the runs that could be compared but for their seeds.
    """
    gone = findings.frame[~findings.frame["scheme"].isin(findings.schemes)]
    became = gone["status"].where(gone["status"] != FINISHED, "not compared")
    absent = {str(scheme): ", ".join(sorted(set(words))) for scheme, words in became.groupby(gone["scheme"])}
    return absent | {scheme: text for scheme, text in _left(findings).items() if scheme in absent}


def _left(findings: Findings) -> dict[str, str]:
    """`3.912 (seed 0)` for each scheme that is not compared for its seeds alone."""
    runs = findings.joined.unshared
    if runs is None:
        return {}
    texts = {}
    for scheme, each in runs.groupby("scheme"):
        loss, seeds = t_interval(each["loss"].to_numpy()), sorted(each["seed"])
        of = f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
        texts[str(scheme)] = f"{plus_minus(loss.mean, loss.half_width)} ({of})"
    return texts
