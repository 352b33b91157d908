"""Loss by position in the longest windows: the picture, and the gaps behind it with their intervals."""

from __future__ import annotations

from posbench.evaluation.protocols import POSITION
from posbench.reporting.findings import Findings
from posbench.reporting.frame import records
from posbench.reporting.sections.section import Section, pictures
from posbench.reporting.statistics import larger
from posbench.reporting.tables import DASH, Table, gap_text, length_text

_CAPTION = (
    "Mean loss by position in the longest windows, in log-spaced buckets; below, the same as gaps to the "
    "baseline. Bands are 95 % intervals of a gap, the larger of those over seeds and over documents."
)
_WORDS = (
    "Gaps are paired by seed and by document. ± is half the 95 % interval over seeds or over documents, whichever is "
    "larger; position.csv holds both, and those of the losses. The intervals are not corrected for their number: one "
    "in twenty misses the true value."
)


def position(findings: Findings, drawn: list[str]) -> Section | None:
    """Loss by position, and a table of gaps where there is a baseline."""
    frame = findings.probes[POSITION.name]
    shown = pictures(drawn, POSITION.name, _CAPTION)
    if frame.empty or not shown:
        return None
    has_gaps = findings.baseline in set(frame["scheme"]) and frame["scheme"].nunique() > 1
    tables = [position_table(findings)] if has_gaps else []
    return Section("Loss by position", [_WORDS] if tables else [], tables, shown, on_terminal=False)


def position_table(findings: Findings) -> Table:
    """Gaps to the baseline in the longest windows: one row a bucket of positions, one column a scheme."""
    frame = findings.probes[POSITION.name]
    longest = int(frame["length"].max())
    cells: dict[tuple[int, int], dict[str, str]] = {}
    for row in records(frame[frame["length"] == longest].sort_values("bucket_start")):
        half = float(larger((row["gap_high"] - row["gap_low"]) / 2, row["gap_texts"]))
        bucket = cells.setdefault((row["bucket_start"], row["bucket_end"]), {})
        bucket[row["scheme"]] = gap_text(row["gap"], half, row["scheme"] == findings.baseline)
    schemes = [scheme for scheme in findings.schemes if scheme in set(frame["scheme"]) - {findings.baseline}]
    rows = [[_positions(*bucket), *(of.get(s, DASH) for s in schemes)] for bucket, of in cells.items()]
    title = f"Gap to {findings.baseline} by position in windows of {length_text(longest)}, nats/token"
    return Table(title, ["positions", *schemes], rows)


def _positions(start: int, end: int) -> str:
    """`0`, `3-4`; the end is not in the bucket."""
    return str(start) if end == start + 1 else f"{start}-{end - 1}"
