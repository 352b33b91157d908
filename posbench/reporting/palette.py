"""One look a scheme, in every picture of every report.

The colours follow Okabe and Ito (2008): schemes that share a line style are told apart by people who see fewer colours,
on white and on dark paper, and every scheme has a marker of its own. Solid lines are relative schemes, dashed ones
absolute (dash-dotted: not by rotation). Schemes that are not listed are dotted, in the order of their names.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

INK = "#1b1f24"  # what is neither white paper nor a colour: text, axes, nope
GRID = "#d5dae0"
BLUE, SKY, GREEN = "#0072b2", "#4aa3df", "#009e73"
VERMILLION, ORANGE, BROWN, PURPLE = "#d55e00", "#d08c00", "#8a5a2b", "#b8609a"


@dataclass(frozen=True)
class Look:
    """How a scheme is drawn."""

    colour: str
    line: str  # matplotlib's line style
    marker: str


SOLID, DASHED, DASHDOT, DOTTED = "-", "--", "-.", ":"
_LOOKS = {
    "qk_rope": Look(BLUE, SOLID, "o"),
    "qkvo_rope": Look(VERMILLION, SOLID, "s"),
    "vo_rope": Look(GREEN, SOLID, "^"),
    "nope": Look(INK, SOLID, "X"),
    "alibi": Look(PURPLE, SOLID, "D"),
    "qkv_rope": Look(VERMILLION, DASHED, "P"),
    "k_rope": Look(SKY, DASHED, "v"),
    "q_rope": Look(PURPLE, DASHED, "<"),
    "v_rope": Look(GREEN, DASHED, ">"),
    "o_rope": Look(BROWN, DASHED, "h"),
    "sinusoidal": Look(ORANGE, DASHDOT, "d"),
}
_COLOURS, _MARKERS = (BLUE, ORANGE, GREEN, VERMILLION, PURPLE, SKY, INK), "os^Dv"
_SPARE = [Look(_COLOURS[n % 7], DOTTED, _MARKERS[n % 5]) for n in range(35)]


def looks(schemes: Iterable[str]) -> dict[str, Look]:
    """Scheme -> its look."""
    names = sorted(set(schemes))
    strangers = [name for name in names if name not in _LOOKS]
    return {name: _LOOKS[name] if name in _LOOKS else _SPARE[strangers.index(name) % len(_SPARE)] for name in names}
