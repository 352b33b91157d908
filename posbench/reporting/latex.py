r"""Tables and figures of a report for a paper: a `tabular` a file, to be `\input`, and a document that shows them all.

The tables need `\usepackage{booktabs}`. Text is pure ASCII, so that every TeX reads it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from posbench.reporting.sections import Section
from posbench.reporting.tables import Table

LONGEST = 40  # characters of a column that is set on one line
_UNBROKEN = re.compile(r"\S{16}(?=\S)")  # after which a word, such as a hash, may be broken
# Begins a cell of several lines: its words are not spread over the width, and two backslashes still end the row.
_RAGGED = r"\raggedright\let\\\tabularnewline "
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
    "\N{ZERO WIDTH SPACE}": r"\allowbreak{}",
}

_FIGURE = r"\includegraphics[width=\linewidth]{%s}"
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
    parts = [
        "".join(known.get(c) or (c if c.isascii() and c.isprintable() else f"U+{ord(c):04X}") for c in part)
        for part in re.split(r"`([^`]+)`", text)  # every second one stood between backticks
    ]
    return "".join(f"\\texttt{{{part}}}" if n % 2 else part for n, part in enumerate(parts))


def tabular(table: Table, notes: Iterable[str] = ()) -> str:
    """The table as a `tabular` in the style of booktabs. Comments above it have its title and what its figures mean."""
    body = [*table.rows, *table.foot]
    wide = [_is_wide(n, table, body) for n in range(len(table.headers))]
    columns = "".join(_column(n, table, wide[n]) for n in range(len(table.headers)))
    lines = [f"% {latex_text(table.title)} (posbench report); \\usepackage{{booktabs}}"]
    lines += [f"% {latex_text(note)}" for note in notes]
    lines += [f"\\begin{{tabular}}{{{columns}}}", r"\toprule", _row(map(_header, table.headers)), r"\midrule"]
    lines += [_row(map(_cell, row, wide)) for row in table.rows]
    if table.foot:
        lines += [r"\midrule", *(_row(f"\\textit{{{_cell(cell)}}}" for cell in row) for row in table.foot)]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def files(title: str, made: Sequence[Section], pictures: Iterable[str]) -> dict[str, str]:
    """File name -> content: a `tabular` for each table, and report.tex, a document of all of them and their words.

    Arguments: pictures, the stems of the figures that stand beside them as PDF.
    """
    written: dict[str, str] = {}
    parts, drawn = [], list(pictures)
    for section in made:
        notes = [*filter(None, [section.lead]), *section.words]
        parts += [rf"\section*{{{latex_text(section.title)}}}", *map(latex_text, notes)]
        for table in filter(lambda table: table.rows, section.tables):
            name = _name(table.title, written)
            written[f"{name}.tex"] = tabular(table, notes)
            parts.append(_float("table", table.title, f"\\small\n\\fitted{{\\input{{{name}}}}}", name))
        for stem, caption in section.pictures:
            if stem in drawn:
                parts.append(_float("figure", caption, _FIGURE % stem, stem))
                drawn.remove(stem)
        parts += [r"\clearpage"] * bool(section.tables or section.pictures)
    parts += [_float("figure", stem, _FIGURE % stem, stem) for stem in drawn]
    packages = "\\usepackage[margin=2cm]{geometry}\n\\usepackage{booktabs,graphicx}\n\\usepackage[T1]{fontenc}"
    head = f"\\documentclass{{article}}\n{packages}\n{_FITTED}\n\\title{{{latex_text(title)}}}\n\\date{{}}"
    begin = "\\begin{document}\n\\maketitle"
    written["report.tex"] = "\n\n".join([head, begin, *parts, "\\end{document}\n"])
    return written


def _float(kind: str, caption: str, content: str, label: str) -> str:
    """The caption of a table is above it, that of a figure below."""
    words = f"\\caption{{{latex_text(caption)}}}\n\\label{{{kind}:{label}}}"
    parts = [words, content] if kind == "table" else [content, words]
    return "\n".join([f"\\begin{{{kind}}}[htbp]", r"\centering", *parts, f"\\end{{{kind}}}"])


def _name(title: str, taken: Mapping[str, str]) -> str:
    name = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:60] or "table"
    return next(n for n in (name, *(f"{name}-{k}" for k in range(2, 999))) if f"{n}.tex" not in taken)


def _is_wide(n: int, table: Table, rows: Sequence[Sequence[str]]) -> bool:
    """Whether the text of a column is set in several lines."""
    return n in table.left and max((len(row[n]) for row in rows), default=0) > LONGEST


def _column(n: int, table: Table, is_wide: bool) -> str:
    if n not in table.left:
        return "r"
    return "p{0.4\\linewidth}" if is_wide else "l"


def _header(header: str) -> str:
    lines = [latex_text(line) for line in header.split("\n")]
    if len(lines) == 1:
        return lines[0]
    return r"\begin{tabular}[b]{@{}c@{}}" + r"\\".join(lines) + r"\end{tabular}"


def _cell(cell: str, is_wide: bool = False) -> str:
    """A number's hyphen becomes a minus sign; in a wide column long words may be broken."""
    text = latex_text(_UNBROKEN.sub("\\g<0>\N{ZERO WIDTH SPACE}", cell) if is_wide else cell)
    text = f"$-${text[1:]}" if re.match(r"-[\d.]", text) else text
    return f"{_RAGGED}{text}" if is_wide else text


def _row(cells: Iterable[str]) -> str:
    row = " & ".join(cells) + r" \\"
    return f"{{}}{row}" if row.startswith(("[", "*")) else row  # an option of the line before it, else
