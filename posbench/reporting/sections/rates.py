"""Each scheme at its own learning rate: what the pilots found, and which differences hang on the shared rate."""

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
        f"The tables above are at one learning rate for all, {own.shared:g}. A scheme that this rate suits less looks "
        "worse than it is."
    ]
    if own.pilots:
        words.append(
            "Pilots (`posbench tune`) are one run a rate, with a seed and on text that are not scored: a difference as "
            "small as those between seeds says nothing. “(edge)” marks a best rate beyond which none was tried."
        )
    if own.pairs:
        words += _agreement(findings, own)
    else:
        words.append("No runs at these rates are here: `posbench tune` prints the command that trains them.")
    return Section("Each scheme at its own learning rate", words, [_table(findings, own)])


def _agreement(findings: Findings, own: OwnRates) -> list[str]:
    """The chain at own rates, and the pairs that are decided otherwise than at the shared rate."""
    compared = chain(own.pairs)
    lines = [f"At own rates, by loss: {compared.text} ({compared.seeds} seed{'s' * (compared.seeds > 1)})."]
    if compared.seeds < 2 or findings.chain.seeds < 2:
        return [*lines, "With one seed nothing is decided, so disagreement cannot be told from chance."]
    shared, ours = verdicts(findings.pairs), verdicts(own.pairs)
    both = [pair for pair in ours if pair in shared]
    others = [pair for pair in both if shared[pair] != ours[pair]]
    turned = [_names(pair) for pair in others if {shared[pair], ours[pair]} <= pair]
    count = f"Of {len(both)} pairs {len(turned)} {'is' if len(turned) == 1 else 'are'} decided the other way round"
    lines.append(f"{count}: {'; '.join(turned)}." if turned else f"{count}.")
    if others:
        differing = [f"{_names(pair)} ({shared[pair]}; {ours[pair]})" for pair in others]
        lines.append(
            "Pairs with another verdict (the better scheme, equal, or open: at the shared rate; at own rates): "
            f"{', '.join(differing)}."
        )
    return lines


def _names(pair: frozenset[str]) -> str:
    return " and ".join(sorted(pair))


def _table(findings: Findings, own: OwnRates) -> Table:
    """One row a scheme, in the order of the losses at the shared rate."""
    base, shared = findings.baseline, findings.at(VALIDATION.name)
    at_own = ["own rate", "loss at\nshared", "loss at\nown", f"gap to {base}\nat shared", f"gap to {base}\nat own"]
    headers = ["scheme", *(["best rate\nof pilots", "better than\nshared by"] if own.pilots else [])]
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
    return Table("At the shared learning rate and at own ones, nats/token", headers, rows)
