"""Write the lists that the code, the configurations and the packs know: `python docs/site/generated.py`.

Each page says in its first line how it is written, and tests/test_site.py fails if one is out of date. The pages of
results take a minute; `python docs/site/generated.py NAME ...` writes only these of them.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
import textwrap
import tomllib
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import extending_tables
import how_far
import open_models
import optimizer_tables
import torch
from omegaconf import OmegaConf

from posbench.analysis.agreement import choose
from posbench.analysis.reading import read_runs
from posbench.catalogue.choices import choices, description, read_row
from posbench.composition.compose import compose
from posbench.config import Config, TaskConfig
from posbench.config.units import number, short_count
from posbench.data.tasks import tasks
from posbench.evaluation.protocols import PROTOCOLS
from posbench.model.architecture import build_architecture
from posbench.model.decoder import Decoder
from posbench.model.size import cache_per_token, training_flops_per_token
from posbench.reporting.figures import draw_all, encode
from posbench.reporting.options import ReportOptions
from posbench.reporting.report import page_of
from posbench.reporting.text import markdown
from posbench.runs import Run, find_runs
from posbench.schemes.base import HOOKS, LOOKING_BACK, Gates, Placement, Scheme, Shape
from posbench.system.console import console
from posbench.verify import MODEL

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "runs" / "reference"
# A question at the head of an experiment's file ends before one of these.
AFTER_QUESTION = r" (?:Source|Published|Not published|Different here|Chosen here|Cost|Fixed)\b"
# Page of results -> the reports on it, as words of `posbench report`.
RESULTS = {
    "headline": ["headline"],
    "headline_rows": [
        "headline headline-windows headline-grape headline-clipped headline-repo headline-sinks headline-path "
        "headline-repo_alone"
    ],
    "headline_prose": ["headline_prose", "headline_prose --by train.lr", "prose_muon"],
    "prediction": ["prediction"],
    "optimizers": ["headline_gpu_adamw headline_gpu_muon --by train.optimizer", "headline_gpu_muon"],
    "extend": ["extend-arms"],
    "heads": [
        "heads-6x48",
        "heads-2x48",
        "heads-2x48-mechanism",
        "heads-2x16",
        "heads-2x16 heads-2x48 heads-6x48 headline_muon-tune/lr=0.002 --by model.num_heads,model.head_dim",
        "heads-2x48-lr=0.002",
        "heads-2x48-adamw",
        "heads-2x48-adamw-6.14M",
        "heads-2x48-adamw-3.07M",
    ],
    "setups": ["setups"],
    "tasks": ["tasks"],
    "exchanged": ["headline-exchanged", "tasks_exchanged"],
    "kexue_25m": ["kexue_25m"],
    "ladder": ["ladder_s", "ladder_m", "ladder_l", "ladder_l ladder_l-rate_0.006 ladder_l-rate_0.012 --by train.lr"],
    "all_schemes": ["all_schemes"],
    "demo": ["demo_2x32"],
    "ideas": [
        "headline_prose-open/lr=0.001",
        "open_models",
        "headline_muon_rows --baseline gqa_qk_rope",
        "headline_muon_rows4",
    ],
    "subjects": ["subjects"],
}
# Sections of a report that its page of results has, besides the first table.
SHOWN = (
    "Pairs|Difference of gaps|Perplexity by length|When schemes begin|Order more than|Step by step|Time and quality|"
    "Worth|Compared with|Effects|What heads"
)


def pages() -> dict[str, str]:
    """Return {path in the repository: text} of every page that this file writes."""
    return {
        "docs/lists/hooks.md": hooks_page(),
        "docs/lists/judge.md": judge_page(),
        "docs/lists/protocols.md": protocols_page(),
        "docs/lists/tasks.md": tasks_page(),
        "docs/lists/experiments.md": experiments_page(),
        "docs/lists/schemes.md": schemes_page(),
        "docs/lists/measurements.md": measurements_page(),
        "docs/lists/packages.md": packages_page(),
        "docs/lists/extending-tables.md": extending_tables.page_of_tables(),
        "docs/lists/optimizer-tables.md": optimizer_tables.page_of_tables(),
        "docs/lists/open-models.md": open_models.page_of_models(),
        "docs/how-far-table.md": how_far.page_of_the_table(),
        "runs/reference/packs.md": packs_page(),
        **pictures(),
    }


def page(title: str, source: str, *parts: str) -> str:
    """Return a page with its title, after a line that says how it is written. Arguments: source, what it is from."""
    head = f"<!-- Written by python docs/site/generated.py from {source}. -->"
    return "\n\n".join([head, f"# {title}", *parts]) + "\n"


def table(heading: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table. Line breaks in cells become spaces."""
    columns = list(heading)
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(" ".join(cell.split()) for cell in line) + " |" for line in lines)


def text_of(thing: object) -> str:
    """Return a docstring as Markdown, in lines of at most 120 characters. Indented blocks stay code."""
    paragraphs = []
    for paragraph in (inspect.getdoc(thing) or "").split("\n\n"):
        is_code = paragraph.startswith("    ")
        paragraphs.append(paragraph if is_code else textwrap.fill(" ".join(paragraph.split()), 120))
    return "\n\n".join(paragraphs)


# ---------------------------------------------------------------- results


def results_page(name: str) -> str:
    """Return the paragraphs, the first tables and the pairs of the reports in RESULTS, without pictures."""
    parts = []
    for words in RESULTS[name]:
        parts += [f"## {words}"] * (len(RESULTS[name]) > 1)
        parts += report_parts(words)
    return page(
        f"Results: {name}",
        "the packs in runs/reference",
        "[Results](../../results.md) says what this means. The command writes the rest too, with pictures.",
        *parts,
    )


def pictures() -> dict[str, str]:
    """Draw the pictures of README and of the results: gaps against tokens, onsets, and the lengths of tasks."""
    ladder = ("ladder_s", "ladder_m", "ladder_l")
    drawn = {}
    for name, plot, experiments, schemes, by in (
        ("headline/gaps", "curves", ("headline", "headline_muon"), ("alibi", "vo_rope", "qk_rope"), "train.optimizer"),
        ("headline/onset", "onset", ("headline",), (), None),
        ("ladder/gaps-by-tokens", "curves", ladder, ("alibi", "qkvo_rope", "vo_rope", "nope", "qk_rope"), "model.name"),
        ("tasks/summary", "summary", ("tasks",), (), None),
    ):
        paths = [REFERENCE / experiment for experiment in experiments]
        summary, rows = read_runs(
            paths, None, console(quiet=True), lambda summary, _, s=schemes: choose(summary, s, ())
        )
        report = page_of(summary, rows, ReportOptions(by=by))
        drawing = encode(draw_all(report.runs, report.sections)[plot], "svg").decode()
        drawn[f"runs/reference/{name}.svg"] = drawing
    return drawn


def report_parts(words: str) -> list[str]:
    """Return what a page of results shows of one report. Arguments: words, of `posbench report`."""
    place_words, _, baseline = words.partition(" --baseline ")
    places, _, by = place_words.partition(" --by ")
    paths = [REFERENCE / place for place in places.split()]
    summary, rows = read_runs(paths, None, console(quiet=True), lambda summary, _: choose(summary, (), ()))
    options = ReportOptions(by=by or None, baseline=baseline or None)
    report = page_of(summary, rows, options)
    first, *others = [section for section in report.sections if section.table is not None]
    command = textwrap.wrap(f"posbench report {words} --runs-dir runs/reference", 110, break_on_hyphens=False)
    parts = ["    " + " \\\n        ".join(command), filled(report.lede), filled(report.paragraph)]
    for section in [first, *(section for section in others if re.match(SHOWN, section.title))]:
        assert section.table is not None
        parts += [f"### {section.title}", markdown(section.table), filled(section.note)]
    return [part for part in parts if part.strip("# ")]


def filled(text: str) -> str:
    """Return a paragraph in lines of at most 120 characters."""
    return textwrap.fill(" ".join(text.split()), 120, break_on_hyphens=False)


# ---------------------------------------------------------------- schemes


def hooks_page() -> str:
    """List the hooks of a scheme, its attributes, and what `bias` gets as `at` and `gates`."""
    hooks = []
    for name in HOOKS:
        method = getattr(Scheme, name)
        arguments = list(inspect.signature(method).parameters)[1:]
        earlier = ["earlier"] if name in LOOKING_BACK else []
        hooks.append([f"`{name}({', '.join(arguments + earlier)})`", inspect.getdoc(method) or ""])
    properties = [name for name, value in vars(Scheme).items() if isinstance(value, property)]
    attributes = [[f"`{name} = {default}`", comment] for name, default, comment in class_attributes(Scheme)]
    attributes += [[f"`{name}`, a property", inspect.getdoc(getattr(Scheme, name)) or ""] for name in properties]
    placement = [
        [f"`at.{name}({', '.join(list(inspect.signature(method).parameters)[1:])})`", inspect.getdoc(method) or ""]
        for name, method in vars(Placement).items()
        if inspect.isfunction(method) and not name.startswith("_") and name != "past" and inspect.getdoc(method)
    ]
    sizes = [[f"`shape.{name}`", comment] for name, _, comment in class_attributes(Shape)]
    sizes.append(["`shape.positions_length`", inspect.getdoc(Shape.positions_length) or ""])
    verify_model = ", ".join(f"`{word.removeprefix('model.')}`" for word in MODEL if word.startswith("model."))
    return page(
        "Hooks and attributes of a scheme",
        "posbench/schemes/base.py",
        "[Your own position scheme](../adding-a-scheme.md) has examples. B sequences, T tokens, H heads, Hkv key\n"
        "heads, D channels per head, C = d_model. The argument `earlier` is optional.",
        table(["hook", "what it does"], hooks),
        "## Attributes",
        table(["attribute and default", "meaning"], attributes),
        "## What `bias` gets",
        table(["of `at`", "what it does"], placement),
        "`gates`: " + text_of(Gates),
        table(["field", ""], [[f"`gates.{name}`", "[B, H, rows, N]"] for name in Gates._fields]),
        "## What the constructor gets",
        "`shape`: " + text_of(Shape) + f" `posbench verify` has a decoder of its own, with {verify_model}.",
        table(["field", "what it is"], sizes),
    )


def class_attributes(cls: type) -> list[tuple[str, str, str]]:
    """Return name, default and comment of each annotated attribute in the class's source, without private ones."""
    source = textwrap.dedent(inspect.getsource(cls))
    lines = source.splitlines()
    [definition] = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    found = []
    for node in definition.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            comment = lines[node.end_lineno - 1].partition("  # ")[2]  # type: ignore[operator]
            if comment and not node.target.id.startswith("_"):
                default = "" if node.value is None else ast.unparse(node.value)
                found.append((node.target.id, default, comment))
    return found


# ---------------------------------------------------------------- judge, protocols, tasks


def judge_page() -> str:
    """List the fields of `posbench judge --json` from its schema."""
    definitions = json.loads((ROOT / "docs" / "loops.schema.json").read_text(encoding="utf-8"))["$defs"]
    rows = []
    for name, field in definitions["judge"]["properties"].items():
        field = {**definitions[field["$ref"].rpartition("/")[2]], **field} if "$ref" in field else field
        values = ", ".join(f"`{value}`" for value in field.get("enum", ()))
        parts = ", ".join(f"`{part}`" for part in field.get("properties", ()))
        description = field.get("description", "")
        description += f" ({values})" * bool(values) + f"; has {parts}" * bool(parts)
        rows.append([f"`{name}`", description])
    return page(
        "What `posbench judge --json` prints",
        "the schema of its JSON",
        "[Loops](../loops.md) says how it is used. Losses and gaps are in nats per token; a number is null if it is\n"
        "unknown or infinite.",
        table(["field", "meaning"], rows),
    )


def protocols_page() -> str:
    """Describe each protocol by the docstrings of its module and class."""
    parts = []
    for name, protocol in PROTOCOLS.items():
        parts += [f"## {name}", text_of(inspect.getmodule(type(protocol))), text_of(type(protocol))]
    return page(
        "Protocols",
        "the docstrings of posbench/evaluation",
        "`posbench eval --protocol NAME`. [Evaluating](../evaluating.md) says how they are used.",
        *parts,
    )


def tasks_page() -> str:
    """Describe each task by the docstrings of its module and class, and what always guessing gives."""
    parts, modules = [], {}
    for name, cls in tasks().items():
        modules.setdefault(cls.__module__, []).append((name, cls))
    for members in modules.values():
        parts += [f"## {', '.join(name for name, _ in members)}", text_of(inspect.getmodule(members[0][1]))]
        for name, cls in members:
            parts.append(textwrap.fill(f"`{name}`: {' '.join((inspect.getdoc(cls) or '').split())}", 120))
            parts.append(chance_of(name))
    return page(
        "The tasks",
        "the docstrings of posbench/data/tasks and conf/data",
        "[Tasks](../tasks.md) says how they are trained and scored. Here answers are not marked.",
        *parts,
    )


def chance_of(name: str) -> str:
    """Return a line with a task's settings in `conf/data/NAME.yaml`, and the accuracy of chance."""
    config = OmegaConf.create({"data": OmegaConf.load(choices("data")[name])})
    settings = OmegaConf.to_container(config.data, resolve=True)
    assert isinstance(settings, dict)
    low, high = settings["lengths"]
    common = ("defaults", "name", "source", "task", "lengths", "longest", "positions")
    options = {key: value for key, value in settings.items() if key not in common}
    chance = tasks()[name](**options).chance(high)
    shown = ", ".join(f"{key}={value}" for key, value in options.items())
    line = (
        f"`data={name}`: trained at {low} to {high} items, tested up to {settings['longest']}; "
        f"{shown or 'no options'}; chance {number(chance, 2)} at {high} items."
    )
    return textwrap.fill(line, 120)


# ---------------------------------------------------------------- experiments and packs


def schemes_page() -> str:
    """List the schemes: formula and source, what a scheme adds to a model, and the experiments with its runs."""
    trained: dict[str, set[str]] = {}
    for run in find_runs(REFERENCE):
        # A search or a branch counts as its experiment.
        name = run.path.relative_to(REFERENCE).parts[0].partition("-")[0]
        trained.setdefault(run.manifest.scheme, set()).add(name)
    base_parameters, base_flops, _ = size_of("nope")
    rows = []
    for name in sorted(choices("scheme")):
        parameters, flops, cache = size_of(name)
        experiments = sorted(trained.get(name, ()))
        shown = ", ".join(experiments[:3])
        if len(experiments) > 3:
            shown += f" and {len(experiments) - 3} more"
        cells = [f"[`{name}`](../../conf/scheme/{name}.yaml)", description("scheme", name).replace("|", r"\|")]
        rows.append(
            [*cells, f"{parameters - base_parameters:+,}", f"{flops / base_flops:.2f}", f"{cache:,.0f}", shown or "–"]
        )
    return page(
        "Schemes",
        "conf/scheme/*.yaml and the packs in runs/reference",
        "`posbench train scheme=NAME`. Parameters: more than `nope`\n"
        "in a model of four layers of 96 with six heads of 16 channels. Step: theoretical FLOPs of a training step\n"
        "at 256 tokens of context, `nope` = 1. Cache: numbers that decoding keeps of such a context, for each of its\n"
        "tokens. Trained: [packs](../../runs/reference/packs.md).",
        table(["scheme", "what it computes, and its source", "parameters", "step", "cache", "trained in"], rows),
    )


@cache
def headline_config() -> Config:
    """Return the configuration of the experiment `headline` with four layers."""
    return compose(["experiment=headline", "model.num_layers=4"])


def size_of(scheme: str) -> tuple[int, float, float]:
    """Return parameters, FLOPs per token of a training step and cached numbers per token of a small model."""
    # Hydra is slow, and only the scheme differs.
    config = replace(headline_config(), scheme=read_row(scheme))
    architecture = build_architecture(config)
    # On the device `meta`, weights have sizes and no memory.
    with torch.device("meta"):
        model = Decoder(architecture, 512)
    parameters = sum(p.numel() for p in model.parameters())
    return parameters, training_flops_per_token(architecture, 512), cache_per_token(architecture)


def experiments_page() -> str:
    """List the experiments with the question and the cost at the heads of their files."""
    rows: dict[bool, list[tuple[float, str, list[str]]]] = {False: [], True: []}
    for name, file in choices("experiment").items():
        if name != "task":  # it takes the name of a task
            question, cost = head_of(file.read_text(encoding="utf-8"))
            hours = re.search(r"about ([\d.,]+|one) H100-hour", cost)
            h100_hours = float(hours[1].replace("one", "1").replace(",", "")) if hours else 0.0
            row = [f"[`{name}`](../../conf/experiment/{name}.yaml)", question, cost or "–"]
            rows[bool(hours)].append((h100_hours, name, row))
    heading = ["experiment", "question", "cost, by `posbench plan`"]
    return page(
        "Experiments",
        "the heads of conf/experiment/*.yaml",
        "`posbench train -m experiment=NAME`. [Experiments](../experiments.md) says how to run, change and write one.",
        "## On two CPU cores",
        table(heading, (row for _, _, row in sorted(rows[False]))),
        "## On GPUs",
        table(heading, (row for _, _, row in sorted(rows[True]))),
    )


def head_of(text: str) -> tuple[str, str]:
    """Return the question (at most two sentences) and the cost ("" if unnamed) at the head of an experiment's file."""
    lines = [line for line in text.split("\ndefaults:")[0].splitlines() if line.startswith("# ")][1:]
    comment = " ".join(" ".join(line.lstrip("# ") for line in lines).split())
    cost = re.search(r"Cost(?: \(posbench plan\)(?:, for one rate)?)?: (.*)$", comment)
    sentences = re.split(r"(?<=[.?]) (?=[A-Za-z`])", re.split(AFTER_QUESTION, comment)[0])
    return " ".join(sentences[:2]), cost[1].rstrip(".") if cost else ""


def measurements_page() -> str:
    """Show the tables of benchmarks/measured.yaml."""
    parts = []
    for entry in OmegaConf.to_container(OmegaConf.load(ROOT / "benchmarks" / "measured.yaml")):
        assert isinstance(entry, dict)
        measured = textwrap.fill(" ".join(entry["measured"].split()), 120)
        parts += [f"## {entry['title']}", measured, table(entry["columns"], entry["rows"])]
    return page(
        "Measurements",
        "benchmarks/measured.yaml",
        "What they mean is in [speed](../internals/speed.md), [statistics](../statistics.md), [loops](../loops.md),\n"
        "[evaluating](../evaluating.md) and [decisions](../internals/decisions.md). Machines are shared: compare\n"
        "ratios within a table.",
        *parts,
    )


def packages_page() -> str:
    """List the packages and modules of posbench, from the commands down, by the first paragraph of their docstrings."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    rows = []
    for name in " : ".join(contracts[0]["layers"]).split(" : "):
        place = ROOT / "posbench" / name
        file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        rows.append([f"`posbench/{name}{'/' if place.is_dir() else '.py'}`", docstring.partition("\n\n")[0]])
    return page(
        "Where the code is",
        "the docstrings of posbench and pyproject.toml",
        "Imports go down this list, never up; `make lint` checks it.",
        table(["", "what it does"], rows),
    )


def packs_page() -> str:
    """List the packs of runs/reference: what was trained, with which seeds and tokens, on what, when."""
    folders: dict[str, list[Run]] = {}
    for run in find_runs(REFERENCE):
        folder = run.path.parents[1].relative_to(REFERENCE).as_posix()
        folders.setdefault(re.sub(r"lr=[\d.]+\d", "lr=*", folder), []).append(run)  # the rates of a search are a row
    rows = [[f"`{name}`", *facts_of(runs)] for name, runs in sorted(folders.items())]
    return page(
        "Packs",
        "the packs in runs/reference",
        "[What packs are](README.md).",
        table(["pack", "runs", "schemes", "seeds", "trained on", "learning rates", "where and when"], rows),
    )


def facts_of(runs: list[Run]) -> list[str]:
    """Return the cells of a folder's row: runs, schemes, seeds, text and tokens, learning rates, device and dates."""
    manifests = [run.manifest for run in runs]
    if manifests[0].subject:
        return [
            str(len(runs)),
            manifests[0].scheme,
            "–",
            f"scored on {runs[0].config.data.name}",
            "–",
            days_of(manifests),
        ]
    names = sorted({manifest.scheme for manifest in manifests})
    config = runs[0].config
    steps = {f"{manifest.num_steps:,} steps" for manifest in manifests}
    tokens = {f"{short_count(manifest.tokens)} tokens" for manifest in manifests}
    amount = ", ".join(sorted(steps if isinstance(config.data, TaskConfig) else tokens))
    return [
        str(len(runs)),
        ", ".join(names) if len(names) < 8 else f"{len(names)} schemes",
        spans([manifest.seed for manifest in manifests]),
        f"{config.data.name}, {amount}, {config.train.optimizer}",
        ", ".join(f"{rate:g}" for rate in sorted(set(map(rate_of, manifests)))),
        places(manifests),
    ]


def rate_of(manifest: Any) -> float:
    """Return a run's peak learning rate."""
    return float(manifest.identity["train.lr"])


def spans(seeds: Iterable[int]) -> str:
    """Return seeds as text: 0 to 4, or 0, 2."""
    ordered = sorted(set(seeds))
    if len(ordered) > 2 and ordered == list(range(ordered[0], ordered[-1] + 1)):
        return f"{ordered[0]} to {ordered[-1]}"
    return ", ".join(map(str, ordered))


def places(manifests: list[Any]) -> str:
    """Return the devices, number formats and days of the runs."""
    devices = sorted({f"{m.device['name']}, {m.device['dtype']}" for m in manifests})
    return f"{'; '.join(devices)}; {days_of(manifests)}"


def days_of(manifests: list[Any]) -> str:
    """Return the days on which the runs began: 2026-11-24 to 2026-11-25."""
    days = sorted({manifest.started[:10] for manifest in manifests})
    return " to ".join(dict.fromkeys((days[0], days[-1])))


if __name__ == "__main__":
    texts = {} if sys.argv[1:] else pages()
    for name in sys.argv[1:] or RESULTS:
        texts[f"docs/lists/results/{name}.md"] = results_page(name)
    for path, text in texts.items():
        (ROOT / path).parent.mkdir(exist_ok=True)
        (ROOT / path).write_text(text, encoding="utf-8")
