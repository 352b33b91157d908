"""Frequencies at evaluation, one by one."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor, log, pi


def rescaled(frequencies: Sequence[float], name: str, s: float, base: float, L: int) -> list[float]:
    """The frequencies of pairs t = 0 .. r/2 - 1 after a rescaling by the factor `s`; L tokens are the training length.

    pi arXiv 2306.15595; ntk bloc97 2023; yarn arXiv 2309.00071, and as its authors' code has it (yarn_code).
    """
    r = 2 * len(frequencies)
    after = []
    for t, w in enumerate(frequencies):
        if name == "pi":
            after.append(w / s)
        elif name in ("ntk", "dynamic_ntk"):
            larger = s ** (r / (r - 2)) if r > 2 else 1.0  # what the base is multiplied by
            after.append(w * larger ** (-2 * t / r))
        elif name == "yarn":
            turns = L * w / (2 * pi)
            kept = 0.0 if turns < 1 else 1.0 if turns > 32 else (turns - 1) / (32 - 1)
            after.append(w * (1 - kept) / s + w * kept)
        elif name == "yarn_code":
            at_32, at_1 = (r * log(L / (turns * 2 * pi)) / (2 * log(base)) for turns in (32, 1))
            low, high = max(floor(at_32), 0), min(ceil(at_1), r - 1)
            squeezed = float(t > low) if low == high else min(1.0, max(0.0, (t - low) / (high - low)))
            after.append(w / s * squeezed + w * (1 - squeezed))
        else:
            raise KeyError(name)
    return after


def temperature(name: str | None, s: float) -> float:
    """What YaRN multiplies the scores by: the square of equation 15 of arXiv 2309.00071 turned round."""
    return (0.1 * log(s) + 1) ** 2 if name in ("yarn", "yarn_code") else 1.0
