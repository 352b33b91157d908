"""Run `posbench report`: print the comparison; write report.md, report.html, CSV tables and pictures."""

from __future__ import annotations

import json
import webbrowser
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console

from posbench.analysis.agreement import choose, finished_runs
from posbench.analysis.compare import compare_runs
from posbench.analysis.comparison import Comparison, SeedComparison
from posbench.analysis.loss_table import compare_table, refuse_options
from posbench.analysis.options import is_loss_table
from posbench.analysis.published import Published, load_published
from posbench.analysis.reading import read_runs
from posbench.analysis.subjects import ModelComparison
from posbench.analysis.table import config_of
from posbench.config import ConfigError, chosen_experiment
from posbench.reporting.options import ReportOptions
from posbench.reporting.overview import overview
from posbench.reporting.page import Page, paragraph, show, write
from posbench.reporting.section import Section
from posbench.reporting.sections import sections_of
from posbench.reporting.setup import setup
from posbench.reporting.text import as_text
from posbench.runs.finding import LAST_SUBJECTS, REFERENCE, folder_of, search_folder
from posbench.runs.fingerprints import digest
from posbench.runs.tracking import log_report
from posbench.system.console import console as new_console
from posbench.system.console import json_text
from posbench.system.options import takes


@takes(ReportOptions)
def report(
    places: str | Path | Sequence[str | Path], *, options: ReportOptions, console: Console | None = None
) -> list[Path]:
    """Print the report of the runs at these places, write its files, and return their paths.

    Arguments: places, folders or packs (zip files) of runs; options, as of `posbench report`, such as against,
    published results to compare with (default: those that the experiment names); output, the folder for files (default:
    `report` in the first place); beside, a reference experiment whose runs are put into the same tables; schemes and
    seeds, to select runs.
    Raises: ConfigError if no run is finished, runs differ in other settings, a name is unknown, or the output cannot be
    written.
    """
    console = console or Console()
    places = [places] if isinstance(places, str | Path) else list(places)
    experiment = folder_of(Path(places[0])).with_suffix("") if is_loss_table(places[0]) else folder_of(Path(places[0]))
    target = Path(options.output or _default_output(experiment, options))
    notices = new_console(stderr=True) if options.as_json else console  # scripts read only JSON from stdout
    if is_loss_table(places[0]):
        page = _page_of_table(Path(places[0]), options)
    else:
        page = _page_of_places(places, options, notices)
    # After reading, so that an error leaves no empty folder.
    target.mkdir(parents=True, exist_ok=True)
    page = replace(page, title=f"posbench: {options.title or page.title}")
    paths = write(target, page, options.latex)
    if options.as_json:
        console.out(json_text(_as_json(page, paths)))
    else:
        show(console, page)
        written = f"wrote {target / 'report.html'}, report.md and {len(paths) - 2} more"
        console.print(written, highlight=False, soft_wrap=True)
    if options.beside:
        from posbench.analysis.reference_table import how_to_train  # imports torch and Hydra

        notices.out(how_to_train(folder_of(Path(options.beside))))
    if options.wandb:
        # The first run's experiment and tracking settings hold for the report.
        run = page.runs.iloc[0]
        message = log_report(target, str(run["experiment"]), config_of(str(run["path"])).get("tracking") or {})
        notices.print(message, highlight=False, soft_wrap=True)
    if options.open_page:
        webbrowser.open((target / "report.html").resolve().as_uri())
    return paths


def _page_of_table(file: Path, options: ReportOptions) -> Page:
    refuse_options(options, ("against", "beside", "by", "schemes", "seeds", "wandb"))
    return page_about([compare_table(file, options.baseline, options.margin)])


def _page_of_places(places: Sequence[str | Path], options: ReportOptions, notices: Console) -> Page:
    last_scored = () if options.schemes else _last_subjects(places)
    schemes = options.schemes or last_scored
    chosen, rows = read_runs(
        places, options.beside, notices, lambda summary, _: choose(summary, schemes, options.seeds)
    )
    if last_scored:
        names = ",".join(last_scored)
        notices.out(
            f"the models of the last posbench eval: {names}. Others: --schemes NAME,NAME (posbench ls subjects)"
        )
    page = page_of(chosen, rows, options)
    places_without_runs = _absent(places, chosen, options)
    return replace(
        page,
        # Lines about places without a run are in the notes and on the terminal.
        notes=[*page.notes, *places_without_runs],
        holes=[*page.holes, *places_without_runs],
        files={**page.files, "runs.csv": chosen},
    )


def _last_subjects(places: Sequence[str | Path]) -> tuple[str, ...]:
    # Return the subjects of the last `posbench eval`, if the report is about a folder that has others too; else ().
    folder = folder_of(Path(places[0]))
    file = folder / LAST_SUBJECTS
    if len(places) > 1 or not file.is_file():
        return ()
    # A run.json is in <subject>/seed=<n>.
    scored = [path.parents[1].name for path in folder.glob("*/seed=*/run.json")]
    last = [name for name in json.loads(file.read_text(encoding="utf-8")) if name in scored]
    # If these are all, nothing needs to be chosen or said.
    return tuple(last) if len(last) < len(set(scored)) else ()


def page_of(summary: pd.DataFrame, rows: pd.DataFrame, options: ReportOptions) -> Page:
    """Return the page about these runs. Arguments: summary, a row per run; rows, the tidy table.

    Raises: ConfigError if no run is finished, runs differ in other settings, or a setting of `by` is unknown.
    """
    group_by = options.by or ""
    comparisons = compare_runs(summary, rows, group_by, options.baseline, options.margin)
    published = _published(summary, comparisons, options)
    return page_about(comparisons, group_by, published, options.every_length)


def page_about(
    comparisons: Sequence[Comparison],
    group_by: str = "",
    published: Published | None = None,
    every_length: bool = False,
) -> Page:
    """Return the page about these comparisons.

    Arguments: group_by, the setting whose values are groups, or ""; published, results to compare with; every_length,
    whether to show lengths that are neither a multiple nor a divisor of the training length.
    """
    sections = overview(comparisons, group_by)
    if not group_by:
        of_each = [sections_of(c, published, every_length) for c in comparisons]
        sections += named(comparisons, of_each)
    holes = list(chain.from_iterable(chain(*c.holes.values()) for c in comparisons))
    shown = set(chain.from_iterable(section.holes for section in sections))
    left_out = list(chain.from_iterable(c.left_out for c in comparisons))
    notes = list(chain.from_iterable(c.notes for c in comparisons))
    runs = pd.concat([c.runs for c in comparisons])
    setup_lines = setup(comparisons, group_by) + [("not compared", line) for line in left_out]
    cards = [c.card.as_json() for c in comparisons if isinstance(c, ModelComparison) and c.card]
    return Page(
        title=_title(comparisons, group_by),
        lede=paragraph("lede", comparisons, group_by, runs),
        paragraph=paragraph("paragraph", comparisons, group_by, runs),
        sections=sections,
        runs=runs,
        setup=setup_lines,
        notes=[*notes, *(line for line in holes if line not in shown)],
        numbers=_numbers(comparisons, group_by),
        files=files_of(comparisons, group_by),
        holes=[] if group_by else holes,
        left_out=left_out,
        cards=cards,
    )


def _title(comparisons: Sequence[Comparison], group_by: str) -> str:
    titles = list(dict.fromkeys(c.title for c in comparisons))
    title = ", ".join(titles)
    # More names would not fit.
    if group_by and len(titles) > 3:
        title = f"{len(titles)} experiments"
    return f"{title} by {group_by}" if group_by else title


def _numbers(comparisons: Sequence[Comparison], group_by: str) -> list[dict[str, Any]]:
    rows = []
    for c in comparisons:
        group = {"group": c.group} if group_by else {}
        rows += [group | row for row in c.numbers]
    return rows


def named(comparisons: Sequence[Comparison], of_each: Sequence[Sequence[Section]]) -> Iterator[Section]:
    """Yield the sections of all comparisons; those about several models have the model's name in titles and files."""
    for c, sections in zip(comparisons, of_each, strict=True):
        for section in sections:
            if len(comparisons) > 1 and isinstance(c, ModelComparison):
                section = replace(
                    section,
                    title=section.title and f"{c.name}: {section.title}",
                    plots=[replace(plot, name=f"{plot.name}-{c.name}") for plot in section.plots],
                    latex=section.latex and (f"{section.latex[0]}-{c.name}", section.latex[1]),
                )
            yield section


def files_of(comparisons: Sequence[Comparison], group_by: str) -> dict[str, pd.DataFrame]:
    """Return the tables of all comparisons by the names of their CSV files; `by`, if not "", adds a column `group`."""
    parts: dict[str, list[pd.DataFrame]] = {}
    for c in comparisons:
        for name, frame in c.files.items():
            if group_by:
                frame = frame.assign(group=c.group)
            parts.setdefault(name, []).append(frame)
    return {name: pd.concat(frames) for name, frames in parts.items()}


def _as_json(page: Page, paths: Sequence[Path]) -> dict[str, object]:
    # Return what `--json` prints: the content of the first screen, and the paths of the files.
    printed: dict[str, object] = {
        "title": page.title,
        "schemes": page.numbers,
        "table": as_text(page.table).to_dict("records"),
        "conclusions": page.paragraph,
        "left_out": [*page.left_out, *page.holes],
        "files": paths,
    }
    # Only models that were not trained here have cards.
    if page.cards:
        printed["cards"] = page.cards
    return printed


def _default_output(folder: Path, options: ReportOptions) -> Path:
    # Reference experiments are part of posbench and not of the user's runs.
    if folder.resolve().is_relative_to(REFERENCE):
        folder = Path("runs/reports") / folder.resolve().relative_to(REFERENCE)
    name = f"report-by-{options.by}" if options.by else "report"
    # A name per choice of runs, so that the full report stays.
    for title, chosen in (("of", options.schemes), ("seeds", options.seeds)):
        text = ",".join(map(str, chosen))
        # Long lists become a count and a digest, because names of files are limited.
        if len(text) > 80:
            text = f"{len(chosen)}-{digest(text)[:6]}"
        if chosen:
            name += f"-{title}-{text}"
    return folder / name


def _absent(places: Sequence[str | Path], chosen: pd.DataFrame, options: ReportOptions) -> list[str]:
    # Return a line for each place of which no run is in the report.
    paths = [Path(path) for path in chosen["path"]]
    reason = "none of its runs was chosen with --schemes or --seeds"
    if not options.schemes and not options.seeds:
        reason = "it contains no runs"
    lines = []
    # A folder counts as shown too if only runs of its search are.
    for folder in dict.fromkeys(map(folder_of, map(Path, places))):
        search = search_folder(folder)
        if not any(path.is_relative_to(folder) or path.is_relative_to(search) for path in paths):
            lines.append(f"{folder.name} is not in this report: {reason}")
    return lines


def _published(summary: pd.DataFrame, comparisons: Sequence[Comparison], options: ReportOptions) -> Published | None:
    if isinstance(comparisons[0], SeedComparison) and not options.by:
        # The experiment of the first finished run decides.
        runs, _ = finished_runs(summary)
        config, experiment = config_of(str(runs["path"].iloc[0])), str(runs["experiment"].iloc[0])
        name = options.against or chosen_experiment(config, experiment).get("published")
        return load_published(name) if name else None
    if options.against:
        raise ConfigError("--against compares the losses and perplexities of one table of schemes: leave it out here")
    return None
