"""Which pairs are corrected together: fixed before the losses are seen, by a word of `posbench report --family`."""

from __future__ import annotations

import re
from itertools import combinations, pairwise

from posbench.config import ConfigError, nearest
from posbench.reporting.published import Published

FAMILIES = {
    "all": "all pairs",
    "baseline": "the pairs with the baseline",
    "published": "the links of the published chain",
}


def check_family(word: str) -> None:
    """Raises: ConfigError for a word that is not a family."""
    if word not in FAMILIES:
        raise ConfigError(f"--family {word!r} is not known{nearest(word, FAMILIES)} (known: {', '.join(FAMILIES)})")


def family_of(
    word: str, schemes: list[str], baseline: str | None, published: Published | None
) -> frozenset[frozenset[str]]:
    """The pairs of a family among our schemes. Raises: ConfigError where there are none."""
    check_family(word)
    if word == "all":
        return frozenset(map(frozenset, combinations(schemes, 2)))
    if word == "baseline":
        if baseline is None:
            raise ConfigError("--family baseline needs a baseline that has runs: name one with --baseline")
        return frozenset(frozenset((baseline, scheme)) for scheme in schemes if scheme != baseline)
    if published is None:
        raise ConfigError("--family published needs published results: name them with --against, such as kexue-10862")
    links = published_links(published, schemes)
    if not links:
        raise ConfigError(f"--family published: fewer than two schemes of {published.name} have runs here")
    return frozenset(frozenset((better, worse)) for better, _, worse in links)


def published_links(published: Published, schemes: list[str]) -> list[tuple[str, str, str]]:
    """Neighbours of the published chain among our schemes, with the sign between them: (better, ">", worse).

    Where a scheme of theirs is not among ours its neighbours are linked, by ">" if one stands between them. Without a
    published chain the order of the first column is taken, with "," between them.
    """
    if published.chain:
        words = re.split(r"\s+([~>/])\s+", published.chain)
        names, signs = words[::2], words[1::2]
    else:
        losses = published.measurements[0].losses
        names = sorted(losses, key=lambda name: losses[name])
        signs = [","] * (len(names) - 1)
    places = [place for place, name in enumerate(names) if name in schemes]
    return [
        (names[here], ">" if ">" in signs[here:there] else signs[here], names[there])
        for here, there in pairwise(places)
    ]
