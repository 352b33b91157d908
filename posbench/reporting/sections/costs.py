"""What each scheme cost, beside its loss: parameters, FLOPs, speed, memory, and the gaps at equal compute."""

from __future__ import annotations

import math

from posbench.reporting.costs import Cost
from posbench.reporting.findings import Findings
from posbench.reporting.tables import Table, flops_text, gap_text, rough, whole

OTHER_SIZE = 0.005  # share of parameters from which a scheme is said to be of another size than the baseline


def cost_table(findings: Findings) -> Table:
    """One row a scheme, in the order of the losses."""
    base, equal = findings.baseline, findings.equal_compute
    headers = ["scheme", "parameters", "tokens a\nparameter", "training\nFLOPs", "speed\ntokens/s"]
    headers += ["memory\nMiB", "cache\nB a token"]
    headers += [f"gap to {base}\nat {flops_text(equal.flops)} FLOPs"] if equal else []
    rows = []
    for scheme in findings.schemes:
        cost = findings.costs[scheme]
        row = [scheme, whole(cost.parameters), rough(cost.tokens_per_parameter), flops_text(cost.training_flops)]
        row += [whole(cost.tokens_per_second)]
        row += [whole(cost.peak_memory_bytes / 2**20), _cache(cost)]
        if equal:
            gap = equal.gaps[scheme]
            estimate = "*" if equal.is_estimate(scheme, base) and not math.isnan(gap.mean) else ""
            row += [gap_text(gap.mean, gap.half_width, scheme == base) + estimate]
        rows.append(row)
    return Table("Cost", headers, rows)


def cost_words(findings: Findings) -> list[str]:
    """How the cost table is to be read."""
    tokens = {cost.tokens for cost in findings.costs.values()}
    epochs = sorted({rough(cost.epochs) for cost in findings.costs.values() if not math.isnan(cost.epochs)})
    text = f", {' or '.join(epochs)} epochs of its text" if epochs else ""
    return [
        f"Costs are those of one run of {' or '.join(whole(count) for count in sorted(tokens))} tokens{text}. FLOPs "
        "are those that the model needs by its definition, forward and backward. Rotations and biases are not counted; "
        "they show in the speed. Speed (median over seeds) and memory (mean over the runs that recorded it; on a CPU "
        "the first run of each process) depend on what else the machine was doing: `posbench bench` compares schemes "
        "properly. So schemes are not compared at equal time.",
        "Cache is what generation stores for each token, over all layers, in the number format of the run; “0 + n” "
        "means a recurrent state of n bytes at any length.",
        _parameters(findings),
        _equal_compute(findings),
    ]


def _cache(cost: Cost) -> str:
    """`1,024`, `0 + 8,704` with a state, a dash where it is not known."""
    state = f" + {whole(cost.state_bytes)}" if cost.state_bytes > 0 else ""
    return whole(cost.cache_bytes_per_token) + state


def _parameters(findings: Findings) -> str:
    """Whether the schemes are of one size, and which are not."""
    base = findings.baseline or findings.best
    one = findings.costs[base].parameters
    shares = {scheme: findings.costs[scheme].parameters / one - 1 for scheme in findings.schemes}
    others = [f"{scheme} {share:+.1%}" for scheme, share in shares.items() if abs(share) >= OTHER_SIZE]
    if not others:
        return f"All schemes have the same number of parameters as {base} to within {OTHER_SIZE:.1%}."
    return (
        f"Schemes with another number of parameters than {base}: {', '.join(others)}. Their gaps mix the effects of "
        "size and position."
    )


def _equal_compute(findings: Findings) -> str:
    """Whether the gaps at equal compute are others, and what they rest on."""
    equal, base = findings.equal_compute, findings.baseline
    if base is None:
        return "There is no baseline, so schemes are not compared at equal compute."
    if any(math.isnan(cost.training_flops) for cost in findings.costs.values()):
        return "Not every run recorded its FLOPs, so schemes are not compared at equal compute."
    if equal is None:
        return "All schemes used the same FLOPs to within 0.1%, so these gaps are also those at equal compute."
    return (
        f"At equal compute: gaps at {flops_text(equal.flops)} FLOPs, the fewest that any scheme used, paired by seed. "
        "“*” marks an estimate: one of the two trained beyond that point, so its loss there is read from its "
        "validation curve, before its learning rate had decayed. A run planned for that many FLOPs would probably "
        "have a lower loss."
    )
