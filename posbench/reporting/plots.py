"""The pictures of a report. Lines are named at their ends, so no legend hides anything."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from posbench.evaluation.protocols import FIXED, NONOVERLAPPING, ORDER, POSITION, PROTOCOLS, RETRIEVAL, VALIDATION
from posbench.reporting.drawing import (
    MOST_LINES,
    band,
    draw_bands,
    draw_lines,
    length_axis,
    line_panels,
    log_numbers,
    name_lines,
    new_figure,
    short,
    small_and_large,
    style,
    tokens_text,
)
from posbench.reporting.palette import INK, RESCALED, with_variants
from posbench.reporting.statistics import larger
from posbench.reporting.tables import length_text, printable
from posbench.runs.readings import row_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from posbench.reporting.findings import Findings
    from posbench.reporting.measure import Measurement

RING: dict[str, Any] = {"markerfacecolor": "none", "markeredgecolor": INK, "markeredgewidth": 0.8}


def draw_all(findings: Findings) -> dict[str, Figure]:
    """File stem -> figure, in the order of the report; only those that have data."""
    figures: dict[str, Figure] = {}
    by_lengths = {name: f"perplexity-{name}" for name in PROTOCOLS if len(findings.lengths(name)) > 1}
    by_lengths = {name: stem for name, stem in by_lengths.items() if PROTOCOLS[name].is_by_length}
    with style():
        if findings.baseline and len(findings.schemes) > 1 and findings.at(VALIDATION.name):
            figures["gaps"] = gaps(findings, findings.baseline)
        if not findings.curves.empty:
            figures["curves"] = curves(findings)
        for name, stem in by_lengths.items():
            figures[stem] = by_length(findings, name)
            if _by_rescaling(findings, name):
                figures[f"rescaled-{name}"] = by_rescaling(findings, name)
        for name in (name for name, protocol in PROTOCOLS.items() if protocol.is_by_length):
            if (length := _length_of_factors(findings, name)) is not None:
                figures[f"factors-{name}"] = by_factor(findings, name, length)
        if {FIXED.name, NONOVERLAPPING.name} <= set(by_lengths):
            figures["protocols"] = protocols(findings)
        if not findings.probes[ORDER.name].empty:
            figures[ORDER.name] = order(findings)
        if not findings.probes[POSITION.name].empty:
            figures[POSITION.name] = by_position(findings)
        if findings.probes[RETRIEVAL.name]["gap"].nunique() > 1:
            figures[RETRIEVAL.name] = retrieval(findings)
    return figures


def gaps(findings: Findings, baseline: str) -> Figure:
    """Gap to the baseline of each scheme, with its interval over seeds; seeds are dots below, the published a ring."""
    there = findings.at(VALIDATION.name)
    order = [s for s in findings.schemes if s in there]
    look = findings.looks
    figure, (axes,) = new_figure(0.8 + 0.3 * len(order))
    theirs = {row.scheme: row.their_gap for row in findings.against[0].rows} if findings.against else {}
    published = {scheme: gap for scheme, gap in theirs.items() if not math.isnan(gap)}
    for y, scheme in enumerate(order):
        m, colour = there[scheme], look[scheme].colour
        each = np.array(m.losses) - np.array(there[baseline].losses)
        axes.plot(each, [y + 0.24] * len(each), ".", color=colour, alpha=0.7, markersize=4, markeredgewidth=0)
        if not math.isnan(m.gap.low):
            half = [[m.gap.half_width]]
            axes.errorbar([m.gap.mean], [y], xerr=half, color=colour, linewidth=1.3, capsize=3, capthick=1.1)
        axes.plot([m.gap.mean], [y], look[scheme].marker, color=colour, markersize=5, markeredgewidth=0)
        if scheme in published:
            axes.plot([published[scheme]], [y - 0.26], "o", markersize=3.6, **RING)
    axes.axvline(0, color=INK, linewidth=0.6)
    axes.plot([], [], ".", color=INK, markersize=4, label="a seed")
    if published:
        axes.plot([], [], "o", markersize=3.6, label="published", **RING)
    figure.legend(loc="outside upper right", ncols=2, frameon=False, fontsize=8, handletextpad=0.1)
    axes.set_yticks(range(len(order)), [short(s) for s in order])
    axes.set_ylim(len(order) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"gap to {printable(baseline)}, nats/token (left is better)")
    return figure


def curves(findings: Findings) -> Figure:
    """Validation loss while training. No gaps: a point inside a run is not the end of a shorter run."""
    from matplotlib.ticker import FuncFormatter

    table = findings.curves.pivot_table(index="tokens", columns=["scheme", "seed"], values="loss")
    present = set(table.columns.get_level_values(0))
    there = [s for s in findings.schemes if s in present]
    figure, panel_of = line_panels(there, 3.6)
    for s in there:
        draw_lines(panel_of[s], {s: (table.index, table[s].T.mean())}, findings.looks, marker=False)
    panels = list(dict.fromkeys(panel_of.values()))
    for axes in panels:
        axes.set_ylabel("validation loss, nats/token")
        axes.xaxis.set_major_formatter(FuncFormatter(tokens_text))
        axes.margins(x=0)
    panels[-1].set_xlabel("tokens trained on")
    for axes in panels:
        name_lines(figure, axes)
    return figure


def by_length(findings: Findings, protocol: str) -> Figure:
    """Perplexity against length, both on a log scale, with the training length marked.

    Bands are the larger of the two intervals of the change against the training length, over seeds and over documents.
    Where there are more lines than one panel takes, rows under other words are left to `by_rescaling`.
    """
    lengths = findings.lengths(protocol)
    places = {n: findings.at(protocol, n) for n in lengths}
    here = {row: [n for n in lengths if row in places[n]] for row in findings.rows}
    rows = [row for row in findings.rows if here[row]]
    if len(rows) > MOST_LINES:
        rows = [row for row in rows if row in findings.schemes]
    figure, panel_of = line_panels(rows, 4.1)
    for row in rows:
        line = {row: (here[row], [places[n][row].perplexity for n in here[row]])}
        draw_lines(panel_of[row], line, findings.looks)
    panels = list(dict.fromkeys(panel_of.values()))
    for axes in panels:
        log_numbers(axes)
    for row in rows:
        draw_bands(panel_of[row], _perplexity_band(row, here[row], [places[n][row] for n in here[row]]), findings.looks)
    for axes in panels:
        length_axis(axes, lengths, findings.training_length, "length, tokens" if axes is panels[-1] else "")
        axes.set_ylabel(f"perplexity ({protocol})")
    for axes in panels:
        name_lines(figure, axes)
    return figure


def _perplexity_band(row: str, xs: Sequence[float], of_row: list[Measurement]) -> dict[str, tuple[Any, Any, Any]]:
    """A row's band by its changes; none of two seeds, whose interval is thirteen times their standard error."""
    if len(of_row[0].seeds) == 2:
        return {}
    low, high = (np.exp([m.loss.mean + sign * m.change_half for m in of_row]) for sign in (-1, 1))
    return {row: (xs, low, high)}


def _by_rescaling(findings: Findings, protocol: str) -> dict[str, dict[str, str]]:
    """Scheme -> rescaling -> the row, of those read by their own factor at several lengths."""
    rows: dict[str, dict[str, str]] = {}
    for v in findings.variants:
        read = [n for n in findings.lengths(protocol) if v.row in findings.at(protocol, n)]
        if v.rescaling is not None and v.factor is None and len(v.under) == 1 and len(read) > 1:
            rows.setdefault(v.scheme, {})[v.rescaling] = v.row
    return rows


def by_rescaling(findings: Findings, protocol: str) -> Figure:
    """One small panel a scheme: perplexity against length as trained, and with its frequencies rescaled."""
    rescaled = _by_rescaling(findings, protocol)
    schemes = [scheme for scheme in findings.schemes if scheme in rescaled]
    names = list(dict.fromkeys(name for of_scheme in rescaled.values() for name in of_scheme))
    colours = dict(zip(names, RESCALED, strict=False))
    columns = min(4, len(schemes))
    rows = math.ceil(len(schemes) / columns)
    figure, panels = new_figure(0.8 + 1.55 * rows, rows, columns, sharey=True)
    lengths = findings.lengths(protocol)
    for axes, scheme in zip(panels, schemes, strict=False):
        for name, row in {"as trained": scheme, **rescaled[scheme]}.items():
            there = {n: findings.at(protocol, n).get(row) for n in lengths}
            line = {n: m.perplexity for n, m in there.items() if m is not None}
            axes.plot(
                list(line), list(line.values()), ".-", color=colours.get(name, INK), markeredgewidth=0, label=name
            )
        length_axis(axes, lengths, findings.training_length, "")
        for note in axes.texts:
            note.remove()
        axes.set_xticks([lengths[0], findings.training_length, lengths[-1]])
        axes.set_title(short(scheme))
    log_numbers(panels[0])
    for axes in panels[len(schemes) :]:
        axes.set_visible(False)
    handles = {
        line.get_label(): line
        for axes in panels[: len(schemes)]
        for line in axes.get_lines()
        if line.get_label() in ("as trained", *names)
    }
    figure.legend(
        list(handles.values()), list(map(str, handles)), loc="outside upper right", ncols=6, frameon=False, fontsize=8
    )
    figure.supylabel(f"perplexity ({protocol})", fontsize=9)
    figure.supxlabel("length, tokens", fontsize=9)
    return figure


def _length_of_factors(findings: Findings, protocol: str) -> int | None:
    """The longest length at which some rescaling was read by two factors or more; None where there is none."""
    factors: dict[tuple[str, str | None, int], set[float]] = {}
    for variant in (v for v in findings.variants if v.factor is not None):
        for n in findings.lengths(protocol):
            if variant.row in findings.at(protocol, n) and variant.factor is not None:
                factors.setdefault((variant.scheme, variant.rescaling, n), set()).add(variant.factor)
    return max((n for (_, _, n), read in factors.items() if len(read) > 1), default=None)


def by_factor(findings: Findings, protocol: str, length: int) -> Figure:
    """Perplexity at one length against the factor by which frequencies are rescaled; at factor 1 it is as trained."""
    figure, (axes,) = new_figure(4.1)
    there = findings.at(protocol, length)
    points: dict[tuple[str, str], dict[float, Measurement]] = {}
    for v in findings.variants:
        if v.factor is not None and v.rescaling is not None and v.row in there:
            of_row = points.setdefault((v.scheme, v.rescaling), {})
            of_row.update({1.0: there[v.scheme]} if v.scheme in there else {})
            of_row[v.factor] = there[v.row]
    names = {key: row_name(key[0], [f"rescale={key[1]}"]) for key in points}
    look = with_variants(findings.looks, {names[key]: (key[0], (f"rescale={key[1]}",)) for key in points})
    ordered = {names[key]: sorted(of_row.items()) for key, of_row in points.items()}
    xs = {name: [factor for factor, _ in line] for name, line in ordered.items()}
    draw_lines(axes, {s: (xs[s], [m.perplexity for _, m in line]) for s, line in ordered.items()}, look)
    log_numbers(axes)
    for name, line in ordered.items():
        draw_bands(axes, _perplexity_band(name, xs[name], [m for _, m in line]), look)
    inside = length / findings.training_length
    axes.set_xscale("log", base=2)
    ticks = sorted({x for line in xs.values() for x in line} | {inside})
    axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
    axes.minorticks_off()
    axes.axvline(inside, color=INK, linewidth=0.8, linestyle=(0, (1, 2)))
    axes.set_xlabel(f"factor (dotted: {length_text(length)} / {length_text(findings.training_length)} tokens)")
    axes.set_ylabel(f"perplexity at {length_text(length)} ({protocol})")
    name_lines(figure, axes)
    return figure


def protocols(findings: Findings) -> Figure:
    """One small panel a scheme: loss against length by fixed targets and by non-overlapping windows, from that at T."""
    look, at = findings.looks, findings.training_length
    columns = 4
    rows = math.ceil(len(findings.schemes) / columns)
    figure, panels = new_figure(0.5 + 1.55 * rows, rows, columns)
    lengths = findings.lengths(FIXED.name)
    for axes, scheme in zip(panels, findings.schemes, strict=False):
        for protocol, line in ((FIXED.name, "-"), (NONOVERLAPPING.name, "--")):
            there = {n: findings.at(protocol, n).get(scheme) for n in findings.lengths(protocol)}
            losses = {n: m.loss.mean for n, m in there.items() if m is not None}
            if at in losses:
                y = [loss - losses[at] for loss in losses.values()]
                axes.plot(list(losses), y, line, color=look[scheme].colour, marker=".", markeredgewidth=0)
                half = np.array([m.change_half for m in there.values() if m is not None])
                axes.fill_between(list(losses), y - half, y + half, color=look[scheme].colour, alpha=0.12, linewidth=0)
        early = findings.early[findings.early["scheme"] == scheme]
        axes.plot([at, *early["length"]], [0.0, *-early["early"]], ":", color=INK, linewidth=1)
        length_axis(axes, lengths, at, "")
        for note in axes.texts:
            note.remove()
        axes.set_xticks([lengths[0], at, lengths[-1]])
        axes.set_title(short(scheme))
    for axes in panels[len(findings.schemes) :]:
        axes.set_visible(False)
    figure.supylabel(f"change of the loss against {at} tokens, nats/token", fontsize=9)
    return figure


def order(findings: Findings) -> Figure:
    """What is lost without order and, below, without identity, against distance; in windows of the training length.

    Bands are the intervals over documents, by which the reach is told: a reach ends where a band touches 0.
    """
    frame, look = findings.probes[ORDER.name].sort_values("bucket_start"), findings.looks
    lengths = set(frame["length"])
    rows = frame[frame["length"] == (findings.training_length if findings.training_length in lengths else max(lengths))]
    parts = {s: rows[rows["scheme"] == s] for s in findings.schemes if s in set(rows["scheme"])}
    figure, panels = new_figure(6.6, rows=2)
    for axes, score in zip(panels, ("lost_order", "lost_identity"), strict=True):
        series = {s: (np.sqrt(p["bucket_start"] * (p["bucket_end"] - 1)), p[score]) for s, p in parts.items()}
        draw_lines(axes, series, look)
        axes.axhline(0, color=INK, linewidth=0.6, label="_zero")
        small_and_large(axes)
        draw_bands(axes, {s: band(*series[s], part[f"{score}_texts"]) for s, part in parts.items()}, look)
        axes.set_ylabel(f"{score.removeprefix('lost_')} lost, nats/token")
    longest = int(rows["bucket_end"].max()) - 1
    panels[-1].set_xscale("log", base=2)
    ticks = [2**n for n in range(longest.bit_length())]
    panels[-1].set_xticks(ticks, list(map(str, ticks)))
    panels[-1].minorticks_off()
    panels[-1].set_xlabel("d, intact tokens between the target and what is destroyed")
    name_lines(figure, panels[0])
    return figure


def by_position(findings: Findings) -> Figure:
    """Loss by position within the longest windows, in log-spaced buckets; below, the same as gaps to the baseline.

    Bands are the larger of the two intervals of a gap, over seeds and over documents.
    """
    look, base = findings.looks, findings.baseline
    position = findings.probes[POSITION.name]
    rows = position[position["length"] == position["length"].max()].sort_values("bucket_start")
    parts = {s: rows[rows["scheme"] == s] for s in findings.schemes if s in set(rows["scheme"])}
    # From 1, so that the first bucket has a place on the scale.
    x = {s: np.sqrt((part["bucket_start"] + 1) * part["bucket_end"]) for s, part in parts.items()}
    both = base in parts and len(parts) > 1
    figure, panels = new_figure(6.6 if both else 4.1, rows=2 if both else 1)
    draw_lines(panels[0], {s: (x[s], part["loss"]) for s, part in parts.items()}, look)
    panels[0].set_ylabel("loss, nats/token")
    if both:
        gaps = {s: (x[s], part["gap"].fillna(0.0)) for s, part in parts.items()}  # the baseline's own is 0
        draw_lines(panels[1], gaps, look)
        halves = {s: larger((p["gap_high"] - p["gap_low"]) / 2, p["gap_texts"]) for s, p in parts.items()}
        draw_bands(panels[1], {s: band(*gaps[s], halves[s]) for s in parts}, look)
        panels[1].set_ylabel(f"gap to {short(base or '')}, nats/token")
    ticks = [2**n for n in range(0, int(math.log2(rows["bucket_end"].max())) + 1, 2)]
    for axes in panels:
        length_axis(axes, ticks, findings.training_length, "")
    panels[-1].set_xlabel("position in the window, tokens (log-spaced buckets)")
    name_lines(figure, panels[-1])
    return figure


def retrieval(findings: Findings) -> Figure:
    """By how much a passage is easier for having been read before, against the gap; bands are intervals over trials."""
    figure, (axes,) = new_figure(4.1)
    rows = findings.probes[RETRIEVAL.name].sort_values("gap")
    parts = {s: rows[rows["scheme"] == s] for s in findings.schemes}
    draw_lines(axes, {s: (p["gap"], p["drop"]) for s, p in parts.items() if len(p)}, findings.looks)
    axes.axhline(0, color=INK, linewidth=0.6, label="_zero")
    bands = {s: band(p["gap"], p["drop"], p["drop_texts"]) for s, p in parts.items() if len(p)}
    draw_bands(axes, bands, findings.looks)
    axes.set_ylabel("drop of the loss, nats/token")
    ticks = [2**n for n in range(32) if rows["gap"].min() <= 2**n <= rows["gap"].max()]
    passages = int((rows["length"] - rows["gap"]).iloc[0])  # the two copies; a reading is the gap and these
    length_axis(axes, ticks, findings.training_length, "gap between the two copies, tokens", apart=passages)
    name_lines(figure, axes)
    return figure
