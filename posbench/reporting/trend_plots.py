"""The pictures of a trend: gaps against tokens, a panel a size, and against size."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from posbench.reporting.drawing import draw_lines, name_lines, new_figure, short, style
from posbench.reporting.palette import INK
from posbench.reporting.trend import Point, Trend
from posbench.units import short_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_trend(trend: Trend) -> dict[str, Figure]:
    """File stem -> figure; only those with more than one point."""
    figures: dict[str, Figure] = {}
    with style():
        if any(len(points) > 1 for points in trend.sizes().values()):
            figures["gaps-by-tokens"] = by_tokens(trend)
        if len(trend.sizes()) > 1:
            figures["gaps-by-size"] = by_size(trend)
    return figures


def by_tokens(trend: Trend) -> Figure:
    """One panel a size, over one scale of tokens."""
    sizes = {size: points for size, points in trend.sizes().items() if len(points) > 1}
    figure, panels = new_figure(4.2, 1, len(sizes), sharey=True)
    for axes, (size, points) in zip(panels, sizes.items(), strict=True):
        _draw(axes, trend, points, lambda point: point.tokens)
        axes.set_title(f"{short_count(size)} parameters")
    _tokens_axis(panels[0], [point.tokens for points in sizes.values() for point in points])
    panels[0].set_ylabel(f"gap to {short(trend.baseline)}, nats/token")
    figure.supxlabel("tokens trained on", fontsize=9)
    name_lines(figure, panels[-1])
    return figure


def by_size(trend: Trend) -> Figure:
    """The longest run of each size."""
    figure, (axes,) = new_figure(4.2)
    points = trend.longest()
    _draw(axes, trend, points, lambda point: point.parameters)
    axes.set_xscale("log", base=2)
    axes.set_xticks(
        [point.parameters for point in points],
        [f"{short_count(point.parameters)}\n{short_count(point.tokens)} tokens" for point in points],
    )
    axes.minorticks_off()
    axes.set_xlabel("parameters")
    axes.set_ylabel(f"gap to {short(trend.baseline)}, nats/token")
    name_lines(figure, axes)
    return figure


def _draw(axes: Axes, trend: Trend, points: list[Point], amount: Callable[[Point], int]) -> None:
    """Lines with bars of the interval over seeds."""
    series = {}
    for scheme in (scheme for scheme in trend.schemes if scheme != trend.baseline):
        there = [point for point in points if scheme in point.losses]
        gaps = [point.losses[scheme].gap for point in there]
        x, y = [amount(point) for point in there], [gap.mean for gap in gaps]
        series[scheme] = (x, y)
        half = np.nan_to_num([gap.half_width for gap in gaps])
        colour = trend.looks[scheme].colour
        axes.errorbar(x, y, yerr=half, fmt="none", ecolor=colour, elinewidth=0.9, capsize=2, label="_interval")
    draw_lines(axes, series, trend.looks)
    axes.axhline(0, color=INK, linewidth=0.6, label="_zero")


def _tokens_axis(axes: Axes, tokens: list[int]) -> None:
    axes.set_xscale("log", base=2)
    ticks: list[int] = []
    for each in sorted(tokens):
        if not ticks or each > 1.7 * ticks[-1]:  # else their texts would meet
            ticks.append(each)
    axes.set_xticks(ticks, [short_count(each) for each in ticks])
    axes.minorticks_off()
