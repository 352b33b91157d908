"""Position schemes by name. This package knows tensors, not models.

Every scheme class here is registered by its class name in snake case (`TransformerXL` is `transformer_xl`; the base
class is `nope`). Your own is a class in a file, `my_scheme.py:Faded`, or an installed package's entry point in
`posbench.schemes`. See `docs/adding-a-scheme.md`.
"""

from __future__ import annotations

from posbench.schemes.base import Bias, Gates, Placement, Scheme, Shape
from posbench.schemes.building import SCHEMES, Layers, build_scheme, scheme_class, with_option
from posbench.schemes.earlier import Earlier
from posbench.schemes.rotary import Turn, rotate, turn

__all__ = [
    "SCHEMES",
    "Bias",
    "Earlier",
    "Gates",
    "Layers",
    "Placement",
    "Scheme",
    "Shape",
    "Turn",
    "build_scheme",
    "rotate",
    "scheme_class",
    "turn",
    "with_option",
]
