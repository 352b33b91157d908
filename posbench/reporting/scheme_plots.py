"""`posbench schemes --plot`: what each position scheme does, drawn. Learned numbers are those of a finished run."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from posbench.composition import choices, compose
from posbench.machine.files import write_bytes
from posbench.model import shape_of
from posbench.reporting.drawing import new_figure, png, style, svg
from posbench.reporting.palette import INK
from posbench.reporting.scheme_curves import Curve, Curves, curves_of, distinct, long_term_decay, similarity
from posbench.schemes import Scheme, build_scheme
from posbench.schemes.rotary import Rotary

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import Console

    from posbench.runs import Run

# The decoder that untrained schemes are drawn in: heads as models of the field have them.
MODEL = ("model.d_model=512", "model.num_heads=8", "model.num_kv_heads=8", "model.head_dim=64", "model.num_layers=4")
LONGEST = 1024  # tokens of distance
LEAST = -16.0  # of a score: what is below weighs nothing, and would hide the rest
LETTERS_AN_INCH = 12  # of a label at 9 points
COLUMNS = 4


@dataclass(frozen=True)
class Drawn:
    """One scheme's curves in one layer."""

    name: str
    layer: int | None  # None: all layers have these
    curves: Curves
    is_added: bool = False  # are they of what is added to the embeddings?

    def named(self) -> Iterator[tuple[str, Curve | None]]:
        """Each of the curves with what it is of."""
        yield "similarity" if self.is_added else "score", self.curves.score
        yield "value", self.curves.value

    @property
    def title(self) -> str:
        return self.name if self.layer is None else f"{self.name}, layer {self.layer}"


def plot_schemes(folder: Path, runs: Sequence[Run], console: Console, config_dir: Path | None = None) -> list[Path]:
    """Draw every scheme that can be drawn; write pictures (SVG and PNG) and curves (CSV) to `folder`.

    Arguments: runs, finished, whose weights are taken for the schemes that they have; config_dir, of the user's own
    schemes.
    Raises: ConfigError where a run has no weights or a scheme refuses the decoder.
    """
    trained = {run.config.scheme.name: run for run in runs}
    names = list(dict.fromkeys([*choices("scheme", *([config_dir] if config_dir else [])), *trained]))
    extra = (f"--config-dir={config_dir}",) if config_dir else ()
    drawn: list[Drawn] = []
    frequencies: dict[str, list[float]] = {}
    for name in names:
        if name in trained:
            config, scheme = trained[name].config, trained[name].load_model().scheme
        else:
            config = compose([f"scheme={name}", *MODEL, f"train.context_length={LONGEST}", *extra])
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                scheme = build_scheme(config.scheme, shape_of(config))
        if config.scheme.attention:
            continue  # its row without a kind of attention says the same
        title = f"{name} (trained)" if name in trained else name
        drawn += list(_drawn(title, scheme, name in trained))
        frequencies |= _frequencies(title, scheme)
    figures = _figures(drawn, frequencies)
    tables = {"curves.csv": _frame(drawn), "decay.csv": _decay_frame(frequencies)}
    paths: list[Path] = []
    for stem, figure in figures.items():
        for suffix, content in ((".svg", svg(figure).encode()), (".png", png(figure))):
            paths.append(folder / f"{stem}{suffix}")
            write_bytes(paths[-1], content)
    for file, frame in tables.items():
        paths.append(folder / file)
        write_bytes(paths[-1], frame.to_csv(index=False, float_format="%.6g").encode())
    shown = {each.name for each in drawn if each.curves.score is not None or each.curves.value is not None}
    flat = sorted({each.name for each in drawn} - shown)
    console.print(
        f"wrote {len(figures)} pictures (SVG and PNG), curves.csv and decay.csv in {folder}/",
        markup=False,
        soft_wrap=True,
    )
    if flat:
        console.print(
            f"nothing to draw for {', '.join(flat)}: nothing changes with distance, or what is learned starts at 0 "
            "(name finished runs to draw what they learned)",
            markup=False,
        )
    return paths


def _drawn(name: str, scheme: Scheme, is_trained: bool) -> Iterator[Drawn]:
    """The curves of each layer's scheme; one for all where they are the same, or differ by what is drawn at random."""
    longest = min(LONGEST, (scheme.longest or LONGEST + 1) - 1)
    added = similarity(scheme, longest)
    if added.score is not None:
        yield Drawn(name, None, added, is_added=True)
        return
    layers = [(n, curves_of(layer, longest)) for n, layer in distinct(scheme)]
    first = layers[0][1]
    if not is_trained or all(_equal(first, curves) for _, curves in layers):
        layers = layers[:1]
    for n, curves in layers:
        yield Drawn(name, n if len(layers) > 1 else None, curves)


def _equal(one: Curves, other: Curves) -> bool:
    pairs = ((one.score, other.score), (one.value, other.value))
    return all(a is b if a is None or b is None else np.array_equal(a, b) for a, b in pairs)


def _frequencies(name: str, scheme: Scheme) -> dict[str, list[float]]:
    """Of each pair of channels in the scheme's rotation, radians a token, 0 where it is not rotated.

    Of several layers, the first that rotates.
    """
    for _, layer in distinct(scheme):
        if isinstance(layer, Rotary) and layer.sites:
            rotated = layer.frequencies().tolist()
            return {name: rotated + [0.0] * (layer.shape.head_dim // 2 - len(rotated))}
    return {}


def _figures(drawn: Sequence[Drawn], frequencies: Mapping[str, list[float]]) -> dict[str, Figure]:
    """File stem -> figure."""
    scores = [each for each in drawn if each.curves.score is not None and not each.is_added]
    values = [each for each in drawn if each.curves.value is not None]
    added = [each for each in drawn if each.is_added]
    figures: dict[str, Figure] = {}
    with style():
        if scores:
            label = "score minus that at distance 0"
            figures["scores"] = _grid(scores, lambda curves: curves.score, label)
        if values:
            figures["values"] = _grid(values, lambda curves: curves.value, "part of a value that arrives unchanged")
        if added:
            figures["added"] = _grid(added, lambda curves: curves.score, "cosine of the vectors of two positions")
        if frequencies:
            figures["long-term-decay"] = _decay(frequencies)
    return figures


def _grid(drawn: Sequence[Drawn], curve: Callable[[Curves], Curve | None], label: str) -> Figure:
    """A panel a scheme, a line a head (the first dark, the last pale), one line where all heads agree."""
    columns = min(COLUMNS, len(drawn))
    rows = -(-len(drawn) // columns)
    height = 0.5 + (1.35 if rows > 1 else 2.0) * rows
    figure, panels = new_figure(height, rows, columns)
    for axes, each in zip(panels, drawn, strict=False):
        lines = curve(each.curves)
        assert lines is not None
        _draw_heads(axes, each.curves.distances, lines)
        axes.set_title(each.title, fontsize=8)
    for axes in panels[len(drawn) :]:
        axes.set_visible(False)
    for axes in panels[max(0, len(drawn) - columns) : len(drawn)]:
        axes.tick_params(labelbottom=True)
    figure.supxlabel("distance, tokens", fontsize=9)
    figure.supylabel(textwrap.fill(label, width=int(height * LETTERS_AN_INCH)), fontsize=9)
    return figure


def _draw_heads(axes: Axes, distances: Curve, lines: Curve) -> None:
    from matplotlib import colormaps

    shades = colormaps["viridis"](np.linspace(0, 0.85, len(lines)))
    alike = len(lines) == 1 or bool(np.ptp(lines, axis=0).max() < 0.05 * max(float(np.ptp(lines)), 1e-12))
    for line, shade in zip(lines[:1] if alike else lines, [INK] if alike else shades, strict=True):
        axes.plot(distances, line, color=shade, linewidth=1.0)
    low, high = max(float(lines.min()), LEAST), float(lines.max())
    axes.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
    _distance_axis(axes, float(distances[-1]))
    axes.tick_params(labelsize=7)


def _decay(frequencies: Mapping[str, list[float]]) -> Figure:
    """One line for each distinct set of frequencies, named by the schemes that have it."""
    from matplotlib import colormaps

    figure, (axes,) = new_figure(4.4)
    sets: dict[tuple[float, ...], list[str]] = {}
    for name, each in sorted(frequencies.items(), key=lambda item: not item[0].startswith("qk_rope")):
        sets.setdefault(tuple(each), []).append(name)
    farthest = 1.0
    for n, (distinct_set, names) in enumerate(sets.items()):
        distances, decay = long_term_decay(distinct_set)
        farthest = distances[-1]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        line = ("-", "--", "-.")[n // 10 % 3]
        axes.plot(distances, decay, line, color=colormaps["tab10"](n % 10), linewidth=1.2, label=names[0] + more)
    _distance_axis(axes, farthest)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("distance, tokens")
    axes.set_ylabel("long-term decay (RoFormer 3.4.3), 1 at distance 0")
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    return figure


def _distance_axis(axes: Axes, farthest: float) -> None:
    axes.set_xscale("symlog", base=2, linthresh=1, linscale=0.5)
    ticks = [0, *(4**n for n in range(9) if 4**n <= farthest)]
    axes.set_xticks(ticks, [f"{tick // 1024}k" if tick >= 1024 else str(tick) for tick in ticks])
    axes.minorticks_off()


def _frame(drawn: Sequence[Drawn]) -> pd.DataFrame:
    """One row a scheme, layer, head and distance; `what` says which curve it is of."""
    import pandas as pd

    rows = [
        {"scheme": each.name, "layer": each.layer, "what": what, "head": h, "distance": d, "value": value}
        for each in drawn
        for what, lines in (
            ("similarity" if each.is_added else "score", each.curves.score),
            ("value", each.curves.value),
        )
        if lines is not None
        for h, line in enumerate(lines)
        for d, value in zip(each.curves.distances, line, strict=True)
    ]
    return pd.DataFrame(rows, columns=["scheme", "layer", "what", "head", "distance", "value"])


def _decay_frame(frequencies: Mapping[str, list[float]]) -> pd.DataFrame:
    import pandas as pd

    rows = [
        {"scheme": name, "distance": distance, "decay": decay}
        for name, each in frequencies.items()
        for distance, decay in zip(*long_term_decay(each), strict=True)
    ]
    return pd.DataFrame(rows, columns=["scheme", "distance", "decay"])
