"""Show what protocols measured: `sections` in the module here that has a protocol's name, or perplexity by length."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from posbench.analysis.comparison import Comparison
from posbench.config.units import short_length
from posbench.evaluation.protocols import PROTOCOLS, EvalProtocol
from posbench.reporting.protocols import by_length
from posbench.reporting.section import Format, Section, half, in_order, pivot


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
            sections += protocol.sections(c) or _metrics(protocol, c)
    return sorted(sections, key=lambda section: section.after_protocols)  # stable: otherwise in the protocols' order


def module_of(protocol: str) -> ModuleType | None:
    """Return the module here that shows the results of the protocol of this name, or None."""
    name = f"{__name__}.{protocol}"
    return import_module(name) if find_spec(name) else None


def _metrics(protocol: EvalProtocol, c: Comparison) -> list[Section]:
    # Return a table of each metric by length, for a protocol that shows no sections of its own.
    cells = c.at(protocol.name, last=0)
    sections = []
    for metric, of_metric in cells.groupby("metric", sort=False):
        shown = in_order(of_metric, c.schemes).assign(half=half(of_metric, "value"))
        titles = {length: short_length(length) for length in sorted(set(of_metric["length"]))}
        table = pivot(shown, titles, "length", format=Format(half="half"))
        sections.append(Section(f"{protocol.name}: {metric}", table=table, note="Mean over seeds, by length."))
    return sections
