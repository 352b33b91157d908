"""Numbers as people write them: `20M` and `8k` are read, `2.05M` and `1.2 GB` are written."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Any

DASH = "–"  # for a number that is not known
_NUMBER = re.compile(r"(\d[\d_]*(?:\.\d+)?(?:[eE]\+?\d{1,2})?)([kKmMbBgGtT]?)")
_POWERS = {"": 0, "k": 1, "m": 2, "b": 3, "g": 3, "t": 4}


def whole_number(value: Any, thousand: int = 1000) -> int | None:
    """Return the whole number that `value` means, such as 4096, `20M`, `2.5B` or `1e6`, or None if it is not one.

    Arguments: thousand, what `k` means: 1024 for the lengths of windows, so that `8k` is 8192.
    """
    match = None if isinstance(value, bool) else _NUMBER.fullmatch(str(value).strip())
    if match is None:
        return None
    number = Decimal(match[1].replace("_", "")) * thousand ** _POWERS[match[2].lower()]
    return int(number) if number == number.to_integral_value() else None


def short_count(count: float) -> str:
    """`2.05M`: three digits and a unit."""
    return _short(count, "", "k", "M", "B", "T")


def short_bytes(count: float) -> str:
    """`1.2 GB`: three digits and a unit."""
    return _short(count, " B", " kB", " MB", " GB", " TB")


def _short(count: float, *units: str) -> str:
    power = next((n for n in range(len(units) - 1, 0, -1) if count >= 1000**n), 0)
    return f"{float(f'{count / 1000**power:.3g}'):g}{units[power]}"


def count_of(number: int, what: str) -> str:
    """`1 scheme`, `2 schemes`."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def short_length(tokens: int) -> str:
    """`8k` for 8192: the number itself where it is not a multiple of 1024."""
    return f"{tokens // 1024}k" if tokens >= 1024 and tokens % 1024 == 0 else str(tokens)


def duration(seconds: float) -> str:
    """`42 s`, `5.2 min`, `33 h`, `2.4 days`: two digits or more, and the largest unit of which there are two."""
    units = ((86400, "days"), (3600, "h"), (60, "min"), (1, "s"))
    size, unit = next((each for each in units if seconds >= 2 * each[0]), units[-1])
    count = seconds / size
    return f"{count:,.0f} {unit}" if count >= 10 else f"{count:.2g} {unit}"


def decimals(half_width: float, most: int = 4) -> int:
    """Return the decimals an interval allows: two significant ones of its half width: 3 for ±0.030, 1 for ±1.8."""
    if not math.isfinite(half_width):
        return 3
    return min(max(1 - int(f"{half_width:.1e}".partition("e")[2]), 0), most) if half_width else most


def perplexity_text(value: Any, half_width: float = math.nan) -> str:
    """`18.83`, `178.9`, `1,631`, `2.5e+07`; or as many decimals as half an interval (nats) allows, three at most."""
    if value >= 1e6:
        return f"{value:.1e}"
    if math.isfinite(half_width):
        return f"{value:,.{decimals(value * half_width, most=3)}f}"
    if value < 100:
        return f"{value:.2f}"
    return f"{value:.1f}" if value < 1000 else f"{value:,.0f}"


def number(value: Any, digits: int = 3, sign: bool = False) -> str:
    """Return `1.234`, `+0.012` or a dash for NaN. A signed value that rounds to zero gets one more digit: `+0.0003`."""
    if math.isnan(value):
        return DASH
    if sign and not round(value, digits):
        return f"{value:+.{digits + 1}f}" if round(value, digits + 1) else "0"
    return f"{value:{'+' if sign else ''}z.{digits}f}"


def plus_minus(value: Any, half_width: float, sign: bool = False) -> str:
    """Return `2.7120 ±0.0013` or `2.71 ±0.18`; without an interval three digits."""
    text = number(value, decimals(half_width), sign)
    return text if math.isnan(value) or math.isnan(half_width) else f"{text} ±{half_width:.{decimals(half_width)}f}"
