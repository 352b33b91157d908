"""Publish what each position convention does to small inputs, in float64, so that ports can test themselves."""

from posbench.tools.vectors.checking import check
from posbench.tools.vectors.publishing import Sizes, positions_named, write

__all__ = ["Sizes", "check", "positions_named", "write"]
