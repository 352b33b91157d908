"""Who is told apart from whom: letters, the chain, what is open, and what to run next."""

from __future__ import annotations

import math

import numpy as np

from posbench.evaluation.protocols import VALIDATION
from posbench.reporting.chains import blockers, letters
from posbench.reporting.families import FAMILIES
from posbench.reporting.findings import Findings
from posbench.reporting.power import CAUTION, MOST_SEEDS, POWER, sd_range
from posbench.reporting.sections.section import Section
from posbench.reporting.statistics import LEVEL, Pair
from posbench.reporting.tables import DASH, Table, decimals, number, plus_minus

UNEVEN = 3.0  # times the median spread over seeds


def ranking(findings: Findings) -> Section | None:
    """Letters, the chain, and for each `~` what these seeds could have seen; or the pairs of a smaller family."""
    chain, pairs = findings.chain, findings.pairs
    if not pairs:
        return None
    by_loss = f"By loss, lowest first: {chain.text}"
    if chain.seeds < 2:
        why = "1 seed: order not tested. A paired test needs at least 2 seeds: `posbench train -m seed=0,1,2 ...`."
        return Section("Ranking", [by_loss, why], chain=chain)
    if not chain.is_tested:
        return Section("Ranking", [by_loss, *_smaller_family(findings)], [family_table(findings)], chain=chain)
    margin = pairs[0].margin
    words = [
        chain.text,
        f"{_tests(findings)} “>” stands where every scheme to its left is decided better than every scheme to its "
        f"right; “≈” where two tests, one from each side, found that the two, and all of an unbroken row of “≈”, "
        f"differ by less than {margin:g} nats/token; “~” where neither can be said, which is no evidence that they "
        "are equal. Schemes that share a letter are not told apart.",
        *_rule(findings),
        *_in_the_way(findings),
        *_uneven(findings),
    ]
    tables = []
    neighbours = zip(chain.order, chain.signs, chain.order[1:], strict=False)
    undecided = [(left, right) for left, sign, right in neighbours if sign == "~"]
    if undecided:
        by_names = {(pair.left, pair.right): pair for pair in pairs}
        tables.append(undecided_table([by_names[names] for names in undecided]))
        words += _power(pairs[0])
    words += _beside("Decided although no “>” stands between them", [_better(pair) for pair in chain.inside])
    words += _beside("Equal within the margin although no “≈” stands between them", _equal_elsewhere(findings))
    lead = ", ".join(f"{name} ({letter})" for name, letter in letters(pairs).items())
    return Section("Ranking", words, tables, chain=chain, lead=lead)


def _tests(findings: Findings) -> str:
    """Which tests, of which family, and what is promised."""
    pairs = [pair for pair in findings.pairs if pair.is_tested]
    count = f"all {len(pairs)} pairs" if findings.family == "all" else f"{FAMILIES[findings.family]} ({len(pairs)})"
    return (
        f"Paired t-tests over {findings.chain.seeds} seeds for {count}, Holm's correction: where differences between "
        f"seeds are about normal, the chance of any false “>” is about {LEVEL:.0%} at most, and as much for any false "
        "“≈”."
    )


def _rule(findings: Findings) -> list[str]:
    """What the rule `own` does, where any pair's variance was helped by the others'."""
    helped = sum(pair.spread.borrowed > 0 for pair in findings.pairs)
    if not helped:
        return []
    return [
        f"With few seeds a pair's own variance is poorly known, so it is averaged with one that was fitted to all "
        f"{len(findings.pairs)} pairs and adds at most {findings.chain.seeds - 1} degrees of freedom (limma's "
        "moderated t, Smyth 2004). A pair whose own variance is larger than the average keeps its own, and its test is "
        f"the plain one; here {helped} pairs use the average. The plain p stands beside the other in table.csv and "
        "pairs.csv. In simulations with one or two noisy schemes, or related ones, the rule told equal schemes apart "
        "in up to 8% of trials of 3 seeds and up to 7% of 5 or 8 seeds (`python -m benchmarks.calibration`)."
    ]


def _smaller_family(findings: Findings) -> list[str]:
    return [
        f"{_tests(findings)} Only these pairs were tested, so there are no letters and no chain. A family is chosen "
        "before the losses are seen: of several, the one that decides most promises nothing.",
        *_rule(findings),
        *_uneven(findings),
        *_power(findings.pairs[0]),
    ]


def _power(pair: Pair) -> list[str]:
    """How the columns about other numbers of seeds are to be read."""
    low, high = sd_range(pair.seeds)
    return [
        f"Smallest visible: the true difference that these seeds would have decided with {POWER:.0%} probability at "
        f"the corrected level of p = {pair.level:.2g}. Seeds to decide: how many would decide with that chance the "
        f"difference at the lower end of its one-sided {CAUTION:.0%} interval. The observed difference would promise "
        "too much: where a pair was picked by its place in the ranking, it is larger than the true one on average. "
        f"Seeds for “≈”: the same, with the upper end. All rest on a spread measured with {pair.seeds} seeds; the true "
        f"one is {low:.1f} to {high:.1f} times that (95%) where the pair stands by itself, so take them as orders of "
        "magnitude."
    ]


def _in_the_way(findings: Findings) -> list[str]:
    """The schemes that alone block a cut of the chain, and what the same decisions say without each."""
    chains = blockers(findings.pairs)
    if not chains and ">" not in findings.chain.signs and findings.chain.inside:
        return ["No “>” stands here, and leaving out any one scheme would change nothing about that."]
    cuts = findings.chain.signs.count(">")
    sentences = []
    for name, other in list(chains.items())[:3]:
        more = other.signs.count(">") - cuts
        sentences.append(
            f"{name} alone blocks {more} cut{'s' * (more > 1)}: without {name} the same decisions read {other.text}."
        )
    return [" ".join(sentences)] if sentences else []


def _better(pair: Pair) -> str:
    return f"{pair.left} is better than {pair.right} by {number(pair.difference, decimals(pair.interval.half_width))}"


def _equal_elsewhere(findings: Findings) -> list[str]:
    """The equivalent pairs that no row of `≈` of the chain holds."""
    order, signs = findings.chain.order, findings.chain.signs
    place = {name: n for n, name in enumerate(order)}
    return [
        f"{pair.left} and {pair.right}"
        for pair in findings.pairs
        if pair.is_equivalent and set(signs[place[pair.left] : place[pair.right]]) != {"≈"}
    ]


def _beside(what: str, pairs: list[str]) -> list[str]:
    """`what: the first six; and so many more pairs`."""
    if not pairs:
        return []
    more = f"; and {len(pairs) - 6} more pairs (pairs.csv)" if pairs[6:] else ""
    return [f"{what}: {'; '.join(pairs[:6])}{more}."]


def _uneven(findings: Findings) -> list[str]:
    """Schemes whose losses spread far more over seeds than the others' do: their tests are the least trustworthy."""
    spread = {m.scheme: float(np.std(m.losses, ddof=1)) for m in findings.at(VALIDATION.name).values()}
    usual = float(np.median(list(spread.values()))) if spread else 0.0
    far = [f"{name} ({sd / usual:.0f} times)" for name, sd in spread.items() if sd > UNEVEN * usual > 0]
    if not far:
        return []
    return [
        f"Over seeds the losses of {', '.join(far)} spread more than those of the scheme in the middle. Where some "
        "seeds fail to learn what others learn, differences are not normal, and a t-test of few seeds is wrong more "
        "often than it says."
    ]


_OPEN = [
    "difference\nnats/token",
    "p\n(Holm)",
    "p of ≈\n(Holm)",
    f"smallest visible\n({POWER:.0%} power)",
    "seeds to\ndecide it",
    "seeds\nfor ≈",
]


def _open_cells(pair: Pair) -> list[str]:
    return [
        plus_minus(pair.difference, pair.interval.half_width),
        f"{pair.p_holm:.2g}",
        f"{pair.p_equal_holm:.2g}",
        number(pair.smallest_visible, decimals(pair.smallest_visible)),
        "decided" if pair.is_decided else seeds_text(pair.seeds_to_decide),
        "equal" if pair.is_equivalent else seeds_text(pair.seeds_to_equate),
    ]


def undecided_table(pairs: list[Pair]) -> Table:
    """Neighbours around a `~`. Such a pair may itself be decided; then another pair across that place is not."""
    rows = [[f"{pair.left} ~ {pair.right}", *_open_cells(pair)] for pair in pairs]
    return Table("Where the chain says ~", ["neighbours", *_OPEN], rows)


def family_table(findings: Findings) -> Table:
    """Every pair of a smaller family, with its sign."""
    rows = [[f"{pair.left} {sign(pair)} {pair.right}", *_open_cells(pair)] for pair in findings.pairs if pair.is_tested]
    return Table(FAMILIES[findings.family].capitalize(), ["pair", *_OPEN], rows)


def sign(pair: Pair) -> str:
    """`>` (lower loss to the left), `≈`, `~`; `>` also where a decided difference is smaller than the margin."""
    return ">" if pair.is_decided else "≈" if pair.is_equivalent else "~"


def seeds_text(seeds: float) -> str:
    """`about 26`, `more than 1000`."""
    return DASH if math.isnan(seeds) else f"more than {MOST_SEEDS}" if math.isinf(seeds) else f"about {seeds:.0f}"
