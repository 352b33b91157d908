"""A table once, shown three ways: on a terminal, in Markdown, in HTML (by the template).

Cells are plain text. What stands in a name is never trusted: control characters are made visible here, and each way of
showing escapes what is special to it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

DASH = "–"  # a cell that does not apply, or is not known
UNSURE = 3  # decimals of a number that has no interval
MOST = 4  # decimals


def printable(text: object) -> str:
    """One line of text without control characters: they are shown as `\\x1b`."""
    joined = " ".join(str(text).split()) if not isinstance(text, str) or "\n" in text else text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in joined)


@dataclass
class Table:
    """Columns of text; the first names the row. `headers` may hold a second line, the unit.

    `foot` holds rows of another kind than the others, which are set apart from them.
    """

    title: str
    headers: Sequence[str]
    rows: list[list[str]]
    left: frozenset[int] = frozenset({0})  # columns of words; the others are numbers and stand to the right
    foot: list[list[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rows, self.foot = ([[printable(cell) for cell in row] for row in rows] for rows in (self.rows, self.foot))
        assert all(len(row) == len(self.headers) for row in [*self.rows, *self.foot])

    def fitted(self, width: int) -> list[list[int]]:
        """Column numbers in as many parts as it takes to stay within `width` characters, the first column in each."""
        widths = [
            max(len(line) for line in [*self.headers[n].split("\n"), *(row[n] for row in [*self.rows, *self.foot])])
            for n in range(len(self.headers))
        ]
        parts, used = [[0]], widths[0]
        for n in range(1, len(widths)):
            if used + 2 + widths[n] > width and len(parts[-1]) > 1:
                parts.append([0])
                used = widths[0]
            parts[-1].append(n)
            used += 2 + widths[n]
        return parts


def print_table(table: Table, console: Console) -> None:
    """On a terminal; a table wider than it goes on below, with the first column again."""
    parts = table.fitted(console.width)
    for number, part in enumerate(parts):
        more = "" if len(parts) == 1 else f" ({number + 1} of {len(parts)})"
        console.print(Text(f"{table.title}{more}", style="bold"))
        shown = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
        for n in part:
            words = n in table.left
            shown.add_column(
                Text(table.headers[n]),
                justify="left" if words else "right",
                no_wrap=not words or n == 0,
                overflow="fold",
            )
        for row in table.rows:
            shown.add_row(*(Text(row[n]) for n in part))
        if table.foot:
            shown.add_section()  # a line between them
        for row in table.foot:
            shown.add_row(*(Text(row[n], style="dim") for n in part))
        console.print(shown)
        console.print()


def print_notes(notes: Iterable[str], console: Console) -> None:
    """Small print, wrapped to the terminal."""
    said = [printable(note) for note in notes]
    for note in said:
        console.print(Text(note, style="dim"))
    if said:
        console.print()


def markdown(table: Table, with_title: bool = True) -> str:
    """A table of GitHub's Markdown with its title as a heading."""
    heads = [markdown_text(h.replace("\n", " ")) for h in table.headers]
    rule = [":--" if n in table.left else "--:" for n in range(len(heads))]
    lines = [f"### {markdown_text(table.title)}", ""] if with_title else []
    lines += [_line(heads), _line(rule), *(_line([markdown_text(cell) for cell in row]) for row in table.rows)]
    lines += [_line([f"*{markdown_text(cell)}*" for cell in row]) for row in table.foot]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def markdown_text(text: str) -> str:
    """Text that Markdown shows as it is: no HTML, no links, no table borders."""
    for special, shown in (
        ("&", "&amp;"),
        ("<", "&lt;"),
        (">", "&gt;"),
        ("|", "&#124;"),
        ("[", "&#91;"),
        ("]", "&#93;"),
        ("`", "&#96;"),
        ("*", "&#42;"),
    ):
        text = text.replace(special, shown)
    return text.replace("~", "\\~")


def markdown_prose(text: str) -> str:
    """A sentence for Markdown: what is between backquotes stays code, the rest is shown as it is."""
    parts = re.split(r"(`[^`\n]+`)", text)
    return "".join(part if n % 2 else markdown_text(part) for n, part in enumerate(parts))


def csv_text(text: str) -> str:
    """A name that no spreadsheet takes for a formula: a quote goes before = + - @, also behind blanks."""
    return f"'{text}" if text.lstrip()[:1] in ("=", "+", "-", "@") or text[:1] in ("\t", "\r", "\n") else text


def decimals(half_width: float) -> int:
    """The decimals that an interval allows: two significant digits of its half width, 3 for ±0.030, 1 for ±1.8."""
    if math.isnan(half_width):
        return UNSURE
    exponent = int(f"{half_width:.1e}".partition("e")[2]) if 0 < half_width < math.inf else -MOST
    return min(max(1 - exponent, 0), MOST)


def number(value: float, digits: int = UNSURE, sign: bool = False) -> str:
    """`1.234`, `+0.012`, a dash for NaN; no zero has a minus.

    With a sign, what rounds to zero shows one digit more, `+0.0003`, and `±0` where that is a zero too.
    """
    if math.isnan(value):
        return DASH
    if not sign or round(value, digits):
        return f"{value:{'+' if sign else ''}z.{digits}f}"
    return f"{value:+.{digits + 1}f}" if round(value, digits + 1) else "±0"


def whole(value: float) -> str:
    """`399,360`, a dash for NaN."""
    return DASH if math.isnan(value) else f"{value:,.0f}"


def rough(value: float) -> str:
    """Two significant digits or the whole number: `0.15`, `5.9`, `1,234`, a dash for NaN."""
    return whole(value) if not abs(value) < 9.95 else f"{value:.2g}"


def millions(count: float) -> str:
    """`133,568`, `6.82 million`, `1.04 billion`, a dash where it is not known."""
    if count is None or math.isnan(count):
        return DASH
    if count < 1e6:
        return f"{count:,.0f}"
    return f"{count / 1e9:.3g} billion" if count >= 1e9 else f"{count / 1e6:.3g} million"


def flops_text(flops: float) -> str:
    """`6.15e12`, a dash for NaN."""
    digits, _, exponent = f"{flops:.2e}".partition("e")
    return DASH if math.isnan(flops) else f"{digits}e{int(exponent)}"


def plus_minus(value: float, half_width: float, sign: bool = False) -> str:
    """`2.7120 ± 0.0013`, `2.71 ± 0.18`: the decimals that the interval allows; without it where there is none."""
    if math.isnan(value) or math.isnan(half_width):
        return number(value, decimals(half_width), sign)
    return f"{value:{'+' if sign else ''}z.{decimals(half_width)}f} {half_text(half_width)}"


def gap_text(mean: float, half_width: float, is_baseline: bool) -> str:
    """As `plus_minus`; the baseline's own gap is 0 by definition and has no interval."""
    return "0" if is_baseline else plus_minus(mean, half_width, sign=True)


def half_text(half_width: float) -> str:
    """Half an interval by itself: `± 0.0013`, `± 0.18`, a dash for NaN."""
    return DASH if math.isnan(half_width) else f"± {half_width:.{decimals(half_width)}f}"


def perplexity_text(value: float, half_width: float = math.nan) -> str:
    """`18.40`, `178.9`, `1,631`, `2.5e+07`; a model that gives no number shows as `nan`.

    With `half_width`, half the interval of the loss in nats/token, the decimals that it allows; about four digits else.
    """
    if value < 1e6 and not math.isnan(half_width):
        return f"{value:,.{decimals(value * half_width)}f}"
    if value < 100:
        return f"{value:.2f}"
    if value < 1000:
        return f"{value:.1f}"
    return f"{value:,.0f}" if value < 1e6 else f"{value:.1e}"


def length_text(tokens: int) -> str:
    """`512`, `1k`, `8k`, `1001`: short where it is a whole number of 1024."""
    return f"{tokens // 1024}k" if tokens >= 1024 and tokens % 1024 == 0 else str(tokens)
