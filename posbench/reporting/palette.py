"""One look a scheme, in every picture of every report: colour, line and marker follow from what the scheme is.

Colour says where position enters: in the scores (q, k), in the values (v, o), in both, as a bias, in the embeddings, or
nowhere. A line is solid where the scheme is relative, dashed where it is absolute (dash-dotted: and enters with the
embeddings), dotted where its class is not installed here. Schemes that are alike in all of this, such as two biases,
differ in colour and marker; those of `conf/scheme` keep their looks whatever stands beside them.

The colours follow Okabe and Ito (2008): schemes of `conf/scheme` that share a line style are told apart by people who
see fewer colours, on white and on dark paper.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product

from posbench.config import ConfigError, SchemeConfig

INK = "#1b1f24"  # what is neither white paper nor a colour: text, axes, schemes without position
GRID = "#d5dae0"
BLUE, SKY, GREEN = "#0072b2", "#4aa3df", "#009e73"
VERMILLION, ORANGE, BROWN, PURPLE = "#d55e00", "#d08c00", "#8a5a2b", "#b8609a"
RESCALED = (BLUE, GREEN, ORANGE, VERMILLION, PURPLE, BROWN)  # of rescalings, in the order that they were read in
SOLID, DASHED, DASHDOT, DOTTED = "-", "--", "-.", ":"
_COLOURS = (BLUE, ORANGE, GREEN, VERMILLION, PURPLE, SKY, BROWN, INK)
_MARKERS = "os^XDPv<>hdp8*H"
_MARKER = {"qk": "o", "qkvo": "s", "vo": "^", "": "X", "bias": "D", "qkv": "P", "k": "v", "q": "<", "v": ">", "o": "h"}


@dataclass(frozen=True)
class Look:
    """How a scheme is drawn."""

    colour: str
    line: str  # matplotlib's line style
    marker: str


@dataclass(frozen=True)
class Facts:
    """What a scheme is, as far as its look tells."""

    kind: str
    acts_on: frozenset[str]  # where position enters: of embed, q, k, v, o and bias
    is_relative: bool | None  # None: the class is not installed here


def facts_of(scheme: SchemeConfig) -> Facts:
    """What the class and the options of a scheme make of it, in a small decoder."""
    from posbench.schemes import Shape, build_scheme

    small = Shape(d_model=32, num_heads=4, num_kv_heads=4, head_dim=8, num_layers=8, context_length=64)
    try:
        built = build_scheme(scheme, small)
    except (ConfigError, ValueError, RuntimeError):  # of a package that is not installed here, or another version
        return Facts(scheme.kind, frozenset(), None)
    return Facts(scheme.kind, built.acts_on, built.is_relative)


def looks(schemes: Mapping[str, Facts]) -> dict[str, Look]:
    """Scheme -> its look, no two the same."""
    ours = _ours()
    others = {name: facts for name, facts in schemes.items() if ours.get(name) != facts}
    given: dict[str, Look] = {}
    for name, facts in ours.items():  # first those whose own look no other of them has yet
        if _asked(facts) not in given.values():
            given[name] = _asked(facts)
    for name, facts in ours.items():
        if name not in given:
            given[name] = _free(name, facts, given.values(), given.values())
    looks_of_ours = list(given.values())
    taken = list(looks_of_ours)
    for name, facts in sorted(others.items(), key=lambda item: (item[1].kind, item[0])):
        given[name] = _free(name, facts, taken, looks_of_ours)
        taken.append(given[name])
    return {name: given[name] for name in schemes}


def with_variants(looks: Mapping[str, Look], variants: Mapping[str, tuple[str, tuple[str, ...]]]) -> dict[str, Look]:
    """... and of rows that are a scheme under words: its colour, dotted, with a marker that the words have everywhere.

    Arguments: variants, row -> (scheme, words).
    """
    words = sorted({under for _, under in variants.values()})
    marker = {under: _MARKERS[n % len(_MARKERS)] for n, under in enumerate(words)}
    given = {row: Look(looks[scheme].colour, DOTTED, marker[under]) for row, (scheme, under) in variants.items()}
    return {**looks, **given}


@cache
def _ours() -> dict[str, Facts]:
    """The schemes of `conf/scheme`, by the order of their kinds, those under another kind of attention last.

    Those made of other schemes come in their turn.
    """
    import yaml

    from posbench.composition import conf_dir
    from posbench.schemes import SCHEMES

    files = (conf_dir() / "scheme").glob("*.yaml")
    rows = [SchemeConfig.from_mapping(yaml.safe_load(file.read_text(encoding="utf-8"))) for file in files]
    facts = {row.name: facts_of(row) for row in rows}
    known = {name: each for name, each in facts.items() if each.is_relative is not None}
    kinds = list(SCHEMES)
    attention = {row.name: bool(row.attention) for row in rows}
    return dict(sorted(known.items(), key=lambda item: (attention[item[0]], kinds.index(item[1].kind), item[0])))


def _free(name: str, facts: Facts, taken: Collection[Look], ours: Collection[Look]) -> Look:
    """The look that the facts ask for, or where that is taken or they are not known, one far from those of `ours`.

    Which one, the name says, so that it is the same in every report unless another stranger has it already.
    """
    asked, line = _asked(facts), _line(facts)
    if line != DOTTED and asked not in taken:
        return asked
    colours = Counter(look.colour for look in ours if look.line == line)
    markers = Counter(look.marker for look in ours)
    candidates = [Look(colour, line, marker) for colour, marker in product(_COLOURS, _MARKERS)]
    start = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4]) % len(candidates)
    free = [look for look in candidates[start:] + candidates[:start] if look not in taken]
    assert free, "more schemes of one line style than there are colours and markers"
    return min(free, key=lambda look: (colours[look.colour], markers[look.marker]))


def _asked(facts: Facts) -> Look:
    """The look that the facts ask for."""
    return Look(_colour(facts.acts_on), _line(facts), _marker(facts.acts_on))


def _line(facts: Facts) -> str:
    if facts.is_relative is None:
        return DOTTED
    return SOLID if facts.is_relative else DASHDOT if "embed" in facts.acts_on else DASHED


def _colour(acts_on: frozenset[str]) -> str:
    if "bias" in acts_on:
        return PURPLE
    if "embed" in acts_on:
        return ORANGE
    scores, values = acts_on & {"q", "k"}, acts_on & {"v", "o"}
    if scores and values:
        return VERMILLION
    if scores:
        return BLUE if len(scores) == 2 else SKY if "k" in scores else PURPLE
    return INK if not values else BROWN if values == {"o"} else GREEN


def _marker(acts_on: frozenset[str]) -> str:
    rotated = "".join(site for site in "qkvo" if site in acts_on)
    return _MARKER.get(next((site for site in ("bias", "embed") if site in acts_on), rotated), "d")
