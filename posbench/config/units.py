"""Read and write numbers as people do: read `20M` and `8k`, and write `2.05M` and `1.2 GB`."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from numbers import Real
from typing import Any

DASH = "–"  # for a number that is not known
_NUMBER = re.compile(r"(\d[\d_]*(?:\.\d+)?(?:[eE]\+?\d{1,2})?)([kKmMbBgGtT]?)")
_POWERS = {"": 0, "k": 1, "m": 2, "b": 3, "g": 3, "t": 4}


def whole_number(value: Any, thousand: int = 1000) -> int | None:
    """Return the whole number that `value` means, such as 4096, `20M`, `2.5B` or `1e6`, or None if it is not one.

    Arguments: thousand, what `k` means: 1024 for the lengths of windows.
    """
    match = _NUMBER.fullmatch(str(value).strip())
    if match is None or isinstance(value, bool):
        return None
    # Decimal, because 1e23 as a float is not a whole power of ten.
    number = Decimal(match[1].replace("_", "")) * thousand ** _POWERS[match[2].lower()]
    return int(number) if number == number.to_integral_value() else None


def short_count(count: float) -> str:
    """Return a count with three significant digits and a unit, such as `2.05M`."""
    return _short(count, "", "k", "M", "B", "T")


def short_bytes(count: float) -> str:
    """Return a number of bytes with three significant digits and a unit, such as `1.2 GB`."""
    return _short(count, " B", " kB", " MB", " GB", " TB")


def _short(count: float, *units: str) -> str:
    fitting = (n for n in range(len(units) - 1, 0, -1) if count >= 1000**n)
    power = next(fitting, 0)
    return f"{float(f'{count / 1000**power:.3g}'):g}{units[power]}"


def count_of(number: int, noun: str) -> str:
    """Return a number and the `noun`, with a plural s unless the number is 1: `1 scheme`, `2,000 schemes`."""
    plural = "" if number == 1 else "s"
    return f"{number:,} {noun}{plural}"


def short_length(tokens: int) -> str:
    """Return a length as text: `8k` for 8192, or the number itself if it is not a multiple of 1024."""
    if tokens >= 1024 and tokens % 1024 == 0:
        return f"{tokens // 1024}k"
    return str(tokens)


def duration(seconds: float) -> str:
    """Return a time in the largest unit of which it has at least two: `42 s`, `33 h`, `2.4 days`."""
    units = ((86400, "days"), (3600, "h"), (60, "min"), (1, "s"))
    fitting = (pair for pair in units if seconds >= 2 * pair[0])
    size, unit = next(fitting, units[-1])
    count = seconds / size
    # Two significant digits, or no decimals from 10 on.
    if count >= 10:
        return f"{count:,.0f} {unit}"
    return f"{count:.2g} {unit}"


def decimals(half_width: float, most: int = 4) -> int:
    """Return how many decimals, at `most`, show two digits of a half width: 3 for ±0.030, 1 for ±1.8, 3 for NaN."""
    if not math.isfinite(half_width):
        return 3
    if not half_width:
        return most
    # The exponent after rounding to two digits: 0.0996 is 1.0e-01.
    exponent = int(f"{half_width:.1e}".partition("e")[2])
    return min(max(1 - exponent, 0), most)


def perplexity_text(value: Any, half_width: float = math.nan) -> str:
    """Return a perplexity as text: `18.83`, `1,631` or `2.5e+07`. Arguments: half_width, half an interval in nats."""
    if value >= 1e6:
        return f"{value:.1e}"
    if math.isfinite(half_width):
        return f"{value:,.{decimals(value * half_width, most=2)}f}"
    if value < 100:
        return f"{value:.2f}"
    return f"{value:.1f}" if value < 1000 else f"{value:,.0f}"


def perplexity_half(value: Any, half_width: float) -> str:
    """Return half an interval of a perplexity as text; `half_width` is in nats."""
    # The interval of a loss in nats is relative for a perplexity: d exp(x) = exp(x) dx.
    half = value * half_width
    if value >= 1e6:
        return f"{half:.1e}"
    return f"{half:,.{decimals(half, most=2)}f}"


def number(value: Any, digits: int = 3, sign: bool = False) -> str:
    """Return a number as text: `1.234`, or `+0.012` with `sign`; a dash for NaN."""
    if math.isnan(value):
        return DASH
    # A difference that would round to zero gets one more digit: `+0.0003`.
    if sign and not round(value, digits):
        return f"{value:+.{digits + 1}f}" if round(value, digits + 1) else "0"
    plus = "+" if sign else ""
    return f"{value:{plus}z.{digits}f}"  # z: no minus sign before a zero


def plus_minus(value: Any, half_width: float, sign: bool = False) -> str:
    """Return a value and its half width as text: `2.7120 ±0.0013`, `2.71 ±0.18`; without ± if `half_width` is NaN."""
    digits = decimals(half_width)
    # A value that would round to zero gets one more digit.
    text = number(value, digits if round(value, digits) else digits + 1, sign)
    if math.isnan(value) or math.isnan(half_width):
        return text
    return f"{text} ±{half_width:.{digits}f}"


def group_text(value: Any) -> str:
    """Return the value that a group of runs shares as text: `0.005`, `1.02M`; a tuple's values are joined by spaces."""
    if isinstance(value, tuple):
        return " ".join(map(group_text, value))
    # A bool is an int in Python, but no number here.
    if isinstance(value, str | bool) or not isinstance(value, Real):
        return str(value)
    number = float(value)
    return short_count(number) if number >= 10_000 else f"{number:g}"
