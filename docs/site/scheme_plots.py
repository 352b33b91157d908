"""Plot what each scheme does over distance before it learns, by calling its methods in float64.

    score(d)  scaled score of a query and a key with the same content at distance d, minus the score at distance 0
    value(d)  share of a value from distance d that arrives at the query unchanged

Both are means over random contents.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from posbench.attention import Softmax
from posbench.reporting.figures import INK, WIDTH, new_figure, style
from posbench.schemes import Gates, Placement, Scheme
from posbench.schemes.earlier import EarlierRows

# The decoder for schemes without a finished run, with heads of a usual size.
MODEL = ("model.d_model=512", "model.num_heads=8", "model.num_kv_heads=8", "model.head_dim=64", "model.num_layers=4")
LONGEST = 1024  # largest distance, tokens
LEAST = -16.0  # lowest score shown; lower scores give no weight, and their range would hide the rest
SAMPLES = 256  # number of random contents
FLAT = 1e-9  # curves that change by less are not drawn
COLUMNS = 4
Curve = NDArray[np.float64]


@dataclass(frozen=True)
class Curves:
    """A scheme's effect in one layer, [heads, distances]; a curve is None if distance does not change it."""

    distances: Curve  # tokens
    score: Curve | None  # in the units of scaled scores
    value: Curve | None  # share of the value that was sent


@torch.no_grad()
def curves_of(scheme: Scheme, longest: int) -> Curves:
    """Return the curves of one layer, for a query at position `longest`; scores are relative to distance 0."""
    # `scheme` is converted in place: in float32, rounding would look like a change with distance.
    scheme = scheme.double()
    shape, length = scheme.shape, longest + 1
    H, D, C = shape.num_heads, shape.head_dim, shape.d_model
    # A fixed seed, so that the same scheme gives the same picture.
    generator = torch.Generator().manual_seed(0)
    # The same content for all heads, so that heads differ only by the scheme.
    contents = torch.randn(SAMPLES, 1, 1, D, dtype=torch.float64, generator=generator).expand(-1, H, -1, -1)
    stream = torch.randn(1, 1, C, dtype=torch.float64, generator=generator).expand(1, length, C)
    # Up to 200 distances, evenly spread on the log axis.
    shown_distances = np.unique(np.geomspace(1, longest, 200).round().astype(int))
    distances = np.concatenate(([0], shown_distances))
    keys = torch.from_numpy(longest - distances)  # positions of the keys; the query is at position `longest`
    everywhere = Placement(scheme.prepare(torch.arange(length), length), 0, 0, length)
    gates, located, _ = Softmax(shape).gates_and_positions(stream, scheme, everywhere, None)
    pos_q, pos_k = _rows(located, torch.tensor([longest])), _rows(located, keys)
    # Each row is the first of a document: hooks that look back get zeros, because curves show no effect of content.
    past = EarlierRows(torch.zeros(1, length, dtype=torch.int64))
    q = scheme.call_hook("q", contents, pos_q, past)
    k = scheme.call_hook("k", contents.expand(-1, -1, len(keys), -1), pos_k, past)
    scores = (q @ k.transpose(-2, -1)).mean(0)[:, 0] / D**0.5  # [H, distances], mean over the contents
    placement = Placement(
        _rows(everywhere.pos, torch.tensor([longest])), first_query=longest, first_key=0, length=length
    )
    window_keys = k
    # Such a bias reads the keys. `placement` says that they begin at position 0, so it gets those of all positions.
    if scheme.reads_keys:
        window_keys = scheme.call_hook("k", contents.expand(-1, -1, length, -1), located, past)
    bias_function = scheme.bias(q, window_keys, _gates_of_last(gates), placement)
    # A bias is a function of batch, head, query and key.
    if bias_function is not None:
        b, h = torch.arange(SAMPLES)[:, None, None, None], torch.arange(H)[:, None, None]
        added = bias_function(b, h, torch.tensor([[0]]), keys[None, :]).double()
        scores = scores + added.expand(SAMPLES, H, 1, -1).mean(0)[:, 0]
    # A value is sent through both hooks; what arrives is projected on what was sent.
    sent = contents.expand(-1, -1, len(keys), -1)
    arrived = scheme.call_hook("o", scheme.call_hook("v", sent, pos_k, past), pos_q, past)
    value = ((arrived * sent).sum(-1) / (sent * sent).sum(-1)).mean(0)
    return Curves(distances.astype(float), _unless_flat(scores - scores[:, :1]), _unless_flat(value))


def _rows(pos: Any, rows: Tensor) -> Any:
    # Return what a scheme prepared for the positions `rows`: a tensor with positions second to last, or a tuple.
    if isinstance(pos, tuple):
        # Named tuples take their fields as arguments, plain ones a sequence.
        parts = [_rows(part, rows) for part in pos]
        is_named = hasattr(pos, "_fields")
        return type(pos)(*parts) if is_named else tuple(parts)
    if pos.ndim < 2:
        # A vector has an entry per position; a single number holds for all tokens.
        return pos[rows] if pos.ndim else pos
    return pos[..., rows, :]


def _gates_of_last(gates: Any) -> Any:
    # Values per token: of the last query only, repeated once for each random content.
    if isinstance(gates, Gates):
        values = (gates.at_query[:, :, -1:], gates.at_key, gates.sum_at_query[:, :, -1:], gates.sum_at_key)
        return Gates(*(x.expand(SAMPLES, -1, -1, -1) for x in values))
    if isinstance(gates, tuple):
        return tuple(map(_gates_of_last, gates))
    return None


def _unless_flat(curve: Tensor) -> Curve | None:
    array: Curve = curve.numpy()
    return None if np.ptp(array, axis=1).max() < FLAT else array


def grid(lines: dict[str, tuple[Curve, Curve]], label: str) -> Figure:
    """Draw a panel per title and a line per head, from dark to pale; one line if all heads agree.

    Arguments: lines, {title, such as a scheme's name: (distances, curves [heads, distances])}; label, of the y axis.
    """
    columns = min(COLUMNS, len(lines))
    rows = -(-len(lines) // columns)
    with style():
        row_height = 1.35 if rows > 1 else 2.0
        figure, panels = new_figure(0.5 + row_height * rows, rows, WIDTH * columns / COLUMNS, ncols=columns)
        for axes, (title, (distances, heads)) in zip(panels, lines.items(), strict=False):
            # Heads agree if they differ by less than 5 % of the curve's range.
            is_one_line = len(heads) == 1 or np.ptp(heads, axis=0).max() < 0.05 * max(float(np.ptp(heads)), 1e-12)
            shades: Any = [INK]
            if not is_one_line:
                shades = colormaps["viridis"](np.linspace(0.2, 0.85, len(heads)))
            for line, shade in zip(heads, shades, strict=False):
                axes.plot(distances, line, color=shade, linewidth=1.0)
            lowest, highest = max(float(heads.min()), LEAST), float(heads.max())
            axes.set_ylim(lowest - 0.05 * (highest - lowest), highest + 0.05 * (highest - lowest))
            axes.set_xscale("symlog", base=2, linthresh=1, linscale=0.5)
            axes.set_xlim(0, distances[-1])
            axes.set_xticks([0, 1, 4, 16, 64, 256, 1024], ["0", "1", "4", "16", "64", "256", "1k"])
            axes.minorticks_off()
            axes.tick_params(labelsize=7)
            axes.set_title(title, fontsize=8)
        # The last row may be incomplete: hide its empty panels, and label the lowest one of each column.
        for axes in panels[len(lines) :]:
            axes.set_visible(False)
        for axes in panels[max(0, len(lines) - columns) : len(lines)]:
            axes.tick_params(labelbottom=True)
        figure.supxlabel("distance, tokens", fontsize=9)
        figure.supylabel(label, fontsize=9)
    return figure
