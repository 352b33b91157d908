"""Position schemes by name. This package knows tensors, not models.

A class registered here is named in snake case (`TransformerXL` is `transformer_xl`; the base class is `nope`). Your own
is a class in a file, `my_scheme.py:Faded`, or a package's entry point in `posbench.schemes` (docs/adding-a-scheme.md).
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
