"""`posbench schemes --plot`: what each scheme does as curves over distance, asked of its own hooks in float64.

    score(d)  what the scaled score of a query and a key of the same content is at distance d, less that at distance 0
    value(d)  how much of a value from distance d arrives at the query as it was sent

Both are means over random contents. Learned numbers are those of a finished run, where one is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor

from posbench.attention import Softmax
from posbench.catalogue.choices import choices
from posbench.composition.compose import compose
from posbench.model.decoder import build_model
from posbench.reporting.figures import INK, WIDTH, encoded, new_figure, style
from posbench.runs import Run
from posbench.schemes import Gates, Layers, Placement, Scheme

# The decoder that untrained schemes are drawn in: heads as models of the field have them.
MODEL = ("model.d_model=512", "model.num_heads=8", "model.num_kv_heads=8", "model.head_dim=64", "model.num_layers=4")
LONGEST = 1024  # tokens of distance
LEAST = -16.0  # of a score: what is below weighs nothing, and would hide the rest
SAMPLES = 256  # random contents
FLAT = 1e-9  # a curve that moves by less says nothing
COLUMNS = 4
_LABELS = {"score": "score minus that at distance 0", "value": "part of a value that arrives unchanged"}
Curve = NDArray[np.float64]


@dataclass(frozen=True)
class Curves:
    """Of one scheme in one layer, each [H, distances]; None where the scheme leaves that alone."""

    distances: Curve  # tokens
    score: Curve | None  # in the units of scaled scores
    value: Curve | None  # as a part of what was sent


def plot_schemes(folder: Path, runs: Sequence[Run], console: Console, config_dir: Path | None = None) -> list[Path]:
    """Draw every scheme that can be drawn; write scores.svg and values.svg to `folder`.

    Arguments: runs, finished, whose weights are taken for the schemes that they have; config_dir, of the user's own
    schemes.
    Raises: ConfigError where a run has no weights or a scheme refuses the decoder.
    """
    trained = {run.config.scheme.name: run for run in runs}
    names = list(dict.fromkeys([*choices("scheme", *([config_dir] if config_dir else [])), *trained]))
    extra = (f"--config-dir={config_dir}",) if config_dir else ()
    drawn: dict[str, Curves] = {}
    for name in names:
        if name in trained:
            config, scheme = trained[name].config, trained[name].load_model().scheme
        else:
            config = compose([f"scheme={name}", *MODEL, f"train.context_length={LONGEST}", *extra])
            scheme = build_model(config, 2).scheme
        if not config.scheme.attention:  # else its row without a kind of attention says the same
            drawn |= titled(name, scheme, name in trained)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for what in _LABELS:
        lines = {title: (of.distances, getattr(of, what)) for title, of in drawn.items()}
        lines = {title: of for title, of in lines.items() if of[1] is not None}
        if lines:
            paths.append(folder / f"{what}s.svg")
            paths[-1].write_bytes(encoded(grid(lines, _LABELS[what]), "svg"))
    console.print(f"wrote {', '.join(path.name for path in paths)} in {folder}/", markup=False, soft_wrap=True)
    flat = [title for title, of in drawn.items() if of.score is None and of.value is None]
    if flat:
        console.print(
            f"nothing to draw for {', '.join(flat)}: nothing changes with distance, or learned tables start at 0 (name "
            "a finished run to plot them)",
            markup=False,
        )
    return paths


def titled(name: str, scheme: Layers, is_trained: bool) -> dict[str, Curves]:
    """The curves by their title; of a trained scheme those of each layer that has its own."""
    longest = min(LONGEST, (scheme.longest or LONGEST + 1) - 1)
    layers = list(dict.fromkeys(scheme)) if is_trained else [scheme.first]
    title = f"{name} (trained)" if is_trained else name
    titles = [f"{title}, layer {n}" for n in range(len(layers))] if layers[1:] else [title]
    return {title: curves_of(layer, longest) for title, layer in zip(titles, layers, strict=True)}


@torch.no_grad()
def curves_of(scheme: Scheme, longest: int) -> Curves:
    """The curves of a scheme up to `longest` tokens of distance, seen from a query at that position.

    Arguments: scheme, of one layer, in any dtype; it is read in float64.
    """
    scheme = scheme.double()
    shape, length = scheme.shape, longest + 1
    H, D, C = shape.num_heads, shape.head_dim, shape.d_model
    generator = torch.Generator().manual_seed(0)
    # Of all heads alike, so that heads differ by what the scheme does alone.
    content = torch.randn(SAMPLES, 1, 1, D, dtype=torch.float64, generator=generator).expand(-1, H, -1, -1)
    stream = torch.randn(1, 1, C, dtype=torch.float64, generator=generator).expand(1, length, C)
    rows = np.unique(np.geomspace(1, longest, 200).round().astype(int))
    distances = np.concatenate(([0], rows))
    keys = torch.from_numpy(longest - distances)  # positions
    everywhere = Placement(scheme.prepare(torch.arange(length), length), 0, 0, length)
    gates, located, _ = Softmax(shape).gates_and_positions(stream, scheme, everywhere, None)
    here, there = _rows(located, torch.tensor([longest])), _rows(located, keys)

    q, k = scheme.q(content, here), scheme.k(content.expand(-1, -1, len(keys), -1), there)
    scores = (q @ k.transpose(-2, -1)).mean(0)[:, 0] / D**0.5
    at = Placement(_rows(everywhere.pos, torch.tensor([longest])), first_query=longest, first_key=0, length=length)
    kept = scheme.k(content.expand(-1, -1, length, -1), located) if scheme.reads_keys else k
    bias = scheme.bias(q, kept, _of_last(gates), at)
    if bias is not None:
        b, h = torch.arange(SAMPLES)[:, None, None, None], torch.arange(H)[:, None, None]
        added = bias(b, h, torch.tensor([[0]]), keys[None, :]).double()
        scores = scores + added.expand(SAMPLES, H, 1, -1).mean(0)[:, 0]
    sent = content.expand(-1, -1, len(keys), -1)
    arrived = scheme.o(scheme.v(sent, there), here)
    value = ((arrived * sent).sum(-1) / (sent * sent).sum(-1)).mean(0)
    return Curves(distances.astype(float), _unless_flat(scores - scores[:, :1]), _unless_flat(value))


def _rows(pos: Any, rows: Tensor) -> Any:
    """These rows of what hooks get as `pos`."""
    if isinstance(pos, tuple):
        parts = [_rows(part, rows) for part in pos]
        return type(pos)(*parts) if hasattr(pos, "_fields") else tuple(parts)
    return pos if pos.ndim == 0 else pos[rows] if pos.ndim == 1 else pos[..., rows, :]


def _of_last(gates: Any) -> Any:
    """Gates of a window as its last query has them, the same for each random content."""
    if isinstance(gates, Gates):
        each = (gates.at_query[:, :, -1:], gates.at_key, gates.sum_at_query[:, :, -1:], gates.sum_at_key)
        return Gates(*(x.expand(SAMPLES, -1, -1, -1) for x in each))
    return tuple(map(_of_last, gates)) if isinstance(gates, tuple) else None


def _unless_flat(curve: Tensor) -> Curve | None:
    array: Curve = curve.numpy()
    return None if np.ptp(array, axis=1).max() < FLAT else array


def grid(lines: dict[str, tuple[Curve, Curve]], label: str) -> Figure:
    """A panel a scheme, a line a head (the first dark, the last pale), one line where all heads agree."""
    columns = min(COLUMNS, len(lines))
    rows = -(-len(lines) // columns)
    with style():
        height, width = 0.5 + (1.35 if rows > 1 else 2.0) * rows, WIDTH * columns / COLUMNS
        figure, panels = new_figure(height, rows, width, ncols=columns)
        for axes, (title, (distances, heads)) in zip(panels, lines.items(), strict=False):
            alike = len(heads) == 1 or np.ptp(heads, axis=0).max() < 0.05 * max(float(np.ptp(heads)), 1e-12)
            shades = [INK] if alike else colormaps["viridis"](np.linspace(0.2, 0.85, len(heads)))
            for line, shade in zip(heads, shades, strict=False):
                axes.plot(distances, line, color=shade, linewidth=1.0)
            low, high = max(float(heads.min()), LEAST), float(heads.max())
            axes.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
            axes.set_xscale("symlog", base=2, linthresh=1, linscale=0.5)
            axes.set_xlim(0, distances[-1])
            axes.set_xticks([0, 1, 4, 16, 64, 256, 1024], ["0", "1", "4", "16", "64", "256", "1k"])
            axes.minorticks_off()
            axes.tick_params(labelsize=7)
            axes.set_title(title, fontsize=8)
        for axes in panels[len(lines) :]:
            axes.set_visible(False)
        for axes in panels[max(0, len(lines) - columns) : len(lines)]:
            axes.tick_params(labelbottom=True)
        figure.supxlabel("distance, tokens", fontsize=9)
        figure.supylabel(label, fontsize=9)
    return figure
