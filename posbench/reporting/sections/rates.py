"""Each scheme at its own learning rate: what the pilots found, and which differences depend on the shared rate."""

from __future__ import annotations

import math

from posbench.evaluation.protocols import VALIDATION
from posbench.reporting.chains import chain
from posbench.reporting.findings import Findings
from posbench.reporting.rates import OwnRates, verdicts
from posbench.reporting.sections.section import Section
from posbench.reporting.tables import DASH, Table, gap_text, number, plus_minus


def rates(findings: Findings) -> Section | None:
    """None where nothing was tuned."""
    own = findings.rates
    if own is None:
        return None
    words = [
        f"The tables above use one learning rate for all schemes, {own.shared:g}. A scheme that needs another rate "
        "looks worse than it is."
    ]
    if own.pilots:
        words.append(
            "Pilots (`posbench tune`) are one run per rate, with a seed and on text that the tables do not use. Their "
            "differences are only meaningful where they are larger than those between seeds. “(edge)” marks a best "
            "rate that is the highest or lowest tried."
        )
    if own.pairs:
        words += _agreement(findings, own)
    else:
        words.append("There are no runs at these rates yet: `posbench tune` prints the command that trains them.")
    return Section("Each scheme at its own learning rate", words, [_table(findings, own)])


def _agreement(findings: Findings, own: OwnRates) -> list[str]:
    """The chain at own rates, and the pairs whose verdict is another than at the shared rate."""
    compared = chain(own.pairs)
    lines = [f"At own rates, by loss: {compared.text} ({compared.seeds} seed{'s' * (compared.seeds > 1)})."]
    if compared.seeds < 2 or findings.chain.seeds < 2:
        return [*lines, "With one seed nothing is tested, so a disagreement may be chance."]
    shared, ours = verdicts(findings.pairs), verdicts(own.pairs)
    both = [pair for pair in ours if pair in shared]
    others = [pair for pair in both if shared[pair] != ours[pair]]
    turned = [_names(pair) for pair in others if {shared[pair], ours[pair]} <= pair]
    count = f"Of {len(both)} pairs {len(turned)} {'is' if len(turned) == 1 else 'are'} significantly reversed"
    lines.append(f"{count}: {'; '.join(turned)}." if turned else f"{count}.")
    if others:
        differing = [f"{_names(pair)} ({shared[pair]}; {ours[pair]})" for pair in others]
        lines.append(
            "Pairs whose verdict differs (the better scheme, equal or open; first at the shared rate, then at own "
            f"rates): {', '.join(differing)}."
        )
    return lines


def _names(pair: frozenset[str]) -> str:
    return " and ".join(sorted(pair))


def _table(findings: Findings, own: OwnRates) -> Table:
    """One row a scheme, in the order of the losses at the shared rate."""
    base, shared = findings.baseline, findings.at(VALIDATION.name)
    at_own = ["own rate", "loss at\nshared", "loss at\nown", f"gap to {base}\nat shared", f"gap to {base}\nat own"]
    headers = ["scheme", *(["best rate\nof pilots", "gain over\nshared"] if own.pilots else [])]
    headers += at_own if own.pairs else []
    rows = []
    for scheme in findings.schemes:
        row = [scheme]
        if own.pilots:
            best = own.best(scheme)
            text = DASH if math.isnan(best) else f"{best:g}{' (edge)' * own.is_at_edge(scheme)}"
            row += [text, number(own.gain(scheme), 4)]
        if own.pairs:
            places = shared.get(scheme), own.measurements.get(scheme)
            row += [f"{own.rates[scheme]:g}" if places[1] else DASH]
            row += [plus_minus(m.loss.mean, m.loss.half_width) if m else DASH for m in places]
            row += [gap_text(m.gap.mean, m.gap.half_width, scheme == base) if m else DASH for m in places]
        rows.append(row)
    return Table("Loss at the shared and at own learning rates, nats/token", headers, rows)
