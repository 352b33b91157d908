"""Show the rotations that a model uses: base, rescaling, factor, frequencies of the fastest and slowest pair."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from rich.console import Console

from posbench.config.units import short_length
from posbench.schemes import Layers
from posbench.schemes.rotary import Rotary
from posbench.system.console import plain_table


def show_rotations(models: Mapping[str, Layers], length: int, console: Console) -> None:
    """Print a table of the rotation frequencies in inputs of `length` tokens, a row for each rotation of a model."""
    table = plain_table(f"in use at {short_length(length)} tokens", "base", "rescale", "factor", "first", "last")
    for heading, layers in models.items():
        rotations = list(_rotations(layers, length))
        # A model without rotations has one empty row.
        for columns in rotations or [()]:
            table.add_row(heading, *columns)
    console.print(table)
    console.out("first, last: frequencies of the fastest and the slowest channel pair, radians per token")


def has_rotations(layers: Layers) -> bool:
    """Return whether any layer rotates by frequencies."""
    return any(isinstance(part, Rotary) for part in layers.modules())


def is_rescaled(layers: Layers) -> bool:
    """Return whether the frequencies of any layer's rotation are rescaled."""
    return any(isinstance(part, Rotary) and part.rescaling is not None for part in layers.modules())


def _rotations(layers: Layers, length: int) -> Iterator[tuple[str, ...]]:
    for rotary in layers.modules():
        if not isinstance(rotary, Rotary):
            continue
        method, factor = "none", 1.0
        if rotary.rescaling:
            method = rotary.rescaling.name
            factor = rotary.rescaling.factor_at(length)
        # Learned frequencies are on the model's device.
        device = next((parameter.device for parameter in rotary.parameters()), None)
        with torch.no_grad():
            frequencies = rotary.angles(torch.ones(1, device=device), length)[0]  # angles at position 1
        yield f"{rotary.base:g}", method, f"{factor:g}", f"{frequencies[0]:.3g}", f"{frequencies[-1]:.3g}"
