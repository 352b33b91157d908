r"""Tables and figures of a report for a paper: a `tabular` a file, to be `\input`, and a document that shows them all.

The tables need `\usepackage{booktabs}`. Text is pure ASCII, so that every TeX reads it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from posbench.reporting.sections import Section
from posbench.reporting.tables import Table

LONGEST = 40  # characters of a column that is set on one line
_SPECIAL = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    '"': r"\textquotedbl{}",
    **{each: f"\\{each}" for each in "&%$#_{}"},
}
_UNICODE = {
    "±": r"$\pm$",
    "–": "--",
    "—": "---",
    "−": "$-$",
    "·": r"$\cdot$",
    "×": r"$\times$",
    "≈": r"$\approx$",
    "≥": r"$\geq$",
    "≤": r"$\leq$",
    "→": r"$\to$",
    "…": r"\dots{}",
    "“": "``",
    "”": "''",
    "’": "'",
    "†": r"$\dagger$",
    "τ": r"$\tau$",
    "\N{NO-BREAK SPACE}": "~",
}

# A table in its own size, or as much smaller as the page asks for.
_FITTED = r"""\newsavebox{\whole}
\newcommand{\fitted}[1]{%
  \sbox{\whole}{#1}%
  \ifdim\wd\whole>\linewidth\sbox{\whole}{\resizebox{\linewidth}{!}{\usebox{\whole}}}\fi
  \ifdim\dimexpr\ht\whole+\dp\whole>.85\textheight\sbox{\whole}{\resizebox{!}{.85\textheight}{\usebox{\whole}}}\fi
  \usebox{\whole}}"""


def latex_text(text: str) -> str:
    """Text that LaTeX shows as it is; a character that is not known here is shown as `U+03B1`."""
    known = {**_SPECIAL, **_UNICODE, "\n": " "}
    return "".join(known.get(c) or (c if c.isascii() and c.isprintable() else f"U+{ord(c):04X}") for c in text)


def tabular(table: Table) -> str:
    """The table as a `tabular` in the style of booktabs, with its title as a comment."""
    body = [*table.rows, *table.foot]
    columns = "".join(_column(n, table, body) for n in range(len(table.headers)))
    lines = [f"% {latex_text(table.title)} (posbench report); \\usepackage{{booktabs}}"]
    lines += [f"\\begin{{tabular}}{{{columns}}}", r"\toprule", _row(map(_header, table.headers)), r"\midrule"]
    lines += [_row(map(_cell, row)) for row in table.rows]
    if table.foot:
        lines += [r"\midrule", *(_row(f"\\textit{{{_cell(cell)}}}" for cell in row) for row in table.foot)]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def files(title: str, made: Sequence[Section], pictures: Iterable[str]) -> dict[str, str]:
    """File name -> content: a `tabular` for each table, and report.tex, a document of all of them.

    Arguments: pictures, the stems of the figures that stand beside them as PDF.
    """
    written: dict[str, str] = {}
    parts = []
    for table in [table for section in made for table in section.tables if table.rows]:
        name = _name(table.title, written)
        written[f"{name}.tex"] = tabular(table)
        parts.append(_float("table", table.title, f"\\small\n\\fitted{{\\input{{{name}}}}}", name))
    captions = {stem: caption for section in made for stem, caption in section.pictures}
    for stem in pictures:
        shown = f"\\includegraphics[width=\\linewidth]{{{stem}}}"
        parts.append(_float("figure", captions.get(stem, stem), shown, stem))
    packages = "\\usepackage[margin=2cm]{geometry}\n\\usepackage{booktabs,graphicx}\n\\usepackage[T1]{fontenc}"
    head = f"\\documentclass{{article}}\n{packages}\n{_FITTED}\n\\title{{{latex_text(title)}}}\n\\date{{}}"
    begin = "\\begin{document}\n\\maketitle"
    written["report.tex"] = "\n\n".join([head, begin, *parts, "\\end{document}\n"])
    return written


def _float(kind: str, caption: str, content: str, label: str) -> str:
    lines = [
        f"\\begin{{{kind}}}[p]",
        r"\centering",
        f"\\caption{{{latex_text(caption)}}}",
        f"\\label{{{kind}:{label}}}",
    ]
    return "\n".join([*lines, content, f"\\end{{{kind}}}"])


def _name(title: str, taken: Mapping[str, str]) -> str:
    name = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:60] or "table"
    return next(n for n in (name, *(f"{name}-{k}" for k in range(2, 999))) if f"{n}.tex" not in taken)


def _column(n: int, table: Table, rows: Sequence[Sequence[str]]) -> str:
    if n not in table.left:
        return "r"
    return "l" if max((len(row[n]) for row in rows), default=0) <= LONGEST else "p{0.4\\linewidth}"


def _header(header: str) -> str:
    lines = [latex_text(line) for line in header.split("\n")]
    if len(lines) == 1:
        return lines[0]
    return r"\begin{tabular}[b]{@{}c@{}}" + r"\\".join(lines) + r"\end{tabular}"


def _cell(cell: str) -> str:
    """A minus sign is no hyphen."""
    text = latex_text(cell)
    return f"$-${text[1:]}" if re.match(r"-[\d.]", text) else text


def _row(cells: Iterable[str]) -> str:
    row = " & ".join(cells) + r" \\"
    return f"{{}}{row}" if row.startswith(("[", "*")) else row  # an option of the line before it, else
