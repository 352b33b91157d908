"""Position schemes by name. This package knows tensors, not models.

A scheme of ours is registered by being here: its kind is its class's name in snake case (`TransformerXL` is
`transformer_xl`, the base class `nope`). One of your own is a class in a file, `my_scheme.py:Faded`, or in an installed
package that names it under the entry-point group `posbench.schemes`: see `docs/adding-a-scheme.md`.
"""

from __future__ import annotations

from posbench.schemes.base import Bias, Gates, Placement, Scheme, Shape
from posbench.schemes.building import SCHEMES, Layers, build_scheme, scheme_class, with_option
from posbench.schemes.rotary import Turn, rotate, turn

__all__ = [
    "SCHEMES",
    "Bias",
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
