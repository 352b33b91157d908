"""Beyond the training length: perplexity by length and what changes, retrieval."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from posbench.evaluation.protocols import NONOVERLAPPING, POSITION, PROTOCOLS, RETRIEVAL, Protocol
from posbench.reporting.findings import Findings
from posbench.reporting.frame import records
from posbench.reporting.measure import Measurement
from posbench.reporting.sections.section import Section, pictures
from posbench.reporting.statistics import larger
from posbench.reporting.tables import DASH, Table, half_text, length_text, perplexity_text, plus_minus

if TYPE_CHECKING:
    import pandas as pd

_EARLY = (
    "“Gain”: the mean loss in windows of the training length T minus that in longer windows, over the targets that "
    "all lengths score. “Early”: an estimate of the gain if context beyond T tokens had no effect, only because fewer "
    "tokens are near the start of a window: (1 - T/length) times (mean loss at T - loss at the last positions of a "
    "T-token window). ± is half the 95 % interval over documents; it is missing where one document holds most of the "
    "text. The last positions hold other tokens than the first, and loss need not fall with position, so early is not "
    "a bound, and gain minus early does not measure what a longer context does."
)


def extrapolation(findings: Findings, drawn: list[str]) -> list[Section]:
    """Perplexity by length, one section a protocol: they are never mixed in one column."""
    compared = [p for p in PROTOCOLS.values() if p.is_by_length and findings.lengths(p.name)]
    return [_extrapolation(findings, drawn, protocol) for protocol in compared]


def _extrapolation(findings: Findings, drawn: list[str], protocol: Protocol) -> Section:
    table = perplexity_table(findings, protocol.name)
    some = next(m for m in findings.measurements if m.protocol == protocol.name)
    seeds = f"{len(some.seeds)} seed{'s' if len(some.seeds) > 1 else ''}"
    at = findings.training_length
    changed = change_tables(findings, protocol.name)
    words = [
        f"{protocol.caption} On the {some.split} split, {_scored(findings, protocol.name)}. Values are exp of the "
        f"mean loss over {seeds}{'; * marks the training length' if at in findings.lengths(protocol.name) else ''}. "
        "The number of decimals follows the larger interval of the loss, over seeds or over documents. "
        + (
            "To compare lengths, read the changes below."
            if changed
            else f"To see how the loss changes with length, add the training length: posbench eval -p {protocol.name} "
            f"-l {at}"
        )
    ]
    caption = f"Perplexity against length, both on log scales ({protocol.name}). {_BANDS}"
    shown = pictures(drawn, f"perplexity-{protocol.name}", caption)
    section = Section(table.title, words, [table, *changed], shown, short=f"Perplexity: {protocol.name}")
    if changed:
        section.words.append(_change_words(protocol))
    here = {m.scheme for m in findings.measurements if m.protocol == protocol.name}
    if any(variant.row in here for variant in findings.variants):
        section.words.append(_VARIANTS)
        section.pictures += pictures(drawn, f"rescaled-{protocol.name}", _RESCALED)
        section.pictures += pictures(drawn, f"factors-{protocol.name}", _FACTORS)
    if protocol.same_rows:
        section.words += _just_past(findings, protocol)
    if protocol is NONOVERLAPPING:
        _add_early_tokens(section, findings, drawn)
    return section


def _add_early_tokens(section: Section, findings: Findings, drawn: list[str]) -> None:
    """How much of the gain of longer windows is only that fewer tokens stand near a window's start."""
    if findings.early.empty:
        protocols = f"{POSITION.name},{NONOVERLAPPING.name}"
        command = f"posbench eval -p {protocols} -l {findings.training_length}"
        section.words.append(f"To estimate how much of a gain comes only from fewer early tokens: {command}")
    else:
        section.tables.append(early_table(findings))
        section.words.append(_EARLY)
    section.pictures += pictures(drawn, "protocols", _PROTOCOLS_CAPTION)


_BANDS = (
    "Bands show the change against the training length, so they have no width there: the larger of its 95 % intervals "
    "over seeds and over documents. With two seeds they are left out, because they would hide the lines."
)
_VARIANTS = (
    "Rows with a dot, such as “qk_rope · yarn”, are the same runs evaluated with other options of the scheme, without "
    "training again; their change is against the loss as trained."
)
_RESCALED = (
    "Perplexity against length as trained (black) and with frequencies rescaled by length / training length, "
    "without training again; one panel per scheme, all on the same scale."
)
_FACTORS = (
    "The factor by which frequencies are rescaled, at one length: with the factor length / training length (dotted) "
    "the longest position falls inside the trained range. 1 means as trained."
)
_PROTOCOLS_CAPTION = (
    "The same runs by both protocols: change of the loss with length, for fixed targets (solid) and non-overlapping "
    "windows (dashed). Dotted: an estimate of the effect of fewer early tokens alone on the latter. "
    f"{_BANDS} Scales differ between panels."
)


def _scored(findings: Findings, protocol: str) -> str:
    """How many tokens of how many documents a column scores; of each, where columns differ."""
    counts = {m.length: (m.targets, m.documents) for m in findings.measurements if m.protocol == protocol}
    each = [f"{targets:,} tokens of {documents:,} documents" for targets, documents in counts.values()]
    if len(set(each)) == 1:
        return f"{each[0]} scored at each length"
    return "scored at " + "; at ".join(f"{length_text(n)}: {what}" for n, what in zip(counts, each, strict=True))


def _just_past(findings: Findings, protocol: Protocol) -> list[str]:
    """How many of a window's targets are beyond the training length, at lengths where not all are."""
    at = findings.training_length
    here = findings.at(protocol.name).values()
    targets = max((int(m.results[0].windows["targets"].max()) for m in here), default=0)
    past = [f"{n - at} at {length_text(n)}" for n in findings.lengths(protocol.name) if at < n < at + targets]
    if not past:
        return []
    return [
        f"Just past the training length only some of the {targets} targets at the end of a window are beyond it: "
        f"{', '.join(past)}. The others are at positions that training had."
    ]


def perplexity_table(findings: Findings, protocol: str) -> Table:
    """One row a scheme, one column a length."""
    lengths = findings.lengths(protocol)
    places = {length: findings.at(protocol, length) for length in lengths}
    headers = ["scheme", *(length_text(n) + ("*" if n == findings.training_length else "") for n in lengths)]
    schemes = [s for s in findings.rows if any(s in places[n] for n in lengths)]
    rows = [[s, *(_perplexity(places[n][s]) if s in places[n] else DASH for n in lengths)] for s in schemes]
    return Table(f"Perplexity by length in tokens: {protocol}", headers, rows)


def _perplexity(m: Measurement) -> str:
    return perplexity_text(m.perplexity, float(larger(m.loss.half_width, m.loss_documents)))


def change_tables(findings: Findings, protocol: str) -> list[Table]:
    """The change of the loss against the training length, ± over documents, and its ± over seeds; one row a scheme."""
    at = findings.training_length
    lengths = [n for n in findings.lengths(protocol) if n != at]
    places = {n: findings.at(protocol, n) for n in lengths}
    known = [m for n in lengths for m in places[n].values() if not math.isnan(m.change.mean)]
    if not known:
        return []
    schemes = [s for s in findings.rows if any(m.scheme == s for m in known)]
    headers = ["scheme", *map(length_text, lengths)]
    title = f"change of the loss against {length_text(at)}: {protocol}"

    def table(name: str, text: Callable[[Measurement], str]) -> Table:
        rows = [[s, *(text(places[n][s]) if s in places[n] else DASH for n in lengths)] for s in schemes]
        return Table(name, headers, rows)

    tables = [table(title.capitalize(), lambda m: plus_minus(m.change.mean, m.change_documents, sign=True))]
    if any(not math.isnan(m.change.low) for m in known):
        tables.append(table(f"± over seeds, {title}", lambda m: half_text(m.change.half_width)))
    return tables


def _change_words(protocol: Protocol) -> str:
    """What is paired."""
    paired = (
        "the same targets at both lengths"
        if protocol.same_rows
        else "the same text; a length that does not divide the longest omits the end of each stretch"
    )
    return (
        f"Change: the loss (nats/token) minus that of the same runs at the training length, paired by seed and by "
        f"document ({paired}). ± is half its 95 % interval over documents; a second table gives that over seeds "
        "(Student's t)."
    )


def early_table(findings: Findings) -> Table:
    """The gain of long non-overlapping windows, and the part that fewer early tokens alone explain."""
    early = findings.early.set_index(["scheme", "length"])
    lengths = sorted(set(findings.early["length"]))
    schemes = [s for s in findings.schemes if s in set(findings.early["scheme"])]
    parts = ("gain", "early")
    headers = ["scheme", *(f"{length_text(n)}\n{part}" for n in lengths for part in parts)]
    rows = [
        [
            s,
            *(
                plus_minus(early.loc[(s, n), part], early.loc[(s, n), f"{part}_documents"], sign=True)
                if (s, n) in early.index
                else DASH
                for n in lengths
                for part in parts
            ),
        ]
        for s in schemes
    ]
    at = length_text(findings.training_length)
    return Table(f"Gain over windows of {at}, and of fewer early tokens alone, nats/token", headers, rows)


def retrieval(findings: Findings, drawn: list[str]) -> Section | None:
    """The retrieval probe, by two scores: one row a scheme, one column a gap."""
    rows = findings.probes[RETRIEVAL.name]
    if rows.empty:
        return None
    tables = [retrieval_table(findings, "drop", "benefit of repetition")]
    words = [
        "Benefit of repetition: a window holds a passage, other text, and the passage again. The score is how much "
        "lower the loss of the second copy is than after another first passage. A model that only expects words it has "
        f"seen gains here too. {_of_each(rows, 'trials')} trials, {_of_each(rows, 'targets')} targets per "
        "gap; ± is half the 95 % interval over trials of the mean over seeds."
    ]
    if rows["by_order"].notna().any():
        tables.append(retrieval_table(findings, "by_order", "the part due to order"))
        words.append(
            "The part due to order: the same, compared with a window whose first copy is shuffled. Both hold the same "
            "words, so only a model that uses the order of the passage gains."
        )
    caption = (
        "How much easier a passage is when it was read before, against the gap between its two copies. Bands are "
        "95 % intervals over trials of the mean over seeds."
    )
    return Section("Retrieval", words, tables, pictures(drawn, RETRIEVAL.name, caption))


def retrieval_table(findings: Findings, score: str, name: str) -> Table:
    """One score of the retrieval probe with its interval over trials."""
    frame = findings.probes[RETRIEVAL.name]
    rows = {(row["scheme"], row["gap"]): row for row in records(frame)}
    gaps = sorted(set(frame["gap"]))

    def cell(scheme: str, gap: int) -> str:
        if (scheme, gap) not in rows:
            return DASH
        row = rows[scheme, gap]
        return plus_minus(row[score], row[f"{score}_texts"], sign=True)

    shown = [[s, *(cell(s, gap) for gap in gaps)] for s in findings.schemes if s in set(frame["scheme"])]
    headers = ["scheme", *(length_text(int(gap)) for gap in gaps)]
    return Table(f"Retrieval: {name} by gap in tokens, nats/token", headers, shown)


def _of_each(rows: pd.DataFrame, column: str) -> str:
    """`496`, or `465 to 496` where it differs between gaps."""
    return " to ".join(f"{count:,}" for count in sorted({rows[column].min(), rows[column].max()}))
