"""Beyond the training length: perplexity by length, loss by position, retrieval."""

from __future__ import annotations

from posbench.reporting.evaluations import LENGTH_PROTOCOLS
from posbench.reporting.findings import Findings
from posbench.reporting.sections.section import Section, pictures
from posbench.reporting.tables import DASH, Table, length_text, number, perplexity_text

_PROTOCOLS = {
    "fixed": "Fixed targets: the same tokens are scored at every length, only the context to their left grows.",
    "nonoverlapping": "Non-overlapping windows: the text is cut into windows and every token scored. A longer window "
    "gains already by having fewer tokens near its start.",
    "sliding": "Sliding windows: windows overlap and only the last tokens of each are scored.",
}
_EARLY = (
    "“Early”: what windows longer than the training length T would gain if more than T tokens of context made no "
    "token better or worse, only because fewer tokens stand near a window's start: (1 - T/length) times (mean loss at "
    "T - loss at the end of a T-token window; of its last bucket, so at least this much). Gain less early is what the "
    "longer context did."
)


def extrapolation(findings: Findings, drawn: list[str]) -> list[Section]:
    """Perplexity by length, one section a protocol: they are never mixed in one column."""
    made = []
    for protocol in LENGTH_PROTOCOLS:
        if not findings.lengths(protocol):
            continue
        table = perplexity_table(findings, protocol)
        some = next(m for m in findings.measurements if m.protocol == protocol)
        seeds = f"{len(some.seeds)} seed{'s' if len(some.seeds) > 1 else ''}"
        words = [
            f"{_PROTOCOLS[protocol]} On the {some.split} split: {some.targets:,} tokens of {some.documents:,} "
            f"documents scored at {length_text(some.length)}. exp of the mean loss over {seeds}; * marks the training "
            "length."
        ]
        tables = [table]
        if protocol == "nonoverlapping" and not findings.early.empty:
            tables.append(early_table(findings))
            words.append(_EARLY)
        elif protocol == "nonoverlapping":
            at = findings.training_length
            words.append(f"How much of a gain is only that: posbench eval -p position,nonoverlapping -l {at}")
        caption = f"Perplexity against length, both on log scales ({protocol})."
        found = pictures(drawn, f"perplexity-{protocol}", caption)
        if protocol == "nonoverlapping":
            found += pictures(drawn, "protocols", _PROTOCOLS_CAPTION)
        made.append(Section(table.title, words, tables, found, short=f"Perplexity: {protocol}"))
    return made


_PROTOCOLS_CAPTION = (
    "The same runs by both protocols: loss against length, from the loss at the training length. Where longer "
    "non-overlapping windows (dashed) gain and fixed targets (solid) do not, the gain is only fewer early tokens; "
    "dotted: what fewer early tokens alone would give. Scales differ between panels."
)


def perplexity_table(findings: Findings, protocol: str) -> Table:
    """One row a scheme, one column a length."""
    lengths = findings.lengths(protocol)
    places = {length: findings.at(protocol, length) for length in lengths}
    headers = ["scheme", *(length_text(n) + ("*" if n == findings.training_length else "") for n in lengths)]
    schemes = [s for s in findings.schemes if any(s in places[n] for n in lengths)]
    rows = [
        [s, *(perplexity_text(places[n][s].perplexity) if s in places[n] else DASH for n in lengths)] for s in schemes
    ]
    return Table(f"Perplexity by length in tokens: {protocol}", headers, rows)


def early_table(findings: Findings) -> Table:
    """How much of the gain of long non-overlapping windows is only fewer early tokens."""
    early = findings.early.set_index(["scheme", "length"])
    lengths = sorted(set(findings.early["length"]))
    schemes = [s for s in findings.schemes if s in set(findings.early["scheme"])]
    parts = ("gain", "early")
    headers = ["scheme", *(f"{length_text(n)}\n{part}" for n in lengths for part in parts)]
    rows = [
        [
            s,
            *(
                number(early.loc[(s, n), part], 3, sign=True) if (s, n) in early.index else DASH
                for n in lengths
                for part in parts
            ),
        ]
        for s in schemes
    ]
    at = length_text(findings.training_length)
    return Table(f"Gain over windows of {at}, nats/token, and how much of it is fewer early tokens", headers, rows)


def position(drawn: list[str]) -> Section | None:
    """Loss by position in the longest windows."""
    found = pictures(
        drawn, "position", "Mean loss by position in the longest windows there are, in log-spaced buckets."
    )
    return Section("Loss by position", pictures=found, on_terminal=False) if found else None


def retrieval(findings: Findings, drawn: list[str]) -> Section | None:
    """The retrieval probe: one row a scheme, one column a gap."""
    if findings.retrieval.empty:
        return None
    grid = findings.retrieval.pivot_table(index="scheme", columns="gap", values=["drop"])["drop"]
    headers = ["scheme", *(length_text(int(gap)) for gap in grid.columns.tolist())]
    shown = [[s, *(number(v, 3, sign=True) for v in grid.loc[s].tolist())] for s in findings.schemes if s in grid.index]
    table = Table("Retrieval: drop of the loss by gap in tokens, nats/token", headers, shown)
    words = [
        "A held-out passage, other text, the same passage again: how much lower its loss is than behind the same text "
        "with another passage in front. 0 is a model that finds nothing, whatever its perplexity."
    ]
    caption = "How much easier a passage is for having been read before, against the gap between its two copies."
    return Section(table.title, words, [table], pictures(drawn, "retrieval", caption), short="Retrieval")
