"""Definitions of every scheme and kind of attention in NumPy and float64: slow, short and obviously right.

They share no line with the packages that they check and no kernel with torch. Shapes: T tokens, H heads, D = head_dim,
C = d_model, V vocabulary.
"""

from posbench.reference.decoder import logits
from posbench.reference.definition import Definition, NoDefinitionError
from posbench.reference.schemes import define, definitions

__all__ = ["Definition", "NoDefinitionError", "define", "definitions", "logits"]
