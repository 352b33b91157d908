"""Draw the pictures of a report. Lines are labelled at their ends, so no legend hides anything."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import product
from typing import Any
from zlib import crc32

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator
from scipy.optimize import isotonic_regression

from posbench.config.units import short_count, short_length
from posbench.reporting.section import Plot, Section

INK = "#1b1f24"  # near black, for text, axes and schemes without position
GRID = "#d5dae0"
BLUE, SKY, GREEN = "#0072b2", "#4aa3df", "#009e73"  # after Okabe and Ito (2008), for colour-blind readers
VERMILLION, ORANGE, BROWN, PURPLE = "#d55e00", "#d08c00", "#8a5a2b", "#b8609a"
WIDTH = 8.6  # inches; the width of a page's column at 96 dots per inch
MOST_LINES = 12  # lines per panel; a reader cannot tell more of them apart
LABEL_POINTS = 8.5
_COLOURS = (BLUE, ORANGE, GREEN, VERMILLION, PURPLE, SKY, BROWN, INK)
_MARKERS = "os^XDPv<>hdp8*H"
# Colour and marker of common schemes, by the tensors they rotate or by kind; others get them by a hash of the name.
_LOOKS = {
    "qk": (BLUE, "o"),
    "qkvo": (VERMILLION, "s"),
    "vo": (GREEN, "^"),
    "qkv": (BROWN, "P"),
    "k": (SKY, "v"),
    "q": (PURPLE, "<"),
    "v": (GREEN, ">"),
    "o": (BROWN, "h"),
    "nope": (INK, "X"),
    "alibi": (PURPLE, "D"),
    "sinusoidal": (ORANGE, "d"),
    "learned": (ORANGE, "p"),
}
_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.linewidth": 0.6,
    "axes.formatter.useoffset": False,  # ticks show full values
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "grid.color": GRID,
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "text.parse_math": False,  # show a $ in a name as it is
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "posbench",  # the same picture gives the same file
}


Looks = Mapping[str, tuple[str, str, str]]  # scheme -> its colour, line style and marker


@contextmanager
def style() -> Iterator[None]:
    """Use our matplotlib settings within this context."""
    # Defaults first: the user's own matplotlibrc must not change a report.
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield


def draw_all(runs: pd.DataFrame, sections: Iterable[Section]) -> dict[str, Figure]:
    """Draw the plots of all sections, as {plot's name: figure}. Arguments: runs, which decide how each scheme looks."""
    scheme_looks, figures = looks(runs), {}
    with style():
        for section in sections:
            for plot in section.plots:
                figures[plot.name] = KINDS[plot.kind](plot, scheme_looks)
    return figures


def looks(runs: pd.DataFrame) -> dict[str, tuple[str, str, str]]:
    """Return {scheme: (colour, line style, marker)}; lines are dashed unless the scheme is marked as relative."""
    all_looks = list(product(_COLOURS, _MARKERS))
    chosen: dict[str, tuple[str, str, str]] = {}
    for run in runs.drop_duplicates("scheme").sort_values("scheme").to_dict("records"):
        sites, look_name = run.get("scheme.sites"), str(run.get("scheme.kind"))
        if look_name == "rotary" and isinstance(sites, str):
            # The look of a rotary scheme depends on the tensors it rotates, not on its name.
            look_name = "".join(json.loads(sites))
        name = str(run["scheme"])
        # The start comes from the name alone, so a scheme looks the same in every report, unless its look is taken.
        start = crc32(name.encode())
        colour, marker = all_looks[start % len(all_looks)]
        # With another kind of attention it is another scheme, so it must not look like the usual one.
        has_other_attention = isinstance(run.get("scheme.attention.kind"), str)
        if look_name in _LOOKS and not has_other_attention:
            colour, marker = _LOOKS[look_name]
        dashes = "-" if run.get("is_relative") else "--"
        # The later scheme by name takes the next free look; if none is free, two look alike.
        after = start % len(all_looks) + 1
        wanted = [(colour, marker), *all_looks[after:], *all_looks[:after]]
        used = set(chosen.values())
        free = [look for look in wanted if (look[0], dashes, look[1]) not in used]
        colour, marker = (free or wanted)[0]
        chosen[name] = (colour, dashes, marker)
    return chosen


def new_figure(height: float, rows: int = 1, width: float = WIDTH, **options: Any) -> tuple[Figure, list[Axes]]:
    """Return a new figure of this size in inches, and its panels from top to bottom.

    Arguments: rows, of panels; options, of matplotlib's `Figure.subplots`.
    """
    figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.04, h_pad=0.06))
    return figure, list(figure.subplots(rows, sharex=True, squeeze=False, **options).flat)


def gaps(plot: Plot, look: Looks) -> Figure:
    """Draw each scheme's gap to the baseline with its 95 % interval over seeds, and a dot per seed.

    Arguments: plot, with `marks` (scheme, x: the mean, half of the interval, is_open: not decided by the tests) and
    `points` (scheme, x, a row per seed).
    """
    assert plot.marks is not None
    schemes = list(plot.marks["scheme"])
    row_height = 0.3 if len(schemes) <= 20 else 0.21  # inches
    figure, (axes,) = new_figure(0.8 + row_height * len(schemes), width=0.6 * WIDTH)
    for y, mark in enumerate(plot.marks.to_dict("records")):
        colour, _, marker = look[mark["scheme"]]
        # Seeds are drawn below the mean, where they do not hide the interval.
        seeds = plot.points.loc[plot.points["scheme"] == mark["scheme"], "x"]
        axes.plot(seeds, [y + 0.25] * len(seeds), ".", color=colour, alpha=0.7, markersize=5, markeredgewidth=0)
        if math.isfinite(mark["half"]):
            axes.errorbar([mark["x"]], [y], xerr=[[mark["half"]]], color=colour, linewidth=1.5, capsize=3, capthick=1.2)
        face = "white" if mark["is_open"] else colour
        axes.plot([mark["x"]], [y], marker, color=colour, markersize=6, markeredgewidth=1, markerfacecolor=face)
    axes.axvline(0, color=INK, linewidth=0.6)
    _cut_off_the_farthest(axes, plot.marks)
    axes.set_yticks(range(len(schemes)), schemes)
    axes.set_ylim(len(schemes) - 0.5, -0.6)  # from top to bottom
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(plot.x_label)
    return figure


def _cut_off_the_farthest(axes: Axes, marks: pd.DataFrame) -> None:
    # One scheme far from all others would flatten them: its figure then stands at the edge.
    x, half = marks["x"].to_numpy(float), marks["half"].fillna(0.0).to_numpy(float)
    *_, next_farthest, farthest = (int(n) for n in np.argsort(abs(x)))
    if not abs(x[farthest]) > 5 * abs(x[next_farthest]) > 0:
        return
    low, high = np.delete(x - half, farthest).min(), np.delete(x + half, farthest).max()
    room = 0.3 * (high - low)
    axes.set_xlim(low - room, high + room)
    figure = f"{x[farthest]:+.2f}"
    edge, text, side = (1, f"{figure} →", "right") if x[farthest] > 0 else (0, f"← {figure}", "left")
    axes.text(edge, farthest, text, ha=side, va="center", transform=axes.get_yaxis_transform())


def panels(plot: Plot, look: Looks) -> Figure:
    """Draw a panel per scheme and a line per seed, with a dot at which each line reaches a level.

    Arguments: plot, with `points` (scheme, seed, x, y), `marks` (scheme, x, y: the dots) and the level.
    """
    assert plot.marks is not None
    schemes = list(dict.fromkeys(plot.points["scheme"]))
    # All panels share one scale, so that schemes can be compared.
    figure, panels = new_figure(0.5 + 0.95 * len(schemes), rows=len(schemes), sharey=True)
    for axes, scheme in zip(panels, schemes, strict=True):
        colour, line, _ = look[scheme]
        for _, points in plot.points[plot.points["scheme"] == scheme].groupby("seed"):
            axes.plot(points["x"], points["y"], line, color=colour, linewidth=1.1)
        dots = plot.marks[plot.marks["scheme"] == scheme]
        axes.plot(dots["x"], dots["y"], "o", color=colour, markeredgewidth=0)
        axes.axhline(plot.level, color=INK, linewidth=0.6)
        axes.set_title(scheme)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_count(value)))
    panels[len(panels) // 2].set_ylabel(plot.y_label)
    panels[-1].set_xlabel(plot.x_label)
    return figure


def lines(plot: Plot, look: Looks) -> Figure:
    """Draw a line per scheme, at most MOST_LINES per panel, with names at the ends.

    Arguments: plot, with `points` (scheme, x, y and, to draw bands, low and high; panel: its title, without which
    panels are filled in order), scales and labels; `marks` (scheme, x, y, is_open, and panel) are dots; `line` is a
    vertical line, and `level` a horizontal one.
    """
    points = plot.points.assign(panel=plot.points.get("panel", _panels(plot.points["scheme"])))
    titles, names = list(dict.fromkeys(points["panel"])), list(dict.fromkeys(points["scheme"]))
    # Lines that are no schemes, such as optimizers, take colours in order.
    look = {name: (_COLOURS[n % len(_COLOURS)], "-", _MARKERS[n % len(_MARKERS)]) for n, name in enumerate(names)} | {
        **look
    }
    height = max(3.8, 0.5 + (2.6 if "panel" not in plot.points else 2.0) * len(titles))
    figure, panels = new_figure(height, rows=len(titles), sharey=True)
    for axes, title in zip(panels, titles, strict=True):
        of_panel = points[points["panel"] == title]
        for scheme, line in of_panel.groupby("scheme", sort=False):
            colour, dashes, marker = look[str(scheme)]
            # About eight markers per line; more would hide it.
            options: dict[str, Any] = {"color": colour, "marker": marker, "markevery": max(1, len(line) // 8)}
            x, y = line["x"].to_numpy(float), line["y"].to_numpy(float)
            axes.plot(x, y, dashes, markeredgewidth=0, label=scheme, **options)
        if "panel" in plot.points:
            axes.set_title(title)
        if plot.marks is not None:
            is_here = (
                plot.marks["panel"] == title if "panel" in plot.marks else plot.marks["scheme"].isin(of_panel["scheme"])
            )
            _small_dots(axes, plot.marks[is_here], look)
        _set_scales(axes, plot)
        axes.set_ylabel(plot.y_label)
        if math.isfinite(plot.level):
            axes.axhline(plot.level, color=INK, linewidth=0.6)
        if "low" in points:
            axes.set_autoscale_on(False)  # keep the scales of the lines
            for scheme, band in of_panel.sort_values("x").groupby("scheme"):
                colour = look[str(scheme)][0]
                axes.fill_between(band["x"], band["low"], band["high"], color=colour, alpha=0.12, linewidth=0)
    panels[-1].set_xlabel(plot.x_label)
    figure.get_layout_engine().execute(figure)  # type: ignore[union-attr]  # labels need the final positions of the axes
    for axes in panels:
        name_lines(figure, axes)
    return figure


def _panels(schemes: pd.Series) -> pd.Series:
    # Return the panel of each row: panels are filled in order, so each holds schemes that follow each other.
    names = list(dict.fromkeys(schemes))
    num_panels = max(1, math.ceil(len(names) / MOST_LINES))
    lines_per_panel = math.ceil(len(names) / num_panels)
    return schemes.map(names.index) // max(1, lines_per_panel)


def _small_dots(axes: Axes, marks: pd.DataFrame, look: Looks) -> None:
    for mark in marks.to_dict("records"):
        colour = look[mark["scheme"]][0]
        edge: dict[str, Any] = {"markersize": 3.5, "markeredgewidth": 0.8, "alpha": 0.7, "color": colour}
        edge["markerfacecolor"] = "white" if mark["is_open"] else colour
        axes.plot(mark["x"], mark["y"], "o", label="_seed", **edge)


def _set_scales(axes: Axes, plot: Plot) -> None:
    places = sorted(set(plot.points["x"]))
    if plot.x_scale == "tokens":
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_count(value)))
        axes.margins(x=0)
    elif plot.x_scale == "lengths":
        length_axis(axes, places, int(plot.line))
    elif plot.x_scale == "rates":
        axes.set_xscale("log", base=2)
        axes.set_xticks(places, [f"{rate:g}" for rate in places])
        axes.minorticks_off()
    else:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_length(int(value))))
    if plot.y_scale == "log":
        log_numbers(axes)
    elif plot.y_scale == "symlog":
        # Symmetric log: figures span powers of ten on both sides of zero.
        axes.set_yscale("symlog", linthresh=0.01, linscale=0.5)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def setups(plot: Plot, look: Looks) -> Figure:
    """Draw a dot per setup and seed, fainter for branches, above a grid of the setups' levels.

    Arguments: plot, with `points` (scheme, x: the place of the setup, y, is_branch) and `marks`, the levels: a row per
    place, a column per factor, True for the second level.
    """
    assert plot.marks is not None
    places, factors = range(len(plot.marks)), list(plot.marks)
    figure = Figure(
        figsize=(0.6 * WIDTH, 2.2 + 0.2 * len(factors)), layout=ConstrainedLayoutEngine(w_pad=0.04, h_pad=0.06)
    )
    above, below = figure.subplots(2, sharex=True, height_ratios=[2.0, 0.2 * len(factors)])
    colour, _, marker = look[plot.points["scheme"].iloc[0]]
    is_branch = plot.points["is_branch"].astype(bool)
    for points, alpha in ((plot.points[is_branch], 0.3), (plot.points[~is_branch], 1.0)):
        above.plot(points["x"], points["y"], marker, color=colour, alpha=alpha, markersize=5, markeredgewidth=0)
    above.axhline(plot.level, color=INK, linewidth=0.6)
    above.set_ylabel(plot.y_label)
    for n, factor in enumerate(factors):
        faces = [INK if is_second else GRID for is_second in plot.marks[factor]]
        below.scatter(places, [n] * len(places), c=faces, marker="s", s=22)
    below.set_yticks(range(len(factors)), factors)
    below.set_ylim(len(factors) - 0.5, -0.5)
    below.set_xticks([])
    below.set_xlabel(plot.x_label)
    _bare(below)
    return figure


def cells(plot: Plot, look: Looks) -> Figure:
    """Draw panels of coloured cells, a text in each, shaded from 0 (clear) to 1.

    Arguments: plot, with `points` (panel, row, column, shade, text, note: at the right of the row), `marks` (row,
    column, share, is_filled: a dot, further right for a larger share) and `line` (the columns at the left of a line).
    """
    titles, columns = list(dict.fromkeys(plot.points["panel"])), list(dict.fromkeys(plot.points["column"]))
    # Cells with dots need room below their text.
    row_height = 0.28 if plot.marks is None else 0.42
    rows = plot.points.drop_duplicates(["panel", "row"]).groupby("panel").size().sum()
    height = 0.6 + 0.3 * len(titles) + row_height * rows
    figure, panels = new_figure(height, rows=len(titles), width=min(WIDTH, 2.6 + 0.85 * len(columns)))
    for axes, title in zip(panels, titles, strict=True):
        _grid(axes, plot.points[plot.points["panel"] == title], columns)
        axes.set_title(title)
        if plot.marks is not None:
            _dots(axes, plot.marks, list(dict.fromkeys(plot.points["row"])), columns)
        if math.isfinite(plot.line):
            axes.axvline(plot.line, color=INK, linewidth=1.2)
    panels[-1].set_xlabel(plot.x_label)
    return figure


def _grid(axes: Axes, points: pd.DataFrame, columns: list[str]) -> None:
    rows = list(dict.fromkeys(points["row"]))
    shades = points.pivot(index="row", columns="column", values="shade").reindex(index=rows, columns=columns)
    # Colours that let the page through, light or dark, keep its text readable on them.
    colours = LinearSegmentedColormap.from_list("cells", [(BLUE, 0.0), (BLUE, 0.6)])
    axes.pcolormesh(shades.to_numpy(float), cmap=colours, vmin=0, vmax=1, edgecolor="white", linewidth=1.5)
    axes.invert_yaxis()
    for cell in points.to_dict("records"):
        x, y = columns.index(cell["column"]) + 0.5, rows.index(cell["row"]) + 0.5
        axes.text(x, y, cell["text"], ha="center", va="center", fontsize=8, color=INK)
    for y, note in enumerate(points.drop_duplicates("row")["note"]):
        axes.text(len(columns) + 0.1, y + 0.5, note, va="center", fontsize=8)
    axes.set_xticks(np.arange(len(columns)) + 0.5, columns)
    axes.set_yticks(np.arange(len(rows)) + 0.5, rows)
    _bare(axes)


def _dots(axes: Axes, marks: pd.DataFrame, rows: Sequence[str], columns: Sequence[str]) -> None:
    # 0.08 and 0.84: the dots stay inside the cell, near its lower edge.
    x = marks["column"].map(columns.index) + 0.08 + 0.84 * marks["share"]
    y = marks["row"].map(rows.index) + 0.84
    for is_filled, fill in ((False, "none"), (True, INK)):
        is_shown = marks["is_filled"] == is_filled
        axes.plot(x[is_shown], y[is_shown], "o", markersize=3, color=INK, markerfacecolor=fill, markeredgewidth=0.5)


def _bare(axes: Axes) -> None:
    axes.grid(visible=False)
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)


def by_head(plot: Plot, look: Looks | None = None) -> Figure:
    """Draw one or more rows of panels per scheme, a panel per layer and a line per head, all on one scale.

    Arguments: plot, with scales, labels and `points` (scheme, layer, head, line: the name that decides the colour,
    first and last: distance or channel pair, value, value_windows: half its interval); look is not used.
    """
    rows = plot.points
    by_pair = plot.x_scale == "pairs"  # x is the channel pair, else the distance
    schemes, layers = list(dict.fromkeys(rows["scheme"])), sorted(set(rows["layer"]))
    # At most ten panels are in a row.
    depth = math.ceil(len(layers) / 10)  # rows of a scheme
    panels_per_row = math.ceil(len(layers) / depth)
    height = 0.9 + 1.15 * len(schemes) * depth  # inches
    figure = Figure(figsize=(WIDTH, height), layout=ConstrainedLayoutEngine(w_pad=0.03, h_pad=0.03))
    grid: Any = figure.subplots(len(schemes) * depth, panels_per_row, sharex=True, sharey=True, squeeze=False)
    panels = grid.reshape(len(schemes), depth * panels_per_row)
    # The last row of a scheme may have unused panels.
    for axes in panels[:, len(layers) :].flat:
        axes.axis("off")
    names = list(dict.fromkeys(rows["line"]))
    by_name: dict[str, Any] = {}
    for (scheme, layer, name, _), line in rows.groupby(["scheme", "layer", "line", "head"], sort=False):
        axes = panels[schemes.index(scheme), layers.index(layer)]
        colour = _COLOURS[names.index(name) % len(_COLOURS)]
        first, last, value, interval = (line[name] for name in ("first", "last", "value", "value_windows"))
        x: Any = first
        if not by_pair:  # distances: the middle of a range on the log scale; 0, which has no logarithm, is drawn at 0.5
            x = np.where(first == 0, 0.5, np.sqrt(first * last))
        (by_name[str(name)],) = axes.plot(x, value, ".-", color=colour, alpha=0.75, linewidth=1, markersize=3)
        axes.fill_between(x, value - interval, value + interval, color=colour, alpha=0.12, linewidth=0)
    for scheme, row in zip(schemes, panels, strict=True):
        row[0].set_ylabel(scheme, rotation=0, ha="right", va="center")
    for layer, axes in zip(layers, panels[0], strict=False):
        title = f"layer {layer}" if depth == 1 else f"{layer}"
        axes.set_title(title)
    for axes in panels.flat:
        if not by_pair:
            axes.set_xscale("log", base=2)
            farthest = math.ceil(math.log2(rows["last"].max()))
            # Distance 0 is drawn at 0.5; then every other power of two.
            ticks = [0.5, *(2.0**n for n in range(0, farthest, 2))]
            axes.set_xticks(ticks, ["0", *(f"{tick:g}" for tick in ticks[1:])])
            axes.minorticks_off()
        if plot.y_scale == "symlog":
            axes.set_yscale("symlog", linthresh=1)
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.axhline(0, color=GRID, linewidth=0.6)
    figure.supxlabel(plot.x_label, fontsize=9, color=INK)
    figure.supylabel(plot.y_label, fontsize=9, color=INK)
    # More names than colours: a legend would be wrong.
    if len(by_name) <= len(_COLOURS):
        figure.legend(by_name.values(), by_name, loc="outside upper center", ncols=len(by_name), frameon=False)
    return figure


KINDS: Mapping[str, Callable[[Plot, Looks], Figure]] = {
    "gaps": gaps,
    "lines": lines,
    "panels": panels,
    "setups": setups,
    "cells": cells,
    "heads": by_head,
}


def name_lines(figure: Figure, axes: Axes) -> None:
    """Write each line's name at its right end, moved up or down only to avoid overlaps."""
    # Names that begin with `_` are helpers, such as dots and samples.
    lines = [line for line in axes.get_lines() if not str(line.get_label()).startswith("_")]
    if not lines:
        return
    # Names are placed in pixels, where their height is known.
    bottom, top = axes.bbox.y0, axes.bbox.y1
    ends = []
    for line in lines:
        x, y = np.asarray(line.get_xdata(), float), np.asarray(line.get_ydata(), float)
        finite_points = np.flatnonzero(np.isfinite(x) & np.isfinite(y))
        # A line without a finite value gets its name at the origin.
        end = (0.0, 0.0)
        if len(finite_points):
            end = (x[finite_points[-1]], y[finite_points[-1]])
        ends.append(end)
    end_heights = [axes.transData.transform(end)[1] for end in ends]
    heights = np.clip(end_heights, bottom, top)
    placed = spread_out(heights, room=1.25 * LABEL_POINTS * figure.dpi / 72, low=bottom, high=top)
    for line, end, y in zip(lines, ends, (placed - bottom) / (top - bottom), strict=True):
        # A dotted leader from the line's end, a sample of the line, and the name.
        colour: Any = line.get_color()
        arrow = {"arrowstyle": "-", "color": colour, "linewidth": 0.5, "linestyle": ":", "shrinkA": 0, "shrinkB": 2}
        axes.annotate("", end, (1.03, y), textcoords="axes fraction", annotation_clip=False, arrowprops=arrow)
        sample: dict[str, Any] = {"color": colour, "transform": axes.transAxes, "clip_on": False, "label": "_sample"}
        axes.plot([1.03, 1.062], [y, y], line.get_linestyle(), **sample)
        axes.plot([1.046], [y], marker=line.get_marker(), markeredgewidth=0, **sample)
        name = str(line.get_label())
        axes.text(1.07, y, name, transform=axes.transAxes, va="center", fontsize=LABEL_POINTS, color=colour)


def spread_out(heights: Any, room: float, low: float, high: float) -> Any:
    """Return the positions nearest to `heights` (least squares, same order) that are at least `room` apart.

    They stay within low - room/2 and high + room/2 if there is space for all, and begin at the lower end otherwise.
    """
    order = np.argsort(heights, kind="stable")
    # Less the room that the names below take up, heights must only not decrease: that is isotonic regression.
    steps = room * np.arange(len(order))
    spread = isotonic_regression(np.asarray(heights)[order] - steps).x
    # Names move up only as far as those above them fit; without space for all, they begin at the lower end.
    highest_start = max(low - room / 2, high + room / 2 - steps[-1])
    placed = np.empty(len(order))
    placed[order] = np.clip(spread, low - room / 2, highest_start) + steps
    return placed


def length_axis(axes: Axes, lengths: Sequence[int], training_length: int) -> None:
    """Set up a log axis for lengths in tokens, and mark the training length."""
    axes.set_xscale("log", base=2)
    # Other lengths, such as T + 1, would stand too close to be read.
    shown = [n for n in lengths if n % training_length == 0 or training_length % n == 0] or list(lengths)
    axes.set_xticks(shown, [short_length(n) for n in shown])
    axes.minorticks_off()
    axes.axvline(training_length, color=INK, linewidth=0.8, linestyle=(0, (1, 2)))
    position: Any = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "va": "top", "fontsize": 8}
    axes.annotate(f"trained at {short_length(training_length)}", (training_length, 1), (3, -1), **position)


def log_numbers(axes: Axes) -> None:
    """Set up a logarithmic y axis with plain numbers: steps of 1, 2, 5 for a wide range of values, else round steps."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    widening = max(1.0, 1.02 / (high / low)) ** 0.5  # at least a factor of 1.02, so that tiny differences look tiny
    low, high = axes.set_ylim(low / widening, high * widening)
    is_wide = high / low > 6
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)) if is_wide else MaxNLocator(6))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axes.minorticks_off()


def encode(figure: Figure, kind: str) -> bytes:
    """Return the bytes of a file, `svg` or `pdf`; the same figure gives the same bytes."""
    buffer = io.BytesIO()
    # Dates and program versions would make equal pictures differ.
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None, "Producer": None}}[kind]
    canvas = import_module(f"matplotlib.backends.backend_{kind}").FigureCanvas(figure)
    with style():
        getattr(canvas, f"print_{kind}")(buffer, metadata=metadata)  # `savefig` draws twice
    if kind == "svg":  # two decimals of a point are more than can be seen
        return re.sub(rb"<[^>]*>", lambda tag: re.sub(rb"(\d\.\d\d)\d+", rb"\1", tag[0]), buffer.getvalue())
    return buffer.getvalue()


def inline_svg(drawing: str, prefix: str) -> str:
    """Return matplotlib's SVG text as an element of an HTML page, with the page's colours and size.

    Arguments: prefix, put before every id of the drawing, so that ids are unique in the page.
    """
    # An element of a page has no XML prolog.
    body = drawing[drawing.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    # Without a height, a picture that is narrower than planned keeps its shape.
    body = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", body, count=1)
    # The page limits the width, so that text has one size in all pictures.
    body = re.sub(r'(<svg[^>]*?) width="([^"]*)"', r'\1 style="--width: \2"', body, count=1)
    body = re.sub(r'\bid="', f'id="{prefix}-', body)
    body = re.sub(r"url\(#", f"url(#{prefix}-", body)
    body = re.sub(r'href="#', f'href="#{prefix}-', body)
    # These colours follow the page's light or dark theme.
    return body.replace(INK, "currentColor").replace(GRID, "var(--rule)").replace("#ffffff", "var(--paper)")
