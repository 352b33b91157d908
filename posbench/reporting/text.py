"""Turn the tables of a report into text: all numbers are written here, once, just before they are shown."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd

from posbench.config.units import DASH, number, perplexity_text, plus_minus
from posbench.reporting.section import Format, Table

# How the number of a column becomes text; `number` and `perplexity` are written with their intervals.
SPECS = {"count": ",.0f", "flops": ".2e", "p": ".2g", "plain": "g"}


def as_text(table: Table) -> pd.DataFrame:
    """Return the table with every cell as text, without the columns that only decide how others are written."""
    hidden = set(chain.from_iterable(format.columns.values() for format in table.formats.values()))
    shown = [column for column in map(str, table.frame) if column not in hidden]
    formats = {column: table.formats.get(column, Format()) for column in shown}
    rows = []
    for row in table.frame.to_dict("records"):
        rows.append([_cell(row, column, format) for column, format in formats.items()])
    return pd.DataFrame(rows, columns=shown)


def _cell(row: Mapping[Any, Any], column: str, format: Format) -> str:
    value = row[column]
    # `half`, `after` and `bold` name columns of the row, or none ("").
    # A list is one value per seed, each without an interval (NaN).
    if isinstance(value, list):
        text = ", ".join(_written(part, math.nan, format) for part in value)
    else:
        text = _written(value, row.get(format.half, math.nan), format)
    if text == DASH:
        return DASH
    suffix = row.get(format.after)
    if isinstance(suffix, str) and suffix:
        text += suffix
    # Missing values are truthy, so they are tested first.
    is_bold = row.get(format.bold)
    return f"**{text}**" if pd.notna(is_bold) and is_bold else text


def _written(value: Any, half: float, format: Format) -> str:
    if isinstance(value, str):
        return value
    if pd.isna(value):
        return DASH
    # Whole numbers stay as they are unless the format says otherwise.
    if isinstance(value, int | np.integer) and format.kind == "number":
        return str(value)
    if format.kind == "perplexity":
        return perplexity_text(value, half)
    if format.kind == "number":
        if math.isfinite(half):
            return plus_minus(value, half, format.sign)
        return number(value, format.digits, format.sign)
    text = f"{value:{SPECS[format.kind]}}"
    return text.replace("e+", "e") if format.kind == "flops" else text


def markdown(table: Table) -> str:
    """Return the table in GitHub's Markdown, the first column aligned to the left, the others to the right."""
    shown = as_text(table)
    rule = [":--", *["--:"] * (len(shown.columns) - 1)]
    lines = [list(shown.columns), rule, *shown.to_numpy().tolist()]
    return "\n".join(" | ".join(line) for line in lines)


def latex(table: Table, caption: str, label: str) -> str:
    """Return the table in LaTeX (`booktabs`), with bold text and special characters translated."""
    escaped = as_text(table).rename(columns=_latex).map(_latex)
    layout = "l" + "r" * (len(escaped.columns) - 1)
    text = escaped.to_latex(index=False, caption=_latex(caption), label=label, column_format=layout, position="t")
    return f"% needs \\usepackage{{booktabs}}\n{text}"


def _latex(text: str) -> str:
    # Markdown's escapes first, because LaTeX's begin with the same sign.
    text = text.replace("\\*", "*")
    for special in "&%$#_":
        text = text.replace(special, f"\\{special}")
    # A number and its interval are one formula.
    text = re.sub(r"([+-]?[\d.]+) ±([\d.]+)", r"$\1 \\pm \2$", text)
    for sign, shown in {"±": r"$\pm$", DASH: "--", "≥": r"$\geq$"}.items():
        text = text.replace(sign, shown)
    text = re.sub(r"(?<![\w.$])-[\d.]+", r"$\g<0>$", text)  # a minus sign, not a hyphen
    # Bold text does not make formulas bold.
    return re.sub(r"\*\*(.+?)\*\*", r"\\textbf{\\boldmath \1}", text)


def words(names: Sequence[str], most: int = 12) -> str:
    """Return names as a list in prose: `a, b and c`; names beyond the first `most` are only counted."""
    shown = list(names[:most])
    if len(names) > most:
        shown.append(f"{len(names) - most} more")
    return " and ".join(filter(None, [", ".join(shown[:-1]), *shown[-1:]]))
