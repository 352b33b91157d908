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
        f"Cost is that of one run of {' or '.join(whole(count) for count in sorted(tokens))} tokens{text}. FLOPs are "
        "those that the model's definition needs, forward and backward; what a scheme itself computes (rotations, "
        "biases) is not counted and shows in the speed. Speed (median over seeds) and memory (mean of the runs that "
        "recorded it: on a CPU the first of each process) are of the machine as it was, not of the scheme alone: "
        "`posbench bench` compares them. So schemes are not compared at equal time.",
        "Cache is what the model keeps of each token of a text that it reads token by token, all layers together, in "
        "the number format of its run; “0 + n” is a recurrent state of n bytes at any length.",
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
        return f"All schemes have as many parameters as {base}, to within {OTHER_SIZE:.1%}."
    return (
        f"Not all schemes have as many parameters as {base}: {', '.join(others)}. Their gaps are of size and position "
        "together."
    )


def _equal_compute(findings: Findings) -> str:
    """Whether the gaps at equal compute are others, and what they rest on."""
    equal, base = findings.equal_compute, findings.baseline
    if base is None:
        return "Without a baseline, schemes are not compared at equal compute."
    if any(math.isnan(cost.training_flops) for cost in findings.costs.values()):
        return "Not every run recorded its FLOPs, so schemes are not compared at equal compute."
    if equal is None:
        return "All schemes took the same FLOPs to within 0.1%, so the gaps are also those at equal compute."
    return (
        f"At equal compute: gaps at {flops_text(equal.flops)} FLOPs, the fewest that any scheme took, paired by seed. "
        "“*” marks an estimate: one of the two trained on beyond that point, so its loss there is read from its "
        "validation curve, and its learning rate was not at its end. Trained for that many FLOPs from the start it "
        "would probably be lower."
    )
