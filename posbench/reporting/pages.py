"""Write a report: fill templates, convert Markdown to HTML, write tables, and print to the terminal."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markdown_it import MarkdownIt
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from posbench.analysis.table import COLUMNS
from posbench.config.units import number, short_length
from posbench.reporting import figures as pictures
from posbench.reporting import tables
from posbench.version import __version__

MOST_ROWS = 40  # rows of a table shown on the terminal


def words(names: Sequence[str], most: int = 12) -> str:
    """Return names as a list in prose: `a`, `a and b`, `a, b and c`; names beyond the first `most` are only counted."""
    shown = [*names[:most], *([f"{len(names) - most} more"] if len(names) > most else [])]
    return " and ".join(filter(None, [", ".join(shown[:-1]), *shown[-1:]]))


def _verdicts(claims: Sequence[str]) -> str:
    """Return how often each verdict occurs, as text: `2 hold, 1 fails and 5 are open`.

    Arguments: claims, a verdict each: holds, fails or open.
    """
    forms = {"holds": ("holds", "hold"), "fails": ("fails", "fail"), "open": ("is open", "are open")}
    counts = {word: claims.count(word) for word in forms}
    return words([f"{n} {forms[word][n > 1]}" for word, n in counts.items() if n])


def environment() -> Environment:
    """Return the Jinja environment of the report templates, with the filters that they use."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "words": words,
        "few": lambda names: words(names) if len(names) < 4 else str(len(names)),
        "are": lambda names: "is" if len(names) == 1 else "are",
        "have": lambda names: "has" if len(names) == 1 else "have",
        "verdicts": _verdicts,
        "table": tables.markdown,
        "number": number,
        "length_text": short_length,
        "round_up": lambda value: f"{value:.2g}",
    }
    return environment


def write(
    target: Path,
    page: str,
    content: Mapping[str, Any],
    frames: Mapping[str, pd.DataFrame],
    latex: bool,
) -> list[Path]:
    """Write the files of a report to the folder `target`, and return their paths, report.html first.

    Arguments: page, report.md as text; content, of which `title`, `figures` (by file name) and, for LaTeX, `latex`
    (tables with captions) are used; frames, tables to write as CSV, by file name; latex, whether to write tables for
    LaTeX too, except those without a row, and figures as PDF.
    """
    drawings = {stem: pictures.encode(figure, "svg") for stem, figure in content["figures"].items()}
    files = {"report.html": as_html(page, drawings, content["title"]).encode(), "report.md": page.encode()}
    for name, frame in {**frames, "columns.csv": columns_table(frames)}.items():
        files[name] = frame.to_csv(index=False).encode()
    files |= {f"{stem}.svg": drawing for stem, drawing in drawings.items()}
    if latex:
        for name, (table, caption) in content["latex"].items():
            if len(table):
                files[f"latex/{name}.tex"] = tables.latex(table, caption, f"tab:{name}").encode()
        files |= {f"latex/{stem}.pdf": pictures.encode(figure, "pdf") for stem, figure in content["figures"].items()}
    for name, data in files.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_bytes(data)
    return [target / name for name in files]


def as_html(page: str, drawings: Mapping[str, bytes], title: str) -> str:
    """Return the Markdown page as self-contained HTML, with inline pictures and wide tables that scroll.

    Arguments: drawings, the SVG files of the pictures, by name without suffix; title, of the HTML page.
    """
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(page)
    body = body.replace("<table>", '<div class="scroll"><table>').replace("</table>", "</table></div>")

    def inline(match: re.Match[str]) -> str:
        stem = match[1]
        drawing = pictures.inline_svg(drawings[stem].decode(), stem)
        return f'<figure class="{stem}">{drawing}<figcaption>{match[2]}</figcaption></figure>'

    body = re.sub(r'<p><img src="([^"]+)\.svg" alt="([^"]*)" ?/?></p>', inline, body)
    first = re.compile(r'(<figure.*?</figure>\s*<div class="scroll">.*?</div>)', re.DOTALL)
    body = first.sub(r'<div class="first">\1</div>', body, count=1)  # shown side by side if the page is wide enough
    return (
        environment()
        .get_template("report.html.j2")
        .render(body=body, title=title.replace("<", ""), version=__version__)
    )


def columns_table(frames: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Return a table that explains the columns of CSV files: file, column, meaning, unit.

    Arguments: frames, {file name: table}.
    """
    rows = [(file, column, *meaning(column)) for file, frame in frames.items() for column in map(str, frame.columns)]
    return pd.DataFrame(rows, columns=["file", "column", "meaning", "unit"])


def meaning(column: str) -> tuple[str, str]:
    """Return the meaning and unit of a column in a report's CSV files, such as `loss`, `loss_low` or `train.lr`.

    A column ending in `_low`, `_high` or `_documents` is an interval of the column before the ending.
    """
    if column in COLUMNS:
        return COLUMNS[column]
    for ending, side in (("_low", "lower"), ("_high", "upper")):
        if column.endswith(ending):
            text, unit = meaning(column.removesuffix(ending))
            return f"{side} end of the 95 % interval over seeds: {text}", unit
    if column.endswith("_documents"):
        text, unit = meaning(column.removesuffix("_documents"))
        return f"half the 95 % interval over documents: {text}", unit
    group = next(names for names in COLUMNS if f"{column.partition('.')[0]}.*" in names)
    return COLUMNS[group]


def show(console: Console, name: str, table: pd.DataFrame, conclusions: str) -> None:
    """Print a report's table in the terminal: the title `name`, at most MOST_ROWS rows, and the conclusions.

    The table is shortened if it is too wide. Arguments: conclusions, a paragraph of text.
    """
    cells = table.head(MOST_ROWS).map(lambda cell: cell.replace("**", "").replace("\\*", "*"))
    titles = list(map(str, cells.columns))

    def is_too_wide() -> bool:
        widths = [max(len(word) for word in title.split("\n")) for title in titles]
        return sum(1 + max(w, *cells.iloc[:, n].map(len)) for n, w in enumerate(widths)) > console.width

    if is_too_wide():
        titles = [title.replace(" ", "\n") for title in titles]
    if is_too_wide():
        cells = cells.replace(r" ±[0-9.]+", "", regex=True)  # the report has the intervals
    if is_too_wide():
        cells = cells.map(lambda cell: re.sub(r"\d+\.\d{3,}", lambda n: f"{float(n[0]):.2f}", cell))
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for n, title in enumerate(titles):
        shown.add_column(Text(title), justify="right" if n else "left", overflow="fold", no_wrap=n == 0)
    for row in cells.to_numpy().tolist():
        shown.add_row(*map(Text, row))
    console.print(Text(name, style="bold"))
    console.print(shown)
    if len(table) > MOST_ROWS:
        console.print(Text(f"... and {len(table) - MOST_ROWS} more in the report", style="dim"))
    console.print()
    console.print(Text(conclusions))
    console.print()
