"""Run `posbench report`: print the comparison; write report.md, report.html, CSV tables and pictures."""

from __future__ import annotations

import json
import webbrowser
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd
from rich.console import Console

from posbench.analysis.agreement import choose, finished_runs, is_of_subjects, is_of_tasks
from posbench.analysis.comparison import build
from posbench.analysis.published import Published, load_published
from posbench.analysis.reading import read_runs
from posbench.analysis.table import config_of
from posbench.config import ConfigError, chosen_experiment
from posbench.reporting.groups import groups_of, groups_page
from posbench.reporting.options import ReportOptions
from posbench.reporting.page import Page, show, write
from posbench.reporting.sections import losses_page
from posbench.reporting.setup import variants
from posbench.reporting.subjects import subjects_page
from posbench.reporting.tasks import tasks_page
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
    experiment = folder_of(Path(places[0]))
    target = Path(options.output or _default_output(experiment, options))
    notices = new_console(stderr=True) if options.as_json else console  # scripts read only JSON from stdout
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
    # After reading, so that an error leaves no empty folder.
    target.mkdir(parents=True, exist_ok=True)
    page = page_of(chosen, rows, options)
    places_without_runs = _absent(places, chosen, options)
    page = replace(
        page,
        title=f"posbench: {options.title or page.title}",
        # Lines about places without a run are in the notes and on the terminal.
        notes=[*page.notes, *variants(chosen[chosen["status"] == "finished"]), *places_without_runs],
        holes=[*page.holes, *places_without_runs],
        files={**page.files, "runs.csv": chosen},
    )
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
        run = finished_runs(chosen)[0].iloc[0]
        message = log_report(target, str(run["experiment"]), config_of(str(run["path"])).get("tracking") or {})
        notices.print(message, highlight=False, soft_wrap=True)
    if options.open_page:
        webbrowser.open((target / "report.html").resolve().as_uri())
    return paths


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
    """Return the page about these runs. Arguments: summary, a row per run; rows, the tidy table."""
    if is_of_subjects(summary) and not options.by:
        return subjects_page(summary, rows)
    if is_of_tasks(summary):
        if options.against:
            raise ConfigError("--against compares losses and perplexities, and these runs learn tasks: leave it out")
        return tasks_page(*finished_runs(summary), rows, options.by)
    if options.by:
        return groups_page(groups_of(summary, rows, options.by, options.baseline, options.margin), options.by)
    published = _published_of(summary)
    if options.against:
        published = load_published(options.against)
    comparison = build(summary, rows, options.baseline, options.margin)
    return losses_page(comparison, published, options.margin, options.every_length, options.chain)


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


def _published_of(summary: pd.DataFrame) -> Published | None:
    # The experiment of the first finished run decides.
    runs, _ = finished_runs(summary)
    name = chosen_experiment(config_of(str(runs["path"].iloc[0])), str(runs["experiment"].iloc[0])).get("published")
    return load_published(name) if name else None
