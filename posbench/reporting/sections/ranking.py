"""Which differences are significant: letters, the chain, and what the open pairs would take."""

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
        why = "1 seed: the order was not tested. A paired test needs 2 seeds: `posbench train -m seed=0,1,2 ...`."
        return Section("Ranking", [by_loss, why], chain=chain)
    if not chain.is_tested:
        return Section("Ranking", [by_loss, *_smaller_family(findings)], [family_table(findings)], chain=chain)
    margin = pairs[0].margin
    words = [
        chain.text,
        f"{_tests(findings)} “>” means that every scheme to its left is significantly better than every scheme to its "
        f"right. “≈” means that the two, and all schemes joined by “≈” without a break, differ by less than {margin:g} "
        "nats/token (two one-sided tests). “~” means not significant; it does not mean equal. Schemes that share a "
        "letter do not differ significantly.",
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
    words += _beside("Significant pairs that the chain does not show", [_better(pair) for pair in chain.inside])
    words += _beside("Pairs equal within the margin that the chain does not show", _equal_elsewhere(findings))
    lead = ", ".join(f"{name} ({letter})" for name, letter in letters(pairs).items())
    return Section("Ranking", words, tables, chain=chain, lead=lead)


def _tests(findings: Findings) -> str:
    """Which tests, of which family, and what is promised."""
    pairs = [pair for pair in findings.pairs if pair.is_tested]
    count = f"all {len(pairs)} pairs" if len(pairs) > 1 else "the only pair"
    if findings.family != "all":
        count = f"{FAMILIES[findings.family]} ({len(pairs)})"
    return (
        f"Paired t-tests over {findings.chain.seeds} seeds for {count}, with Holm's correction. If the differences "
        f"between seeds are roughly normal, the chance of any false “>” is at most about {LEVEL:.0%}, and the same "
        "holds for any false “≈”."
    )


def _rule(findings: Findings) -> list[str]:
    """What the rule `own` does, where any pair's variance was helped by the others'."""
    helped = sum(pair.spread.borrowed > 0 for pair in findings.pairs)
    if not helped:
        return []
    return [
        f"A few seeds estimate the variance of a pair poorly. It is therefore averaged with a variance fitted to all "
        f"{len(findings.pairs)} pairs, which adds at most {findings.chain.seeds - 1} degrees of freedom (limma's "
        "moderated t, Smyth 2004). A pair with a larger variance than the average keeps its own and has the plain "
        f"test; {helped} pairs use the average here. table.csv and pairs.csv hold the plain p as well. In simulations "
        "with one or two noisy schemes, or related ones, this rule found a difference between equal schemes in up to "
        "8% of trials with 3 seeds and up to 7% with 5 or 8 seeds (`python -m benchmarks.calibration`)."
    ]


def _smaller_family(findings: Findings) -> list[str]:
    return [
        f"{_tests(findings)} Only these pairs were tested, so there are no letters and no chain. Choose the family "
        "before you see the losses: the error rate does not hold if you try several and keep the best.",
        *_rule(findings),
        *_uneven(findings),
        *_power(findings.pairs[0]),
    ]


def _power(pair: Pair) -> list[str]:
    """How the columns about other numbers of seeds are to be read."""
    low, high = sd_range(pair.seeds)
    return [
        f"Smallest detectable: the true difference that these seeds would find significant with {POWER:.0%} "
        f"probability at the corrected level of p = {pair.level:.2g}. Seeds needed for “>”: how many would find, with "
        f"that probability, a difference as small as the lower end of the one-sided {CAUTION:.0%} interval. The "
        "observed difference would be too optimistic: that of a pair picked by its rank is larger than the true one on "
        f"average. Seeds needed for “≈”: the same with the upper end. All of them use a spread measured over "
        f"{pair.seeds} seeds; the true one is {low:.1f} to {high:.1f} times as large (95%, for a single pair), so they "
        "are orders of magnitude."
    ]


def _in_the_way(findings: Findings) -> list[str]:
    """The schemes that alone prevent a `>` in the chain, and the chain of the same tests without each."""
    chains = blockers(findings.pairs)
    if not chains and ">" not in findings.chain.signs and findings.chain.inside:
        return ["The chain has no “>”, and it would have none if any one scheme were left out."]
    cuts = findings.chain.signs.count(">")
    sentences = []
    for name, other in list(chains.items())[:3]:
        more = other.signs.count(">") - cuts
        sentences.append(f"{name} alone prevents {more} “>”: without {name} the same tests give {other.text}.")
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
        f"The losses of {', '.join(far)} vary more over seeds than those of the median scheme. Where some seeds fail "
        "to learn what others learn, differences are not normal, and a t-test over few seeds is wrong more often than "
        "its level says."
    ]


_OPEN = [
    "difference\nnats/token",
    "p\n(Holm)",
    "p of ≈\n(Holm)",
    f"smallest detectable\n({POWER:.0%} power)",
    "seeds needed\nfor >",
    "seeds needed\nfor ≈",
]


def _open_cells(pair: Pair) -> list[str]:
    return [
        plus_minus(pair.difference, pair.interval.half_width),
        f"{pair.p_holm:.2g}",
        f"{pair.p_equal_holm:.2g}",
        number(pair.smallest_visible, decimals(pair.smallest_visible)),
        "significant" if pair.is_decided else seeds_text(pair.seeds_to_decide),
        "equal" if pair.is_equivalent else seeds_text(pair.seeds_to_equate),
    ]


def undecided_table(pairs: list[Pair]) -> Table:
    """Neighbours around a `~`. The two may differ significantly; then another pair across that place does not."""
    rows = [[f"{pair.left} ~ {pair.right}", *_open_cells(pair)] for pair in pairs]
    return Table("Neighbours that do not differ significantly", ["neighbours", *_OPEN], rows)


def family_table(findings: Findings) -> Table:
    """Every pair of a smaller family, with its sign."""
    rows = [[f"{pair.left} {sign(pair)} {pair.right}", *_open_cells(pair)] for pair in findings.pairs if pair.is_tested]
    return Table(FAMILIES[findings.family].capitalize(), ["pair", *_OPEN], rows)


def sign(pair: Pair) -> str:
    """`>` (lower loss to the left), `≈`, `~`; `>` also where a significant difference is smaller than the margin."""
    return ">" if pair.is_decided else "≈" if pair.is_equivalent else "~"


def seeds_text(seeds: float) -> str:
    """`about 26`, `more than 1000`."""
    return DASH if math.isnan(seeds) else f"more than {MOST_SEEDS}" if math.isinf(seeds) else f"about {seeds:.0f}"
