"""Show the rotations that a model uses: base, rescaling, factor, frequencies of the fastest and slowest pair."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from rich.console import Console
from torch import Tensor

from posbench.config.units import short_length
from posbench.schemes import Layers
from posbench.schemes.rotary import Rotary
from posbench.system.console import plain_table


@dataclass(frozen=True)
class Rotation:
    """The rotation of one type of layer: its settings in words, and its frequencies in radians per token."""

    layer_type: str  # empty if all layers share it
    base: float
    method: str  # `none`, a rescaling of posbench, or a `rope_type` of transformers
    factor: float
    frequencies: Tensor  # [channel pairs], the fastest first


def show_rotations(rotations: Iterable[tuple[str, Rotation]], length: int, console: Console) -> None:
    """Print a table of rotations in inputs of `length` tokens, each with a heading."""
    table = plain_table(f"in use at {short_length(length)} tokens", "base", "rescale", "factor", "first", "last")
    for heading, rotation in rotations:
        name = f"{heading} ({rotation.layer_type})" if rotation.layer_type else heading
        ends = [f"{rotation.frequencies[n]:.3g}" for n in (0, -1)]
        table.add_row(name, f"{rotation.base:g}", rotation.method, f"{rotation.factor:g}", *ends)
    if table.rows:
        console.print(table)
        console.out("first, last: frequencies of the fastest and the slowest channel pair, radians per token")


def is_rescaled(layers: Layers) -> bool:
    """Return whether the frequencies of any layer's rotation are rescaled."""
    return any(isinstance(part, Rotary) and part.rescaling is not None for part in layers.modules())


def rotations_of(layers: Layers, length: int) -> Iterator[Rotation]:
    """Yield the rotations of a model's layers, as they are in inputs of `length` tokens."""
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
        yield Rotation("", rotary.base, method, factor, frequencies)
