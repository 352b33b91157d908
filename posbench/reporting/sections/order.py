"""How far back order matters: what destroying it costs by distance, and the reach of each scheme."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from posbench.evaluation.protocols import ORDER
from posbench.evaluation.protocols.order import reach
from posbench.reporting.findings import Findings
from posbench.reporting.frame import records
from posbench.reporting.sections.section import Section, pictures
from posbench.reporting.tables import DASH, Table, half_text, length_text, plus_minus

if TYPE_CHECKING:
    import pandas as pd


def order(findings: Findings, drawn: list[str]) -> Section | None:
    """For each length what is lost without order, with the reach, and without identity."""
    frame = findings.probes[ORDER.name]
    if frame.empty:
        return None
    words = [
        "Held-out windows are scored three times: as they are, with their first half shuffled, and with that half "
        "replaced by text of another document. A column is d, the number of intact tokens between the target and that "
        "half. Order lost: how much the loss rises when the first half is shuffled. Both readings hold the same "
        "tokens, so this is what a model gains from the order of the tokens more than d back. Identity lost: "
        f"how much the loss rises when the half is replaced. {_counts(frame)}. ± is half the 95 % interval over "
        "documents of the mean over seeds, unless a table says otherwise.",
        "Reach: the largest d such that order lost is above 0 at it and at every smaller d, by its intervals over "
        "documents and over seeds. “≥” means that this holds to the end of the window. 0 means that no use of order "
        "beyond the last token was found.",
    ]
    tables = [table for length in sorted(set(frame["length"])) for table in _tables(findings, frame, length)]
    caption = (
        "The cost of destroying the order (above) or the identity (below) of all tokens beyond a distance. "
        "Bands are 95 % intervals over documents of the mean over seeds. Scales are linear up to 0.01 and logarithmic "
        "from there on."
    )
    return Section("How far back order matters", words, tables, pictures(drawn, ORDER.name, caption))


def reaches(frame: pd.DataFrame, length: int) -> dict[str, str]:
    """Scheme -> `16`, `≥ 64` where the window ends there, a dash where it is not known."""
    texts = {}
    for scheme, rows in frame[frame["length"] == length].groupby("scheme"):
        near_first = rows.sort_values("bucket_start")
        over_texts = near_first["lost_order"] - near_first["lost_order_texts"]
        lows = over_texts.where(near_first["low"].isna(), np.fmin(over_texts, near_first["low"]))  # NaN: one seed
        value = reach(near_first["bucket_end"], lows)
        is_whole = value == near_first["bucket_end"].iloc[-1] - 1
        texts[str(scheme)] = DASH if value is None else f"≥ {value}" if is_whole else str(value)
    return texts


def _tables(findings: Findings, frame: pd.DataFrame, length: int) -> list[Table]:
    """The tables of one length, one row a scheme and one column a bucket of distances."""
    rows = records(frame[frame["length"] == length].sort_values("bucket_start"))
    schemes = [scheme for scheme in findings.schemes if any(row["scheme"] == scheme for row in rows)]
    buckets = list(dict.fromkeys(_distances(row) for row in rows))
    title, texts = f"by d in tokens, windows of {length_text(length)}, nats/token", reaches(frame, length)
    order_lost = {s: [_with_texts(row, "lost_order") for row in rows if row["scheme"] == s] for s in schemes}
    over_seeds = {s: [_over_seeds(row) for row in rows if row["scheme"] == s] for s in schemes}
    identity_lost = {s: [_with_texts(row, "lost_identity") for row in rows if row["scheme"] == s] for s in schemes}
    with_reach = [[scheme, texts[scheme], *cells] for scheme, cells in order_lost.items()]
    tables = [Table(f"Order lost {title}", ["scheme", "reach", *buckets], with_reach)]
    for name, cells in (("Order lost, ± over seeds,", over_seeds), ("Identity lost", identity_lost)):
        if any(cell != DASH for line in cells.values() for cell in line):
            tables.append(Table(f"{name} {title}", ["scheme", *buckets], [[s, *line] for s, line in cells.items()]))
    return tables


def _distances(bucket: dict[str, Any]) -> str:
    """`1`, `2`, `3-4`."""
    first, last = bucket["bucket_start"], bucket["bucket_end"] - 1
    return str(first) if first == last else f"{first}-{last}"


def _with_texts(bucket: dict[str, Any], score: str) -> str:
    return plus_minus(bucket[score], bucket[f"{score}_texts"], sign=True)


def _over_seeds(bucket: dict[str, Any]) -> str:
    return half_text((bucket["high"] - bucket["low"]) / 2)


def _counts(frame: pd.DataFrame) -> str:
    """How many targets the nearest and the farthest bucket hold."""
    first, last = (frame[frame["bucket_start"] == d].iloc[0] for d in (1, frame["bucket_start"].max()))
    counts = f"{first['targets']:,} targets at d = 1, {last['targets']:,} in the last column"
    return f"{counts}, of {first['documents']:,} documents"
