"""Show what protocols measured: `sections` in the module here that has a protocol's name, or perplexity by length."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from posbench.analysis.comparison import Comparison
from posbench.evaluation.protocols import PROTOCOLS
from posbench.reporting.protocols import by_length
from posbench.reporting.section import Section


def sections_of_protocols(c: Comparison, every_length: bool) -> list[Section]:
    """Return the sections about the results of all protocols, in their order.

    Arguments: every_length, whether to show lengths that are neither a multiple nor a part of the training length.
    """
    sections: list[Section] = []
    for protocol in PROTOCOLS.values():
        if module := module_of(protocol.name):
            sections += module.sections(c)
        elif protocol.is_by_length:
            sections += by_length.sections(protocol, c, every_length)
        else:
            sections += protocol.sections(c)
    return sorted(sections, key=lambda section: section.after_protocols)  # stable: otherwise in the protocols' order


def module_of(protocol: str) -> ModuleType | None:
    """Return the module here that shows the results of the protocol of this name, or None."""
    name = f"{__name__}.{protocol}"
    return import_module(name) if find_spec(name) else None
