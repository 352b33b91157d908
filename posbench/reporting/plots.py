"""The pictures of a report, as matplotlib figures. Lines are named at their ends, so no legend hides anything.

Sizes are those at which a page shows them (inches at 96 dots): text of 8 to 9 points stays legible.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from posbench.reporting.evaluations import LENGTH_PROTOCOLS, VALIDATION
from posbench.reporting.palette import GRID, INK, Look, looks
from posbench.reporting.statistics import t_interval
from posbench.reporting.tables import length_text, printable

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from posbench.reporting.findings import Findings

WIDTH = 8.6  # inches
LABEL_POINTS = 8.5
_STYLE = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "grid.color": GRID,
    "grid.linewidth": 0.5,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "text.parse_math": False,  # a name with a $ in it is a name
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "posbench",  # the same picture gives the same file
}


def style() -> AbstractContextManager[None]:
    """matplotlib's settings for our figures, for as long as they are drawn and saved."""
    import matplotlib

    return matplotlib.rc_context(_STYLE)


def draw_all(findings: Findings) -> dict[str, Figure]:
    """File stem -> figure, in the order of the report; only those that have data."""
    made: dict[str, Figure] = {}
    with style():
        if findings.baseline and len(findings.schemes) > 1:
            made["gaps"] = gaps(findings)
        if not findings.curves.empty:
            made["curves"] = curves(findings)
        for protocol in LENGTH_PROTOCOLS:
            if findings.lengths(protocol):
                made[f"perplexity-{protocol}"] = by_length(findings, protocol)
        for length, rows in findings.position.groupby("length"):
            made[f"position-{length}"] = by_position(findings, rows)
        for length, rows in findings.retrieval.groupby("length"):
            made[f"retrieval-{length}"] = retrieval(findings, rows)
    return made


def gaps(findings: Findings) -> Figure:
    """Gap to the baseline of each scheme: mean and interval over seeds, each seed a small dot, the published gap a ring."""
    there = findings.at(VALIDATION)
    order = [s for s in findings.schemes if s in there]
    look = looks(findings.schemes)
    figure, axes = _figure(0.8 + 0.3 * len(order))
    base = there[findings.baseline]
    published = {row.scheme: row.their_gap for row in findings.against[0].rows} if findings.against else {}
    for y, scheme in enumerate(order):
        m, colour = there[scheme], look[scheme].colour
        each = np.array(m.losses) - np.array(base.losses)
        axes.plot(each, [y + 0.22] * len(each), ".", color=colour, alpha=0.6, markersize=4, markeredgewidth=0)
        if not math.isnan(m.gap.low):
            axes.errorbar([m.gap.mean], [y], xerr=[[m.gap.half_width]], color=colour, linewidth=1.3, capsize=3, capthick=1.1)
        axes.plot([m.gap.mean], [y], look[scheme].marker, color=colour, markersize=4.5, markeredgewidth=0)
        if not math.isnan(published.get(scheme, math.nan)):
            axes.plot([published[scheme]], [y - 0.22], "o", markersize=3.6, markerfacecolor="none", markeredgecolor=INK, markeredgewidth=0.8)
    axes.axvline(0, color=INK, linewidth=0.6)
    axes.set_yticks(range(len(order)), [printable(s) for s in order])
    axes.set_ylim(len(order) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"gap to {printable(findings.baseline)}, nats/token (left is better)")
    return figure


def curves(findings: Findings) -> Figure:
    """Validation loss while training, and below it the same as gaps to the baseline, where small differences show."""
    look = looks(findings.schemes)
    table = findings.curves.pivot_table(index="tokens", columns=["scheme", "seed"], values="loss")
    both = findings.baseline is not None and len(findings.schemes) > 1
    figure, panels = _figure(5.6 if both else 3.1, rows=2 if both else 1)
    upper, *lower = panels if both else [panels]
    _lines(upper, {s: (table.index, table[s].mean(axis=1)) for s in findings.schemes if s in table}, look, marker=False)
    upper.set_ylabel("validation loss, nats/token")
    if lower:
        gaps = {s: table[s] - table[findings.baseline] for s in findings.schemes if s in table}
        _lines(lower[0], {s: (table.index, g.mean(axis=1)) for s, g in gaps.items()}, look, marker=False)
        for scheme, gap in gaps.items():
            if gap.shape[1] > 1:
                bands = [t_interval(row) for row in gap.to_numpy()]
                lower[0].fill_between(table.index, [b.low for b in bands], [b.high for b in bands], color=look[scheme].colour, alpha=0.12, linewidth=0)
        late = np.concatenate([g.mean(axis=1).to_numpy()[len(table) // 4 :] for g in gaps.values()])
        _limits(lower[0], late[np.isfinite(late)])
        lower[0].set_ylabel(f"gap to {printable(findings.baseline)}, nats/token")
    panels = panels if both else [panels]
    panels[-1].set_xlabel("tokens trained on")
    for axes in panels:
        axes.xaxis.set_major_formatter(_tokens)
        axes.margins(x=0)
    _name_lines(panels[-1])
    return figure


def by_length(findings: Findings, protocol: str) -> Figure:
    """Perplexity against length, both on a log scale, with the training length marked."""
    look = looks(findings.schemes)
    figure, axes = _figure(3.9)
    series: dict[str, tuple[list[float], list[float]]] = {}
    for m in sorted((m for m in findings.measurements if m.protocol == protocol), key=lambda m: m.length):
        x, y = series.setdefault(m.scheme, ([], []))
        x.append(m.length)
        y.append(m.perplexity)
    _lines(axes, series, look)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    _log_ticks(axes)
    lengths = findings.lengths(protocol)
    shown = [n for n in lengths if n % findings.training_length == 0 or findings.training_length % n == 0]
    axes.set_xticks(shown or lengths, [length_text(n) for n in shown or lengths])
    axes.minorticks_off()
    axes.set_xlabel("length, tokens")
    axes.set_ylabel(f"perplexity ({protocol})")
    _mark_training_length(axes, findings.training_length)
    _name_lines(axes)
    return figure


def by_position(findings: Findings, rows: pd.DataFrame) -> Figure:
    """Loss by position within a window, in log-spaced buckets."""
    look = looks(findings.schemes)
    figure, axes = _figure(3.9)
    series = {}
    for scheme, part in rows.sort_values("bucket_start").groupby("scheme"):
        centre = np.sqrt((part["bucket_start"] + 1) * part["bucket_end"])  # positions from 1, so that the first is on the scale
        series[str(scheme)] = (centre, part["loss"])
    _lines(axes, series, look)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda n, _: length_text(round(n)))
    axes.set_xlabel("position in the window, tokens (log-spaced buckets)")
    axes.set_ylabel("loss, nats/token")
    _mark_training_length(axes, findings.training_length)
    _name_lines(axes)
    return figure


def retrieval(findings: Findings, rows: pd.DataFrame) -> Figure:
    """By how much a passage that came before is easier the second time, against the gap."""
    look = looks(findings.schemes)
    figure, axes = _figure(3.9)
    series = {str(s): (part["gap"], part["drop"]) for s, part in rows.sort_values("gap").groupby("scheme")}
    _lines(axes, series, look)
    axes.axhline(0, color=INK, linewidth=0.6)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda n, _: length_text(round(n)))
    axes.set_xlabel("gap between the two copies, tokens")
    axes.set_ylabel("drop of the loss on the second copy, nats/token")
    _mark_training_length(axes, findings.training_length)
    _name_lines(axes)
    return figure


def _figure(height: float, rows: int = 1) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.04, h_pad=0.06)  # type: ignore[union-attr]
    return figure, figure.subplots(rows, 1, sharex=True)


def _lines(axes: Axes, series: Mapping[str, tuple[Any, Any]], look: Mapping[str, Look], marker: bool = True) -> None:
    for scheme, (x, y) in series.items():
        axes.plot(
            np.asarray(x, dtype=float),
            np.asarray(y, dtype=float),
            look[scheme].line,
            color=look[scheme].colour,
            marker=look[scheme].marker if marker else None,
            markeredgewidth=0,
            label=printable(scheme),
        )


def _name_lines(axes: Axes) -> None:
    """Each line's name at its right end, moved up or down just as far as names must be to stand clear of each other."""
    from scipy.optimize import isotonic_regression

    axes.figure.draw_without_rendering()
    lines = [line for line in axes.get_lines() if not str(line.get_label()).startswith("_") and len(line.get_xdata())]
    if not lines:
        return
    low, high = axes.bbox.y0, axes.bbox.y1
    ends = [_last_finite(line) for line in lines]
    wanted = np.clip([axes.transData.transform(end)[1] for end in ends], low, high)
    room = 1.25 * LABEL_POINTS * axes.figure.dpi / 72
    order = np.argsort(wanted, kind="stable")
    steps = room * np.arange(len(order))
    spread = isotonic_regression(wanted[order] - steps).x
    top = max(low - room / 2, high + room / 2 - steps[-1])
    placed = np.clip(spread, low - room / 2, top) + steps
    for n, y in zip(order, placed, strict=True):
        height = (y - low) / (high - low)
        colour = lines[n].get_color()
        axes.annotate(
            "",
            xy=ends[n],
            xytext=(1.03, height),
            textcoords="axes fraction",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 2},
        )
        sample = {"color": colour, "transform": axes.transAxes, "clip_on": False, "label": "_sample", "markeredgewidth": 0}
        axes.plot([1.03, 1.062], [height] * 2, lines[n].get_linestyle(), **sample)
        axes.plot([1.046], [height], lines[n].get_marker(), **sample)
        axes.text(1.07, height, str(lines[n].get_label()), transform=axes.transAxes, va="center", fontsize=LABEL_POINTS, color=colour)


def _last_finite(line: Any) -> tuple[float, float]:
    x, y = np.asarray(line.get_xdata(), dtype=float), np.asarray(line.get_ydata(), dtype=float)
    good = np.flatnonzero(np.isfinite(x) & np.isfinite(y))
    n = good[-1] if len(good) else 0
    return float(x[n]), float(y[n])


def _limits(axes: Axes, values: Any) -> None:
    if len(values):
        margin = 0.12 * (values.max() - values.min()) or 1e-3
        axes.set_ylim(values.min() - margin, values.max() + margin)


def _log_ticks(axes: Axes) -> None:
    """Plain numbers on a log scale, at 1 2 5 where a decade or more is shown and at round steps where less is."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)) if high / low > 6 else MaxNLocator(6))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.0f}" if y >= 100 else f"{y:g}"))


def _mark_training_length(axes: Axes, tokens: int) -> None:
    axes.axvline(tokens, color=INK, linewidth=0.8, linestyle=(0, (1, 2)))
    axes.annotate(
        f"trained at {length_text(tokens)}", xy=(tokens, 1), xycoords=("data", "axes fraction"), xytext=(3, -1), textcoords="offset points", va="top", fontsize=8
    )  # fmt: skip


def _tokens(value: float, _: int = 0) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 10 * size or (value >= size and value % size == 0):
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def svg(figure: Figure) -> str:
    """The figure as an SVG document, the same bytes for the same figure."""
    buffer = io.StringIO()
    with style():
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": "posbench"}, transparent=True)
    return buffer.getvalue()


def png(figure: Figure) -> bytes:
    """The figure as a PNG on white, at twice the size of a page."""
    buffer = io.BytesIO()
    with style():
        figure.savefig(buffer, format="png", dpi=192)
    return buffer.getvalue()


def save_all(figures: dict[str, Figure], folder: Path, write: Callable[[Path, bytes], None]) -> list[Path]:
    """`<stem>.svg` and `<stem>.png` of each figure; returns their paths."""
    paths = []
    for stem, figure in figures.items():
        for suffix, content in ((".svg", svg(figure).encode()), (".png", png(figure))):
            write(folder / f"{stem}{suffix}", content)
            paths.append(folder / f"{stem}{suffix}")
    return paths
