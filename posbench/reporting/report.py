"""Run `posbench report`: print the comparison; write report.md, report.html, CSV tables and pictures."""

from __future__ import annotations

import math
import re
import webbrowser
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console

from posbench.analysis.agreement import choose, finished_runs, is_of_subjects, is_of_tasks
from posbench.analysis.comparison import Comparison, build
from posbench.analysis.published import Published, load_published
from posbench.analysis.reading import read_runs
from posbench.analysis.statistics import conclusions, verdict
from posbench.analysis.table import config_of, scheme_settings, settings_of
from posbench.catalogue.choices import choices, read_row
from posbench.config import ConfigError, chosen_experiment
from posbench.config.units import number, short_count
from posbench.reporting import figures as pictures
from posbench.reporting import tables
from posbench.reporting.options import ReportOptions
from posbench.reporting.pages import environment, show, write
from posbench.reporting.sections import by_sections, models, sections_of
from posbench.reporting.subjects import content_of_subjects
from posbench.reporting.tasks import content_of_tasks
from posbench.runs.finding import REFERENCE, folder_of, search_folder
from posbench.runs.fingerprints import digest
from posbench.runs.tracking import log_report
from posbench.system.console import console as new_console
from posbench.system.console import json_text
from posbench.system.options import takes


@takes(ReportOptions)
def report(
    places: str | Path | Sequence[str | Path], *, options: ReportOptions, console: Console | None = None
) -> list[Path]:
    """Print the report of the runs at these places, write its files, and return the paths of the files.

    Arguments: places, folders or packs (zip files) of runs; options, as of `posbench report`, such as against,
    published results to compare with (default: those that the experiment names); output, the folder for files (default:
    `report` in the first place, with the grouping and the chosen runs in its name); beside, a reference experiment
    whose runs are put into the same tables; schemes and seeds, to select runs; console, to print to.
    Raises: ConfigError if no run is finished, runs differ in other settings, a name is unknown, or the output cannot be
    written.
    """
    console, group_by, margin = console or Console(), options.by, options.margin
    places = [places] if isinstance(places, str | Path) else list(places)
    target = Path(options.output) if options.output else _default_output(folder_of(Path(places[0])), options)
    notices = new_console(stderr=True) if options.as_json else console  # scripts read only JSON from stdout
    chosen, rows = read_runs(
        places, options.beside, notices, lambda summary, _: choose(summary, options.schemes, options.seeds)
    )
    target.mkdir(parents=True, exist_ok=True)
    of_subjects = is_of_subjects(chosen) and not group_by
    published = load_published(options.against) if options.against else None if of_subjects else _published_of(chosen)
    if of_subjects:
        content, files = content_of_subjects(chosen, rows)
        names, first = content["names"], content["sections"][0].table
    elif is_of_tasks(chosen):
        if options.against:
            raise ConfigError("--against compares losses and perplexities, and these runs learn tasks: leave it out")
        runs, left_out = finished_runs(chosen)
        content, files = content_of_tasks(runs, rows, group_by, left_out)
        content |= {"setup": _setup(runs), "continued": dict(_continued(runs))}
        names, first = content["names"], content["tables"]["summary"]
    elif group_by:
        groups = _groups(chosen, rows, group_by, options.baseline, published, margin)
        content, files = _grouped_content(groups, group_by, published, margin)
        experiments = list(dict.fromkeys(name for c in groups.values() for name in c.runs["experiment"]))
        names = ", ".join(experiments) if len(experiments) < 4 else f"{len(experiments)} experiments"
        names = f"{names} by {group_by}"
        first = content["sections"][0 if group_by == "train.lr" else 1].table
    else:
        comparison = build(chosen, rows, options.baseline, published, margin)
        content, files = _content(comparison, margin, options.every_length)
        names, first = comparison.experiment, content["sections"][0].table
    files["runs.csv"] = chosen
    absent = _absent(places, chosen, options)
    content["notes"] += [*_variants(chosen[chosen["status"] == "finished"]), *absent]
    content["holes"] = [*content.get("holes", ()), *absent]
    content["title"] = f"posbench: {options.title or names}"
    templates = environment()
    paragraph = " ".join(templates.get_template(content["paragraph"]).render(content).split())
    page = templates.get_template(content["page"]).render(content | {"conclusions": paragraph})
    page = re.sub(r"\n{3,}", "\n\n", page).strip() + "\n"
    paths = write(target, page, content, files, options.latex)
    if options.as_json:
        screen = {"title": content["title"], "schemes": content["numbers"], "table": first.to_dict("records")}
        screen |= {"conclusions": paragraph, "left_out": content["holes"], "files": paths}
        console.out(json_text(screen))
    else:
        show(console, content["title"], first, paragraph)
        for line in content["holes"]:
            console.print(line + "\n", highlight=False, markup=False, soft_wrap=True)
        console.print(
            f"wrote {target / 'report.html'}, report.md and {len(paths) - 2} more", highlight=False, soft_wrap=True
        )
    if options.beside:
        from posbench.analysis.reference_table import how_to_train  # imports torch and Hydra

        notices.out(how_to_train(folder_of(Path(options.beside))))
    if options.wandb:
        run = finished_runs(chosen)[0].iloc[0]
        message = log_report(target, str(run["experiment"]), config_of(str(run["path"])).get("tracking") or {})
        notices.print(message, highlight=False, soft_wrap=True)
    if options.open_page:
        webbrowser.open((target / "report.html").resolve().as_uri())
    return paths


def _default_output(folder: Path, options: ReportOptions) -> Path:
    """Return the folder for a report's files, in the folder of its first experiment.

    The name tells the groups, and schemes and seeds that were chosen, so that the full report stays: `report`,
    `report-by-train.lr`, `report-of-alibi,nope-seeds-0,1`. Reports of reference experiments go to `runs/reports`,
    because these experiments are part of posbench and not of the user's runs.
    """
    if folder.resolve().is_relative_to(REFERENCE):
        folder = Path("runs/reports") / folder.resolve().relative_to(REFERENCE)
    name = f"report-by-{options.by}" if options.by else "report"
    for title, chosen in (("of", options.schemes), ("seeds", options.seeds)):
        text = ",".join(map(str, chosen))
        name += f"-{title}-{text if len(text) <= 80 else f'{len(chosen)}-{digest(text)[:6]}'}" if chosen else ""
    return folder / name


def _absent(places: Sequence[str | Path], chosen: pd.DataFrame, options: ReportOptions) -> list[str]:
    """Return a line for each of these places that has no run in the report. Arguments: chosen, a row per run."""
    paths = [Path(path) for path in chosen["path"]]
    reason = "none of its runs was chosen with --schemes or --seeds"
    if not options.schemes and not options.seeds:
        reason = "it contains no runs"
    folders = {folder: (folder, search_folder(folder)) for folder in map(folder_of, map(Path, places))}
    return [
        f"{folder.name} is not in this report: {reason}"
        for folder, with_search in folders.items()
        if not any(path.is_relative_to(part) for path in paths for part in with_search)
    ]


def _variants(runs: pd.DataFrame) -> list[str]:
    """Return a line for each scheme whose settings are not those of its file in `conf/scheme`: what it is.

    Arguments: runs, a row per run.
    """
    files, lines = choices("scheme"), dict[str, None]()
    columns = [c for c in settings_of(runs) if c.startswith("scheme.") and not c.startswith("scheme.continued.")]
    for run in runs.drop_duplicates(["scheme", *columns])[["scheme", *columns]].to_dict("records"):
        name, settings = str(run.pop("scheme")), {str(k).removeprefix("scheme."): value for k, value in run.items()}
        recorded = {key: value for key, value in settings.items() if key != "name" and not pd.isna(value)}
        usual = scheme_settings(read_row(name)) if name in files else {}
        changed = [f"{key}={_shortened(value)}" for key, value in recorded.items() if usual.get(key) != value]
        changed += [f"without {key}" for key in usual if key not in recorded]
        if changed:
            start = f"{name}: as in conf/scheme/{name}.yaml, but " if usual else f"{name}: "
            lines[start + ", ".join(changed)] = None
    return list(lines)


def _shortened(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 100 else f"{text[:99]}…"


def _published_of(summary: pd.DataFrame) -> Published | None:
    """Return the published results that the experiment of the summary's first finished run names, or None."""
    runs, _ = finished_runs(summary)
    name = chosen_experiment(config_of(str(runs["path"].iloc[0])), str(runs["experiment"].iloc[0])).get("published")
    return load_published(name) if name else None


def _content(c: Comparison, margin: float, every_length: bool) -> tuple[dict[str, Any], dict[str, pd.DataFrame]]:
    """Return the values that fill the report's templates, and the tables to write as CSV, by file name.

    Arguments: margin, nats per token below which losses count as equal; every_length, whether to show lengths that are
    neither a multiple nor a divisor of the training length.
    """
    sections = sections_of(c, margin, every_length)
    ranking = conclusions(c.ranked, c.pairs) if c.can_rank else {}
    gaps = c.losses.sub(c.losses[c.baseline], axis=0).drop(columns=c.baseline)
    always = {
        "lower": [s for s in gaps if (gaps[s] < 0).all()],
        "higher": [s for s in gaps if (gaps[s] > 0).all()],
    }
    shown = {line for section in sections for line in section.holes}
    content: dict[str, Any] = {
        "page": "report.md.j2",
        "paragraph": "conclusions.j2",
        "c": c,
        "margin": margin,
        "ranking": ranking,
        "numbers": tables.numbers(c),
        "unranked": [s for s in c.schemes if s not in c.ranked],
        "always": {side: names for side, names in always.items() if names},
        "detectable": float(c.pairs.dropna(subset="p_claimed")["detectable"].median()) if c.can_rank else math.nan,
        "longest": _longest(c),
        "rates": [f"{rate:g}" for rate in sorted(set(c.runs["train.lr"]))],
        "lede": f"{models(c)}. Losses are in nats per token; lower is better.",
        "continued": dict(_continued(c.runs)),
        "figures": pictures.draw_all(c, sections),
        "none_caught_on": c.has_onsets and not np.isfinite(c.onsets).any(axis=None),
        "sections": sections,
        "setup": _setup(c.runs),
        "holes": list(chain(*c.holes.values())),
        "notes": [*c.notes, *(line for line in chain(*c.holes.values()) if line not in shown)],
        "latex": {s.latex[0]: (s.table, s.latex[1]) for s in sections if s.latex and s.table is not None},
    }
    files = {"table.csv": c.cells, "pairs.csv": c.pairs}
    for section in sections:
        files |= section.files
    return content, files


def _longest(c: Comparison) -> dict[str, Any] | None:
    """Return how losses change from the training length to the longest evaluated length, or None if none is longer.

    Keys: length, in tokens; best and worst, the schemes whose losses grow least and most; best_change and worst_change,
    as text.
    """
    cells = c.at(metric="loss", last=0).dropna(subset="change")
    cells = cells[cells["length"] > c.training_length]
    if cells.empty:
        return None
    cells = cells[(cells["protocol"] == cells["protocol"].iloc[0]) & (cells["length"] == cells["length"].max())]
    best, worst = (cells.loc[cells["change"].idxmin()], cells.loc[cells["change"].idxmax()])
    texts = {f"{name}_change": number(row["change"], sign=True) for name, row in (("best", best), ("worst", worst))}
    return {"length": int(best["length"]), "best": best["scheme"], "worst": worst["scheme"], **texts}


def _continued(runs: pd.DataFrame) -> Iterator[tuple[str, str]]:
    """Yield (scheme, text) for each scheme whose runs continued the training of another model.

    The text says how many tokens were trained before: `10M of 40M tokens as <the other run>`. Arguments: runs, a row
    per run.
    """
    for scheme, continued in runs.dropna(subset="continues").groupby("scheme") if "continues" in runs else ():
        inherited, tokens = int(continued["tokens_before"].iloc[0]), int(continued["tokens"].iloc[0])
        names = continued["continues"]
        sources = sorted({re.sub(r"/seed=\d+", "", name.rpartition("/")[0] or name) for name in names})
        yield str(scheme), f"{short_count(inherited)} of {short_count(tokens)} tokens as {', '.join(sources)}"


def _setup(runs: pd.DataFrame) -> list[tuple[str, str]]:
    """Return (name, text) pairs that describe the set-up: experiment, data, model, training, runs and versions.

    Arguments: runs, a row per run.
    """
    config = config_of(str(runs["path"].iloc[0]))
    experiment = ", ".join(dict.fromkeys(runs["experiment"]))
    seeds = ", ".join(map(str, sorted(set(runs["seed"]))))

    def distinct(column: str) -> str:
        return ", ".join(sorted(set(runs[column].dropna().astype(str)))) or "unknown"

    if config["data"]["source"] == "task":
        task_paths = runs.groupby("data.name", sort=False)["path"].first()
        data = [(f"data={name}", _settings(config_of(path), "data")) for name, path in task_paths.items()]
    else:
        data = [("data and tokenizer", _settings(config, "data", "tokenizer") + _context_bytes(runs))]
    codes = runs["fingerprint.code"].nunique()
    versions = [f"{v.removeprefix('version.')} {distinct(v)}" for v in map(str, runs) if v.startswith("version.")]
    machine = f"{distinct('device')} ({distinct('dtype')}), {min(runs['started'])[:10]}"
    code = f"; {codes} versions of the code" if codes > 1 else ""
    prints = ", ".join(f"{title} {distinct(f'fingerprint.{name}')[:12]}" for title, name in _PRINTS.items())
    facts = [
        (
            "experiment",
            ": ".join(filter(None, (experiment, chosen_experiment(config, experiment).get("description")))),
        ),
        *data,
        ("model", _settings(config, "model")),
        ("train", f"{distinct('num_steps')} steps, lr={distinct('train.lr')}, {_settings(config, 'train')}"),
        (
            "runs",
            f"seeds {seeds}; {machine}; {', '.join(versions)}{code}; fingerprints: {prints}",
        ),
    ]
    skipped = runs[runs["skipped_steps"] > 0]
    if len(skipped):
        listed = ", ".join(f"{r.scheme} seed {r.seed}: {r.skipped_steps}" for r in skipped.itertuples())
        facts.append(("skipped steps", listed))
    return facts


def _context_bytes(runs: pd.DataFrame) -> str:
    """Return a phrase that tells how many bytes of text a token and the training context hold; "" if unknown.

    Arguments: runs, a row per run.
    """
    run = runs.dropna(subset="bits_per_byte").head(1)
    if run.empty:
        return ""
    length, loss, bits = (float(run[name].iloc[0]) for name in ("train.context_length", "loss", "bits_per_byte"))
    size = loss / math.log(2) / bits
    return f", a token is {size:.2f} bytes of text, the context of {length:.0f} tokens {length * size:.0f} bytes"


def _settings(config: Mapping[str, Any], *groups: str) -> str:
    """Return the settings in these groups of the configuration as `key=value, ...`, without empty or hidden ones.

    Arguments: config, a run's configuration as nested dicts; groups, its top-level keys, such as model.
    """
    fields = [field for name in groups for field in (config.get(name) or {}).items()]
    shown = [f"{key}={value}" for key, value in fields if value and key not in HIDDEN_SETTINGS]
    return ", ".join(shown)


_PRINTS = {"text": "data", "tokenizer": "tokenizer"}  # fingerprints that a report shows, by title

# Fields of the configuration that do not matter for the comparison, or that a report shows elsewhere.
HIDDEN_SETTINGS = {
    "name", "steps", "tied_embeddings", "accumulation", "lr", "lr_end_ratio", "decay_ratio", "grad_clip", "text_column",
    "train_split", "validation_split", "test_split", "validation_fraction", "test_fraction", "tuning_fraction",
    "cache_dir", "articles", "device", "dtype", "compile", "validate_every", "checkpoint_every", "keep_checkpoints",
    "log_every", "max_skipped_steps", "lr_of", "branch_tokens", "beta1", "beta2", "eps", "norm_eps", "training_bytes",
    "validation_tokens", "order_every", "tokens", "from_run",
}  # fmt: skip


def _groups(
    summary: pd.DataFrame,
    rows: pd.DataFrame,
    group_by: str,
    baseline: str | None,
    published: Published | None,
    margin: float,
) -> dict[Any, Comparison]:
    """Return {value of the column `group_by`: Comparison of the finished runs with it}.

    Arguments: summary, a row per run; rows, the tidy table, a row per scored window and metric; group_by, one column or
    several with commas, whose values are then tuples; margin, nats per token below which losses count as equal.
    Raises: ConfigError for an unknown column.
    """
    if "data.name" in group_by.split(",") and "data.name" not in summary:  # runs do not record it as a setting
        texts = (
            summary.groupby("fingerprint.data")["path"].first().map(lambda path: config_of(str(path))["data"]["name"])
        )
        summary = summary.assign(**{"data.name": summary["fingerprint.data"].map(texts)})
    known = ["experiment", "tokens", "parameters", "dtype", *settings_of(summary)]
    columns = group_by.split(",")
    for column in columns:
        if column not in known or summary[column].isna().all():
            varied = [c for c in known if summary[c].astype(str).nunique() > 1 and not c.startswith("scheme.")]
            differ = ", ".join(varied) or "nothing but the scheme and the seed"
            raise ConfigError(f"--by {column!r} is not a column of these runs; they differ in {differ}")
    is_by_rate = "train.lr" in columns  # then each group has one rate, and nothing is chosen by a search
    summary = summary.assign(searched=False) if is_by_rate else summary
    groups = summary.groupby(columns if columns[1:] else group_by, sort=True)
    finished = set(finished_runs(summary)[0].index)
    return {
        value: build(group, rows, baseline, published, margin, group_by)
        for value, group in groups
        if finished & set(group.index)
    }


def _grouped_content(
    groups: Mapping[Any, Comparison], group_by: str, published: Published | None, margin: float
) -> tuple[dict[str, Any], dict[str, pd.DataFrame]]:
    """Return the values that fill the templates of a grouped report, and the tables to write as CSV, by file name.

    Arguments: groups, {value that a group of runs shares: their Comparison}; group_by, the column with these values;
    margin, nats per token below which losses count as equal.
    """
    means = pd.DataFrame({value: c.losses.mean() for value, c in groups.items()})
    tried = means[means.notna().sum(axis=1) > 1]
    best = tried.idxmin(axis=1)
    edges = {scheme: (row.dropna().index[0], row.dropna().index[-1]) for scheme, row in tried.iterrows()}
    every = pd.concat([c.runs for c in groups.values()])
    shared = [column for column in settings_of(every) if not column.startswith("scheme.")]
    differing = [c for c in shared if c not in group_by.split(",") and every[c].astype(str).nunique() > 1]
    texts = every["fingerprint.data"].nunique()
    notes = [f"the groups also differ in {', '.join(differing)}"] if differing else []
    notes += ["the groups were trained on different text"] if texts > 1 else []
    is_rate = group_by == "train.lr"
    sections = by_sections(groups, group_by, published, margin)
    content: dict[str, Any] = {
        "page": "by.md.j2",
        "paragraph": "by_conclusions.j2",
        "column": group_by,
        "is_rate": is_rate,
        "best": best,
        "at_edge": [scheme for scheme in best.index if best[scheme] in edges[scheme]],
        "across": _across(groups),
        "numbers": [
            {"group": tables.text_of(value), **row} for value, c in groups.items() for row in tables.numbers(c)
        ],
        "lowest": [(s, tables.text_of(means.loc[s].idxmin())) for s in means.min(axis=1).nsmallest(3).index],
        "figures": pictures.trend(groups, group_by, is_rate),
        "sections": sections,
        "latex": {section.latex[0]: (section.table, section.latex[1]) for section in sections if section.latex},
        "lede": f"Runs of {len(groups)} values of {group_by}: "
        + ", ".join(map(tables.text_of, groups))
        + ". Losses are in "
        "nats per token; lower is better.",
        "setup": [(tables.text_of(value), models(c)) for value, c in groups.items()],
        "notes": [
            *notes,
            *(note for c in groups.values() for note in (*c.left_out, *c.notes, *chain(*c.holes.values()))),
        ],
    }
    files = {
        **{name: frame for section in sections for name, frame in section.files.items()},
        "table.csv": pd.concat([c.cells.assign(group=tables.text_of(value)) for value, c in groups.items()]),
        "pairs.csv": pd.concat([c.pairs.assign(group=tables.text_of(value)) for value, c in groups.items()]),
    }
    return content, files


def _across(groups: Mapping[Any, Comparison]) -> dict[str, Any]:
    """Return in how many groups each scheme has the lowest loss, and in how many it is better than the baseline.

    Arguments: groups, {value that a group of runs shares: their Comparison}.
    Keys: groups and tested (numbers of groups), lowest and better (lists of (scheme, number of groups)), baseline,
    scopes (at which learning rates claims hold), unfinished (values of groups whose search is unfinished).
    """
    tested = [c for c in groups.values() if c.can_rank and c.wanted_baseline in c.schemes]
    better = Counter(s for c in tested for s in c.schemes if verdict(c.pairs, s, c.baseline) == "better")
    return {
        "groups": len(groups),
        "tested": len(tested),
        "scopes": sorted({c.scope for c in tested}),
        "unfinished": [tables.text_of(value) for value, c in groups.items() if c.unfinished],
        "baseline": next(iter(groups.values())).wanted_baseline,
        "lowest": Counter(c.schemes[0] for c in groups.values()).most_common(),
        "better": better.most_common(),
    }
