"""The publications of a report's schemes, of the published numbers, and of the experiment."""

from __future__ import annotations

from posbench.composition import description
from posbench.reporting.findings import Findings
from posbench.reporting.sections.section import Section
from posbench.reporting.tables import Table

_OWN = "not in conf/scheme: your own scheme or variant"


def sources(findings: Findings) -> Section:
    """One row a source: of each scheme, of published results, of the experiment, and of posbench."""
    from posbench.version import __version__

    experiment = findings.config.experiment
    rows = [[scheme, description("scheme", scheme) or _OWN] for scheme in findings.schemes]
    if experiment.source:
        rows.append([f"experiment {experiment.name}", experiment.source])
    published = {comparison.published.name: comparison.published for comparison in findings.against}
    rows += [[f"published results {each.name}", f"{each.title}, {each.source}"] for each in published.values()]
    rows.append(["this report", f"posbench {__version__} (CITATION.cff)"])
    return Section(
        "Sources", tables=[Table("Sources", ["of", "source"], rows, left=frozenset({0, 1}))], on_terminal=False
    )
