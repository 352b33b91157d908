"""Publish what each position convention does to small inputs, in float64, so that ports can test themselves.

conventions   what an entry computes, from the definitions in `posbench.reference`, and what ports get wrong in it
entries       the entries and the known mistakes
publishing    one safetensors file of values, and one JSON file that says what they are
checking      compare a port's values with ours, and name its mistake
"""

from posbench.tools.vectors.checking import check
from posbench.tools.vectors.publishing import Sizes, positions_named, write

__all__ = ["Sizes", "check", "positions_named", "write"]
