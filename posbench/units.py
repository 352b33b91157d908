"""Numbers as people write them: `20M` and `8k` are read, `2.05M` and `1.2 GB` are written."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

_NUMBER = re.compile(r"(\d[\d_]*(?:\.\d+)?(?:[eE]\+?\d{1,2})?)([kKmMbBgGtT]?)")
_POWERS = {"": 0, "k": 1, "m": 2, "b": 3, "g": 3, "t": 4}


def whole_number(value: Any, thousand: int = 1000) -> int | None:
    """The whole number that `value` stands for: 4096, `20M`, `2.5B`, `1e6`; None where it is not one.

    Arguments: thousand, what `k` means: 1024 for the lengths of windows, so that `8k` is 8192.
    """
    match = None if isinstance(value, bool) else _NUMBER.fullmatch(str(value).strip())
    if match is None:
        return None
    number = Decimal(match[1].replace("_", "")) * thousand ** _POWERS[match[2].lower()]
    return int(number) if number == number.to_integral_value() else None


def short_count(count: int) -> str:
    """`2.05M`: three digits and a unit."""
    size, unit = next((each for each in ((10**9, "G"), (10**6, "M"), (10**3, "k")) if count >= each[0]), (1, ""))
    return f"{float(f'{count / size:.3g}'):g}{unit}"


def short_bytes(count: float) -> str:
    """`1.2 GB`: three digits and a unit."""
    for size, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if count >= size:
            return f"{count / size:.3g} {name}"
    return f"{count / 1e3:.3g} kB"
