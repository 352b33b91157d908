"""What a report says and in which order: findings as sections of sentences, tables and pictures."""

from collections.abc import Iterable

from posbench.reporting.findings import Findings
from posbench.reporting.sections import (
    against,
    lengths,
    losses,
    next_runs,
    order,
    position,
    provenance,
    ranking,
    rates,
    sources,
    texts,
    training,
)
from posbench.reporting.sections.section import Section

__all__ = ["Section", "sections"]


def sections(findings: Findings, pictures: Iterable[str]) -> list[Section]:
    """All sections that have something to say. `pictures` names the figures that were drawn."""
    drawn = list(pictures)
    made = [
        losses.losses(findings, drawn),
        ranking.ranking(findings),
        *(against.against(findings, comparison) for comparison in findings.against),
        rates.rates(findings),
        training.training(findings, drawn),
        *lengths.extrapolation(findings, drawn),
        order.order(findings, drawn),
        position.position(findings, drawn),
        lengths.retrieval(findings, drawn),
        *texts.other_texts(findings),
        provenance.setup(findings),
        provenance.fingerprints(findings),
        provenance.left_out(findings),
        next_runs.next_runs(findings),
        sources.sources(findings),
    ]
    return [section for section in made if section is not None]
