"""What another length changes: the loss there less that at the training length, paired by seed and by document."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from posbench.evaluation.documents import Floats, document_error
from posbench.reporting.measure import Measurement, by_document
from posbench.reporting.statistics import Interval, t_interval


def with_changes(measurements: list[Measurement], training_length: int) -> list[Measurement]:
    """The measurements, each with its change against the training length where its scheme has a result there."""
    there = {(m.scheme, m.protocol): m for m in measurements if m.length == training_length}
    return [with_change(m, there.get((m.scheme, m.protocol))) for m in measurements]


def with_change(m: Measurement, at: Measurement | None) -> Measurement:
    """`m` with the change from `at`, over the seeds that both have.

    Where both scored the same targets (`fixed` always, other protocols at lengths that divide the longest) a document's
    change is of the same tokens. Elsewhere it is the difference of two token-weighted means with their documents in
    common, and its doubt that of the difference, to first order.
    """
    seeds = sorted(set(m.seeds) & set(at.seeds)) if at else []
    if at is None or not seeds:
        return m
    if m is at:
        return replace(m, change=Interval(0.0, 0.0, 0.0), change_documents=0.0)
    pairs = [(m.results[m.seeds.index(seed)], at.results[at.seeds.index(seed)]) for seed in seeds]
    documents = sorted(set(pairs[0][0].windows["document"]) | set(pairs[0][1].windows["document"]))
    nll, targets, nll_before, targets_before = (
        np.mean([by_document(pair[side], column, documents) for pair in pairs], axis=0)
        for side in (0, 1)
        for column in ("nll", "targets")
    )
    change = t_interval(np.array([here.loss - before.loss for here, before in pairs]))
    apart = _around_mean(nll, targets) - _around_mean(nll_before, targets_before)
    targets = (targets + targets_before) / 2
    return replace(m, change=change, change_documents=float(document_error((apart * targets.sum())[None], targets)[0]))


def _around_mean(nll: Floats, targets: Floats) -> Floats:
    """What each document adds to the distance of a token-weighted mean from where it stands, nats/token."""
    return (nll - nll.sum() / targets.sum() * targets) / targets.sum()
