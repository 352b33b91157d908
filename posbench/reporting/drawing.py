"""How our pictures are drawn: the style, lines named at their ends, ticks, and the files."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from posbench.reporting.palette import GRID, INK, Look
from posbench.reporting.tables import length_text, printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

WIDTH = 8.6  # inches, at 96 dots the width of a page's column
LABEL_POINTS = 8.5
MOST_LINES = 12  # in a panel: more cannot be told apart, nor named beside it
LEAST_SPAN = 1.02  # of a scale of perplexities, highest to lowest
_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.linewidth": 0.6,
    "axes.formatter.useoffset": False,  # each tick says its whole number
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


@contextmanager
def style() -> Iterator[None]:
    """matplotlib's settings for our figures, for as long as they are drawn and saved.

    They begin from its defaults: a `matplotlibrc` of the working folder, which could have text set by LaTeX, is not
    obeyed.
    """
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield


def new_figure(height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Figure, list[Axes]]:
    """A figure of a page's width, `height` in inches, with its panels in a list."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=(WIDTH, height), layout=ConstrainedLayoutEngine(w_pad=0.04, h_pad=0.06))
    return figure, list(figure.subplots(rows, columns, sharex=True, squeeze=False, **options).flat)


def line_panels(names: Sequence[str], height: float, most: int = MOST_LINES) -> tuple[Figure, dict[str, Axes]]:
    """A figure with a panel below the other for each `most` lines at the most, and the panel of each name.

    All panels share their axes. `height` is that of a figure with one panel, in inches.
    """
    number = max(1, math.ceil(len(names) / most))
    figure, panels = new_figure(height if number == 1 else 0.5 + 2.6 * number, rows=number, sharey=True)
    size = math.ceil(len(names) / number)
    return figure, {name: panels[n // size] for n, name in enumerate(names)}


def draw_lines(
    axes: Axes, series: Mapping[str, tuple[Any, Any]], look: Mapping[str, Look], marker: bool = True
) -> None:
    """One line a scheme, in its look."""
    for scheme, (x, y) in series.items():
        axes.plot(
            np.asarray(x, dtype=float),
            np.asarray(y, dtype=float),
            look[scheme].line,
            color=look[scheme].colour,
            marker=look[scheme].marker if marker else None,
            markeredgewidth=0,
            label=short(scheme),
        )


def band(x: Any, middle: Any, half: Any) -> tuple[Any, Any, Any]:
    """x, the lower and the upper end of a band around `middle`."""
    y, width = np.asarray(middle, dtype=float), np.asarray(half, dtype=float)
    return x, y - width, y + width


def draw_bands(axes: Axes, bands: Mapping[str, tuple[Any, Any, Any]], look: Mapping[str, Look]) -> None:
    """A pale band a scheme: x, its lower and its upper end; nothing where these are not known.

    The lines decide what is shown, not the widest band: they are drawn before.
    """
    limits = axes.get_ylim()
    for scheme, (x, low, high) in bands.items():
        axes.fill_between(x, low, high, color=look[scheme].colour, alpha=0.12, linewidth=0)
    axes.set_ylim(limits)


def name_lines(figure: Figure, axes: Axes) -> None:
    """Each line's name at its right end, moved up or down just as far as names must be to stand clear of each other."""
    figure.draw_without_rendering()  # so that the layout is known
    lines = [line for line in axes.get_lines() if not str(line.get_label()).startswith("_")]
    if not lines:
        return
    low, high = axes.bbox.y0, axes.bbox.y1
    ends = [_end(line) for line in lines]
    wanted = np.clip([axes.transData.transform(end)[1] for end in ends], low, high)
    placed = stand_clear(wanted, room=1.25 * LABEL_POINTS * figure.dpi / 72, low=low, high=high)
    for line, end, y in zip(lines, ends, (placed - low) / (high - low), strict=True):
        colour: Any = line.get_color()
        axes.annotate(
            "",
            xy=end,
            xytext=(1.03, y),
            textcoords="axes fraction",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 2},
        )
        sample: dict[str, Any] = {"color": colour, "transform": axes.transAxes, "clip_on": False, "label": "_sample"}
        axes.plot([1.03, 1.062], [y, y], line.get_linestyle(), **sample)
        axes.plot([1.046], [y], marker=line.get_marker(), markeredgewidth=0, **sample)
        text = {"va": "center", "fontsize": LABEL_POINTS, "color": colour}
        axes.text(1.07, y, str(line.get_label()), transform=axes.transAxes, **text)


def stand_clear(wanted: Any, room: float, low: float, high: float) -> Any:
    """The places nearest to `wanted` (in least squares, order kept) that are at least `room` apart.

    They stay within low - room/2 and high + room/2 where there is space for all, and begin at the lower end otherwise.
    """
    from scipy.optimize import isotonic_regression

    order = np.argsort(wanted, kind="stable")
    steps = room * np.arange(len(order))
    spread = isotonic_regression(np.asarray(wanted)[order] - steps).x
    top = max(low - room / 2, high + room / 2 - steps[-1])
    placed = np.empty(len(order))
    placed[order] = np.clip(spread, low - room / 2, top) + steps
    return placed


def _end(line: Line2D) -> tuple[float, float]:
    """The last finite point."""
    x, y = np.asarray(line.get_xdata(), dtype=float), np.asarray(line.get_ydata(), dtype=float)
    good = np.flatnonzero(np.isfinite(x) & np.isfinite(y))
    return (float(x[good[-1]]), float(y[good[-1]])) if len(good) else (0.0, 0.0)


def short(name: str, most: int = 24) -> str:
    """A name as a picture has room for it. A leading underscore would hide it from matplotlib's labels."""
    name = printable(name)
    name = name if len(name) <= most else f"{name[: most - 1]}…"
    return f"\u200a{name}" if name.startswith("_") else name


def length_axis(axes: Axes, lengths: list[int], training_length: int, label: str, apart: int = 0) -> None:
    """Lengths in tokens on a log scale, the training length marked, `apart` tokens to its left."""
    axes.set_xscale("log", base=2)
    whole = [n for n in lengths if n % training_length == 0 or training_length % n == 0] or lengths
    axes.set_xticks(whole, [length_text(n) for n in whole])
    axes.minorticks_off()
    axes.set_xlabel(label)
    mark = max(training_length - apart, 1)
    axes.axvline(mark, color=INK, linewidth=0.8, linestyle=(0, (1, 2)))
    axes.annotate(
        f"trained at {length_text(training_length)}",
        xy=(mark, 1),
        xycoords=("data", "axes fraction"),
        xytext=(3, -1),
        textcoords="offset points",
        va="top",
        fontsize=8,
    )


def log_numbers(axes: Axes) -> None:
    """Plain numbers on a logarithmic y axis: at 1 2 5 where much is shown, at round steps where little is.

    It spans a factor of LEAST_SPAN at least, so that what hardly differs looks so.
    """
    from matplotlib.ticker import LogLocator, MaxNLocator

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    wider = max(1.0, LEAST_SPAN / (high / low)) ** 0.5
    low, high = axes.set_ylim(low / wider, high * wider)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)) if high / low > 6 else MaxNLocator(6))
    ticks = [float(y) for y in axes.get_yticks() if low <= y <= high]
    axes.set_yticks(ticks, tick_texts(ticks))
    axes.minorticks_off()


def small_and_large(axes: Axes, linear: float = 0.01) -> None:
    """A y axis that is linear up to `linear` on both sides of 0, and logarithmic from there on, with plain numbers."""
    axes.set_yscale("symlog", linthresh=linear, linscale=0.5)
    low, high = axes.get_ylim()
    low, high = axes.set_ylim(low, high * 1.3)  # room for a marker at the top
    steps = [linear * factor * 10**n for n in range(6) for factor in (1, 3)]
    ticks = [tick for tick in (*(-step for step in reversed(steps)), 0.0, *steps) if low <= tick <= high]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()


def tick_texts(ticks: list[float]) -> list[str]:
    """`350.8`, `351.0`: as many decimals as the ticks that need most; `0.5`, `1`, `10` where each is ten times more."""
    if ticks and ticks[-1] > 6 * ticks[0]:
        return [f"{y:,.0f}" if y >= 1 else f"{y:g}" for y in ticks]
    digits = next((n for n in range(9) if all(math.isclose(round(y, n), y, rel_tol=1e-9) for y in ticks)), 9)
    return [f"{y:,.{digits}f}" for y in ticks]


def tokens_text(value: float, _: int = 0) -> str:
    """`250k`, `1.5M`."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 10 * size or (value >= size and math.isclose(value % (size / 10), 0, abs_tol=1e-6)):
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


def pdf(figure: Figure) -> bytes:
    """The figure as a PDF, the same bytes for the same figure."""
    buffer = io.BytesIO()
    with style():
        figure.savefig(buffer, format="pdf", metadata={"CreationDate": None, "Creator": "posbench", "Producer": None})
    return buffer.getvalue()
