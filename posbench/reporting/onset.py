"""Show how gaps divide into time and quality, and gaps expressed in tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from posbench.analysis.comparison import SeedComparison
from posbench.analysis.onset import Fit, decayed_points, fit, gap_after_onset, share_of_time, worth
from posbench.analysis.statistics import FEWEST_SEEDS, interval
from posbench.config.units import DASH, number
from posbench.reporting.protocols.order import count_onsets
from posbench.reporting.section import Format, Section, Table


def time_table(c: SeedComparison, reference: str, points: pd.DataFrame, reference_line: Fit) -> Table:
    """Return a row per scheme except `reference`: gap to it in final loss, gap at equal tokens after onset, and "time".

    "Time" is the share of the first gap that the second lacks, because it is due to the difference in onset. Arguments:
    points, of `reference`, as of `decayed_points`; reference_line, fitted to them.
    """
    rows = []
    best = c.runs[c.runs["scheme"] == reference]
    gap, at_onset = f"gap to {reference}", "at equal tokens after onset"  # titles of columns
    for scheme in c.schemes:
        if scheme == reference:
            continue
        mean, low, high = interval((c.values[scheme] - c.values[reference]).dropna())
        runs = c.runs[c.runs["scheme"] == scheme]
        row: dict[str, Any] = {"scheme": scheme, "seeds": len(runs), gap: mean, "gap: half": (high - low) / 2}
        # The line holds after onset only, so all seeds need one.
        if np.isfinite(runs["onset_tokens"].astype(float)).all() and len(runs) >= FEWEST_SEEDS:
            quality, half = gap_after_onset(runs, reference_line)
            # A share says nothing if what is left may be more than the gap itself.
            share = share_of_time(runs, best, points) if half < abs(mean) else None
            text = f"{share[0]:.0%} to {share[1]:.0%}" if share else DASH
            row |= {at_onset: quality, "onset: half": half, "time": text}
        else:
            row[at_onset] = f"none: {count_onsets(runs['onset_tokens'])} use it"
        rows.append(row)
    formats = {gap: Format(half="gap: half", sign=True), at_onset: Format(half="onset: half", sign=True)}
    table = Table.of(rows, formats)
    # Columns are named, because without any onset some would be missing.
    return Table(
        table.frame.reindex(columns=["scheme", "seeds", gap, "gap: half", at_onset, "onset: half", "time"]),
        table.formats,
    )


def worth_table(c: SeedComparison, points: pd.DataFrame) -> Table:
    """Return a row per scheme but the baseline: in words, which share of whose tokens gives the same loss.

    Arguments: points, with columns scheme, seed, tokens and loss.
    """
    rows = []
    for scheme in c.schemes:
        if scheme == c.baseline:
            continue
        text = DASH
        interval_of_share = worth(points, scheme, c.baseline)  # mean, low and high; None: unknown
        # Worded so that the share is below 1: the better scheme needs fewer tokens.
        if interval_of_share and interval_of_share[0] <= 1:
            text = f"reaches {c.baseline}'s final loss with {_shares(*interval_of_share)} of its tokens"
        elif interval_of_share:
            mean, low, high = interval_of_share
            # The inverse turns the interval around.
            text = f"{c.baseline} reaches this final loss with {_shares(1 / mean, 1 / high, 1 / low)} of its tokens"
        rows.append({"scheme": scheme, "worth in tokens": text})
    return Table.of(rows)


def _shares(mean: float, low: float, high: float) -> str:
    return f"{mean:.2f} (95 %: {low:.2f} to {high:.2f})"


def onset_gaps(c: SeedComparison) -> list[Section]:
    """Return the sections on how gaps in loss divide into time and quality, and on gaps expressed in tokens.

    Both need two schemes and FEWEST_SEEDS seeds; the first needs logged onsets, the second branches (shorter runs with
    a decay of their own).
    """
    if len(c.schemes) < 2 or len(c.seeds) < FEWEST_SEEDS:
        return []
    points, sections = decayed_points(c.runs), []
    reference = c.schemes[0]
    if c.has_onsets and np.isfinite(c.onsets).any(axis=None):
        line: Fit | None = None
        table: Table | None = None
        count = count_onsets(c.onsets[reference])
        note = f"No gap at equal onset: {count} seeds of {reference}, the best scheme, use long-range order."
        # Infinite: a seed that never used it. The line needs an onset of each seed.
        if np.isfinite(c.onsets[reference].dropna()).all():
            line = fit(points[points["scheme"] == reference])
        if line:
            table = time_table(c, reference, points[points["scheme"] == reference], line)
            a, b = line.coefficients
            note = (
                f"{reference} after onset: {number(a)} {number(b, sign=True)} ln(million tokens since onset), fitted "
                f"to {line.points} runs and branches (standard deviation {number(line.sd)}). The second gap is the "
                "scheme's loss minus this line at the scheme's own tokens since onset, seed by seed; its ± has the "
                "fit's error. Time: the share of the first gap that the second lacks, its 95 % interval by resampling "
                "seeds; –: the gaps are too uncertain for a share."
            )
        sections.append(Section("Time and quality", table=table, note=note))
    # A seed has more than one point only if it has branches.
    if (points.groupby(["scheme", "seed"]).size() > 1).any():
        note = (
            "Each seed's loss is taken as linear in ln(tokens) between its branches, which have a decay of their own. "
            "–: a seed is below the other's final loss in its shortest run already, or has no branches."
        )
        sections.append(Section("Worth in tokens", table=worth_table(c, points), note=note))
    return sections
