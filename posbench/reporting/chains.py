"""The ranking in one line and in letters: what the decided pairs allow one to say of all schemes."""

from __future__ import annotations

from dataclasses import dataclass

from posbench.reporting.statistics import Pair


@dataclass(frozen=True)
class Chain:
    """The ranking in one line, `a ~ b > c`, better to the left.

    The rule. Schemes stand in the order of their mean loss. Between two neighbours stands `>` if and only if EVERY
    scheme to the left of that place is decided better than EVERY scheme to the right of it (tests over seeds, Holm over
    all pairs). Elsewhere stands `≈` if the two, and all pairs of the unbroken row of `≈` that it continues, were found
    to differ by less than the margin; otherwise `~`. So whatever a reader takes out of a `>` or a row of `≈`, at any
    distance, is a rejected hypothesis: the chance that a chain holds any false `>` is at most LEVEL, and as much for
    any false `≈`. Pairwise decisions need not be transitive (a ~ b, b ~ c, yet a > c; no way of writing groups would
    say that without a false `b > c` or `a > b`): a `~` says only that the chain cannot be cut there, and pairs that
    are decided although no `>` stands between them are listed beside it, in `inside`. Where not every pair was tested
    (one seed, a smaller family) the order is given with commas.
    """

    order: list[str]
    signs: list[str]  # between neighbours: ">", "≈" or "~"; "," where not all pairs were tested
    inside: list[Pair]  # decided pairs with no ">" between them
    seeds: int

    @property
    def is_tested(self) -> bool:
        return self.seeds > 1 and "," not in self.signs

    @property
    def text(self) -> str:
        """`a ~ b > c`, or `a, b, c` where nothing was tested."""
        words = [self.order[0]] if self.order else []
        for sign, name in zip(self.signs, self.order[1:], strict=True):
            words += [sign, name]
        return " ".join(words).replace(" ,", ",")

    def groups(self) -> list[list[str]]:
        """The schemes between the `>` signs."""
        groups = [[self.order[0]]] if self.order else []
        for sign, name in zip(self.signs, self.order[1:], strict=True):
            if sign == ">":
                groups.append([])
            groups[-1].append(name)
        return groups


def chain(pairs: list[Pair]) -> Chain:
    """The chain of all pairs of a set of schemes, by the rule of `Chain`."""
    order = _order(pairs)
    seeds = pairs[0].seeds if pairs else 0
    if not all(pair.is_tested for pair in pairs):
        return Chain(order, [","] * (len(order) - 1), [], seeds)
    decided = {(pair.left, pair.right) for pair in pairs if pair.is_decided}
    equal = {(pair.left, pair.right) for pair in pairs if pair.is_equivalent}
    signs: list[str] = []
    row = order[:1]  # the unbroken row of `≈` that ends here
    for cut, name in enumerate(order[1:], 1):
        if all((a, b) in decided for a in order[:cut] for b in order[cut:]):
            signs.append(">")
        else:
            signs.append("≈" if all((other, name) in equal for other in row) else "~")
        row = [*row, name] if signs[-1] == "≈" else [name]
    place = {name: n for n, name in enumerate(order)}
    inside = [p for p in pairs if p.is_decided and ">" not in signs[place[p.left] : place[p.right]]]
    return Chain(order, signs, inside, seeds)


def chain_without(pairs: list[Pair], name: str) -> Chain:
    """The chain of the other schemes, by the same decisions."""
    return chain([pair for pair in pairs if name not in (pair.left, pair.right)])


def blockers(pairs: list[Pair]) -> dict[str, Chain]:
    """Each scheme without which the same decisions would cut the chain at more places -> that chain; most cuts first.

    All that it says are decided pairs of the whole family, so it needs no correction of its own.
    """
    cuts = chain(pairs).signs.count(">")
    others = {name: chain_without(pairs, name) for name in _order(pairs)}
    more = {name: other for name, other in others.items() if other.signs.count(">") > cuts}
    return dict(sorted(more.items(), key=lambda item: -item[1].signs.count(">")))


def _order(pairs: list[Pair]) -> list[str]:
    """Best first: `compare_all` lists the pairs of the best scheme first, then those of the second without it, ..."""
    return list(dict.fromkeys(p.left for p in pairs)) + ([pairs[-1].right] if pairs else [])


def letters(pairs: list[Pair]) -> dict[str, str]:
    """Letters to each scheme, such as `a`, `ab`: two schemes share one if and only if their pair is not decided.

    The compact letter display of Piepho (2004) by insertion and absorption: it holds every pairwise decision, also
    where they are not transitive and the chain has to say `~`. Letters begin at the best scheme.
    """
    order = _order(pairs)
    groups = [frozenset(order)]
    for pair in pairs:
        if pair.is_decided:
            split = {g - {one} for g in groups if {pair.left, pair.right} <= g for one in (pair.left, pair.right)}
            whole = [g for g in groups if not {pair.left, pair.right} <= g]
            groups = whole + [g for g in split if not any(g <= other for other in whole)]
    place = {name: n for n, name in enumerate(order)}
    groups.sort(key=lambda group: sorted(place[name] for name in group))
    return {name: "".join(_letter(n) for n, group in enumerate(groups) if name in group) for name in order}


def _letter(number: int) -> str:
    return chr(ord("a") + number) if number < 26 else f"({number + 1})"
