"""The report of an experiment: tables on the terminal; CSV, Markdown, one HTML page and pictures in a folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from posbench.config import ConfigError
from posbench.machine.files import remove_leftovers, write_bytes
from posbench.reporting import drawing, page, plots, spreadsheet, trend_plots
from posbench.reporting.columns import described
from posbench.reporting.findings import find
from posbench.reporting.latex import files as latex_files
from posbench.reporting.sections import Section, sections
from posbench.reporting.sections.trend import trend_sections
from posbench.reporting.statistics import MARGIN
from posbench.reporting.tables import markdown, markdown_prose, markdown_text, print_notes, print_table, printable
from posbench.reporting.tracked import show_in_wandb, tracked_runs
from posbench.reporting.trend import find_trend

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from rich.console import Console

    from posbench.reporting.palette import Look


def report(
    folder: str | Path,
    against: str | None = None,
    baseline: str | None = None,
    output: str | Path | None = None,
    console: Console | None = None,
    family: str = "all",
    margin: float = MARGIN,
    schemes: Sequence[str] = (),
    order: str = "loss",
    title: str | None = None,
    latex: bool = False,
    wandb: bool = False,
) -> list[Path]:
    """Print the report of the experiment in `folder`, write its files, and return their paths.

    Arguments: against, published results to compare with ours (default: the experiment's own); baseline, the scheme
    that gaps are measured against (default: the experiment's own); output, the folder for files (default:
    `folder`/report); family, the pairs whose tests are corrected together; margin, below which losses count as equal,
    in nats/token; schemes, only these (default: all); order of the rows, one of `findings.ORDERS`; title
    (default: the experiment's name); latex, whether tables are also written as LaTeX and figures as PDF, in the folder
    `latex` of the output; wandb, whether the report and each run's gap are also logged to wandb (docs/wandb.md).
    Raises: ConfigError if no run is finished, a name is unknown, or the output cannot be written.
    """
    from posbench.console import console as new_console

    console = console or new_console()
    findings = find(folder, baseline, against, family, margin, schemes, order)
    target = Path(output) if output else Path(folder) / "report"
    figures = plots.draw_all(findings)
    made = sections(findings, figures)

    tables = spreadsheet.frames(findings)
    looks = {scheme: findings.looks[scheme] for scheme in findings.schemes}
    name = title or findings.experiment
    paths = _publish(name, page.lede(findings), made, tables, figures, looks, target, console, latex)

    def notice(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    if wandb:
        show_in_wandb(findings, tables, figures, target, notice)
    elif tracked_runs(findings):
        notice("wandb recorded these runs: add --wandb to have the report and the gaps there too")
    return paths


def trend_report(
    folders: Sequence[str | Path],
    against: str | None = None,
    baseline: str | None = None,
    output: str | Path | None = None,
    console: Console | None = None,
    family: str = "all",
    margin: float = MARGIN,
    title: str | None = None,
    latex: bool = False,
) -> list[Path]:
    """Print the trend over experiments that differ only in size or tokens, write its files, and return their paths.

    Arguments: output, the folder for files (default: `trend` in the first folder); the others as in `report`.
    Raises: ConfigError as `report`, and if the experiments cannot be compared, naming the field that differs.
    """
    from posbench.console import console as new_console

    trend = find_trend(folders, baseline, against, family, margin)
    figures = trend_plots.draw_trend(trend)
    made = trend_sections(trend, list(figures))
    lede = (
        f"{len(trend.points)} experiments, {len(trend.sizes())} sizes, {len(trend.schemes)} position schemes: how gaps "
        "change with size and tokens. Lower loss is better."
    )
    name = title or f"trend of {', '.join(point.name for point in trend.points)}"
    target = Path(output) if output else Path(folders[0]) / "trend"
    tables = spreadsheet.trend_frames(trend)
    return _publish(name, lede, made, tables, figures, trend.looks, target, console or new_console(), latex)


def _publish(
    name: str,
    lede: str,
    made: list[Section],
    tables: Mapping[str, pd.DataFrame],
    figures: Mapping[str, Figure],
    looks: Mapping[str, Look],
    target: Path,
    console: Console,
    latex: bool,
) -> list[Path]:
    """Write the files of a report and print its sections."""
    with_columns = {**tables, "columns.csv": described(tables)}
    files = {file: spreadsheet.encode(frame) for file, frame in with_columns.items()}
    drawings = {stem: drawing.svg(figure) for stem, figure in figures.items()}
    files["report.md"] = as_markdown(name, made).encode()
    files["report.html"] = page.render(name, lede, made, drawings, looks).encode()
    for stem, figure in figures.items():
        files[f"{stem}.svg"] = drawings[stem].encode()
        files[f"{stem}.png"] = drawing.png(figure)
    if latex:
        files |= {f"latex/{stem}.pdf": drawing.pdf(figure) for stem, figure in figures.items()}
        files |= {f"latex/{file}": text.encode() for file, text in latex_files(name, made, figures).items()}
    for place in {(target / file).parent for file in files} - {target}:
        if place.is_symlink():
            raise ConfigError(f"{place} is a symbolic link: remove the link, or name another folder with --output")
    remove_leftovers(target)
    for file, content in files.items():
        write(target / file, content)
    print_sections(made, console)
    first = ("report.html", "report.md", next(iter(tables)))
    more = f"{', '.join(first)} and {len(files) - len(first)} more"
    console.print(f"wrote {more} in {target}/", highlight=False, markup=False, soft_wrap=True)
    return [target / file for file in files]


def write(path: Path, content: bytes) -> None:
    """As `runs.write_bytes`. Raises: ConfigError where the folder cannot be written."""
    try:
        write_bytes(path, content)
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigError(f"the report cannot be written to {path.parent} ({why}): name another folder") from error


def print_sections(made: list[Section], console: Console) -> None:
    """Tables first, then the words about them, as far as a terminal is the place for it."""
    from rich.text import Text

    for section in made:
        if section.on_terminal:
            if section.title not in [table.title for table in section.tables]:
                console.print(Text(printable(section.title), style="bold"))
                console.print()
            if section.lead:
                console.print(Text(printable(section.lead)))
                console.print()
            if section.chain:
                console.print(Text(printable(section.words[0])))
                console.print()
            for table in section.tables:
                print_table(table, console)
            print_notes(section.words[1:] if section.chain else section.words, console)
            for what, command in section.commands:
                console.print(Text(printable(what), style="dim"))
                console.print(Text(printable(command)), soft_wrap=True)
                console.print()


def as_markdown(experiment: str, made: list[Section]) -> str:
    """The sections as GitHub's Markdown, pictures by their files: tables first, then the words about them."""
    parts = [f"# posbench: {markdown_text(printable(experiment))}\n"]
    for section in made:
        parts.append(f"## {markdown_text(printable(section.title))}\n")
        shown = 1 if section.chain else 0  # the chain in words stands above its tables
        leading = [*filter(None, [section.lead]), *section.words[:shown]]
        parts += [f"{markdown_prose(printable(words))}\n" for words in leading]
        parts += [markdown(table, table.title != section.title) for table in section.tables]
        for stem, caption in section.pictures:
            parts.append(f"![{markdown_text(caption)}]({stem}.svg)\n\n{markdown_prose(caption)}\n")
        parts += [f"{markdown_prose(printable(words))}\n" for words in section.words[shown:]]
        for what, command in section.commands:
            parts.append(f"{markdown_prose(printable(what))}\n\n```sh\n{printable(command)}\n```\n")
    return "\n".join(parts)
