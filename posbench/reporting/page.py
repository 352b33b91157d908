"""Make a page of a report: fill its template, write its files, and print it to the terminal."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markdown_it import MarkdownIt
from rich import box
from rich.console import Console
from rich.table import Table as TerminalTable
from rich.text import Text

from posbench.analysis.compare import best_groups
from posbench.analysis.comparison import continued
from posbench.analysis.table import COLUMNS
from posbench.config.units import count_of, number, perplexity_text, short_count, short_length
from posbench.evaluation.protocols.order import ONSET
from posbench.reporting import figures as pictures
from posbench.reporting.card import card_lines
from posbench.reporting.section import Section, Table
from posbench.reporting.text import as_text, latex, markdown, words
from posbench.system.files import write_bytes
from posbench.version import __version__

MOST_ROWS = 40  # rows of a table shown on the terminal


@dataclass(frozen=True)
class Page:
    """A report as data."""

    title: str
    lede: str  # what was compared, in one line
    paragraph: str  # the conclusions
    sections: Sequence[Section]
    runs: pd.DataFrame  # a row per run that the sections show
    setup: Sequence[tuple[str, str]]  # name and text of each fact about the set-up
    notes: Sequence[str]  # further lines below the set-up
    numbers: Sequence[Mapping[str, Any]]  # the rows of the first table, for `posbench report --json`
    files: Mapping[str, pd.DataFrame]  # name -> CSV file, in addition to the files of sections
    holes: Sequence[str] = ()  # lines about missing figures, which the terminal shows too
    left_out: Sequence[str] = ()  # lines about runs that are not compared
    cards: Sequence[Mapping[str, Any]] = ()  # of models that were not trained here, for --json

    @property
    def table(self) -> Table:
        """Return the first table, which the terminal shows."""
        return next(section.table for section in self.sections if section.table is not None)

    @property
    def frames(self) -> dict[str, pd.DataFrame]:
        """Return all CSV files by name; sections with one file name share the file."""
        by_name: dict[str, list[pd.DataFrame]] = {}
        for section in self.sections:
            for name, frame in section.files.items():
                by_name.setdefault(name, []).append(frame)
        frames = {name: pd.concat(parts) for name, parts in by_name.items()}
        return {**self.files, **frames}


@cache
def environment() -> Environment:
    """Return the Jinja environment of the templates, with the filters that they use."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        # Missing names are errors, not empty text.
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "words": words,
        "few": lambda names: words(names) if len(names) < 4 else str(len(names)),
        "are": lambda names: "is" if len(names) == 1 else "are",
        "have": lambda names: "has" if len(names) == 1 else "have",
        "table": markdown,
        "number": number,
        "length_text": short_length,
        "counted": count_of,
        "heads": heads_text,
        "card_lines": lambda card: card_lines(card)[:2] if card else [],  # without what was not scored
        "short_count": short_count,
        "signed": partial(number, sign=True),
        "perplexity": perplexity_text,
        "round_up": lambda value: f"{value:.2g}",
        "range_text": lambda values: " to ".join(dict.fromkeys(f"{end:.2g}" for end in (values.min(), values.max()))),
    }
    environment.globals |= {
        "ONSET": ONSET,
        "best_groups": best_groups,
        "lowest": lambda comparisons: Counter(c.schemes[0] for c in comparisons).most_common(),
        "wins": lambda comparisons: Counter(chain.from_iterable(c.winners for c in comparisons)).most_common(),
        "continued_of": continued,
    }
    return environment


def heads_text(model: Mapping[str, Any]) -> str:
    """Return number and width of a model's heads, as text: `6 heads of 16`. Arguments: model, its settings."""
    width = model.get("head_dim") or model["d_model"] // model["num_heads"]
    return f"{count_of(model['num_heads'], 'head')} of {width}"


def prose(name: str, *content: Any) -> str:
    """Return the text of the macro `name` in the template `prose.j2`, called with `content`."""
    return str(getattr(environment().get_template("prose.j2").module, name)(*content)).strip("\n")


def paragraph(name: str, *content: Any) -> str:
    """Return the text of this macro as one paragraph."""
    return " ".join(prose(name, *content).split())


def write(target: Path, page: Page, is_latex: bool) -> list[Path]:
    """Write the files of a page to the folder `target`, and return their paths, report.html first.

    Arguments: is_latex, whether to write LaTeX tables (except those without a row) and PDF figures too.
    """
    figures = pictures.draw_all(page.runs, page.sections)
    drawings = {stem: pictures.encode(figure, "svg") for stem, figure in figures.items()}
    page_text = environment().get_template("page.md.j2").render(page=page, figures=figures)
    # Empty parts of the template leave empty lines.
    page_text = re.sub(r"\n{3,}", "\n\n", page_text).strip() + "\n"
    files = {"report.html": as_html(page_text, drawings, page.title).encode(), "report.md": page_text.encode()}
    for name, frame in {**page.frames, "columns.csv": columns_table(page.frames)}.items():
        files[name] = frame.to_csv(index=False).encode()
    files |= {f"{stem}.svg": drawing for stem, drawing in drawings.items()}
    if is_latex:
        files |= {f"latex/{name}.tex": text.encode() for name, text in latex_tables(page.sections).items()}
        files |= {f"latex/{stem}.pdf": pictures.encode(figure, "pdf") for stem, figure in figures.items()}
    for name, data in files.items():
        write_bytes(target / name, data)
    return [target / name for name in files]


def latex_tables(sections: Sequence[Section]) -> dict[str, str]:
    """Return the sections' tables in LaTeX, {file name without suffix: text}."""
    tables = {}
    for section in sections:
        if section.latex and section.table is not None and len(section.table):
            name, caption = section.latex
            tables[name] = latex(section.table, caption, f"tab:{name}")
    return tables


def as_html(page: str, drawings: Mapping[str, bytes], title: str) -> str:
    """Return the Markdown page as self-contained HTML, with inline pictures and wide tables that scroll.

    Arguments: drawings, SVG files by name without suffix.
    """
    # Raw HTML stays text, because names in a report come from users.
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(page)
    body = body.replace("<table>", '<div class="scroll"><table>').replace("</table>", "</table></div>")

    def inline(match: re.Match[str]) -> str:
        stem = match[1]
        drawing = pictures.inline_svg(drawings[stem].decode(), stem)
        return f'<figure class="{stem}">{drawing}<figcaption>{match[2]}</figcaption></figure>'

    body = re.sub(r'<p><img src="([^"]+)\.svg" alt="([^"]*)" ?/?></p>', inline, body)
    # The first picture that a table follows, and this table, are shown side by side if the page is wide enough.
    first_figure = re.compile(r'(<figure.*?</figure>\s*<div class="scroll">.*?</div>)', re.DOTALL)
    body = first_figure.sub(r'<div class="first">\1</div>', body, count=1)
    return (
        environment().get_template("page.html.j2").render(body=body, title=title.replace("<", ""), version=__version__)
    )


def columns_table(frames: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Return a table that explains columns of CSV files: file, column, meaning, unit. Arguments: frames, by file."""
    rows = []
    for file, frame in frames.items():
        rows += [(file, column, *meaning(column)) for column in map(str, frame.columns)]
    return pd.DataFrame(rows, columns=["file", "column", "meaning", "unit"])


def meaning(column: str) -> tuple[str, str]:
    """Return the meaning and unit of a column in a report's CSV files, such as `loss`, `loss_low` or `train.lr`."""
    if column in COLUMNS:
        return COLUMNS[column]
    # The ends of an interval are named after its figure: `loss_low` belongs to `loss`.
    for ending, side in (("_low", "lower"), ("_high", "upper")):
        if column.endswith(ending):
            text, unit = meaning(column.removesuffix(ending))
            return f"{side} end of the 95 % interval over seeds: {text}", unit
    if column.endswith("_documents"):
        text, unit = meaning(column.removesuffix("_documents"))
        return f"half the 95 % interval over documents: {text}", unit
    # Settings of runs share an entry per group, such as `train.*`. Only a class of the user's own has other columns.
    groups = [names for names in COLUMNS if f"{column.partition('.')[0]}.*" in names]
    return COLUMNS[groups[0]] if groups else ("", "")


def show(console: Console, page: Page) -> None:
    """Print a page's title, the first MOST_ROWS rows of its first table, and its paragraph."""
    table = as_text(page.table)
    terminal_table = TerminalTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    markup = {r"\*\*": "", r"\\\*": "*"}  # Markdown's bold, and its escaped stars
    plain = table.head(MOST_ROWS).replace(markup, regex=True)
    for n, title in enumerate(map(str, table.columns)):
        side: Literal["left", "right"] = "right" if n else "left"
        # One word a line, so that the titles take little room beside the figures.
        words = Text(title.replace(" ", "\n"))
        terminal_table.add_column(words, justify=side, overflow="fold", no_wrap=n == 0)
    for row in plain.to_numpy().tolist():
        terminal_table.add_row(*map(Text, row))
    console.print(Text(page.title, style="bold"))
    console.print(terminal_table)
    if len(table) > MOST_ROWS:
        console.print(Text(f"... and {len(table) - MOST_ROWS} more in the report", style="dim"))
    console.print()
    console.print(Text(page.paragraph))
    console.print()
    for line in page.holes:
        console.print(line + "\n", highlight=False, markup=False, soft_wrap=True)
