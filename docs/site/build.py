"""The pages of the site, as a hook of MkDocs: the documents as they are, and what code and packs say, written anew.

Every number is read from a pack while the site is built. Pages keep the paths that their files have in the repository,
so links between documents need no change; the made ones are `schemes/`, `tasks/`, `results/` and `api.md`.
"""

from __future__ import annotations

import inspect
import re
import sys
import tempfile
from collections.abc import Iterator
from functools import cached_property
from html.parser import HTMLParser
from pathlib import Path
from types import FunctionType
from typing import Any
from urllib.parse import unquote, urlsplit

import scheme_plots

import posbench
from posbench.analysis.agreement import is_of_tasks
from posbench.analysis.comparison import SeedComparison, build
from posbench.analysis.published import agreements, all_published
from posbench.analysis.table import read
from posbench.catalogue.choices import choices, description, read_row
from posbench.composition.compose import compose
from posbench.config import ConfigError
from posbench.data.tasks import tasks
from posbench.model.decoder import build_model
from posbench.reference.schemes import definitions
from posbench.reporting.figures import by_head, encode, inline_svg, style
from posbench.reporting.protocols import mechanism
from posbench.reporting.report import report
from posbench.reporting.section import Plot
from posbench.reporting.sections import published_table
from posbench.reporting.text import markdown
from posbench.runs import find_runs
from posbench.runs.finding import folder_of
from posbench.schemes import scheme_class
from posbench.system.console import console, say

ROOT = Path(__file__).parents[2]
GUIDES = ("first-ablation", "adding-a-scheme", "tasks", "experiments", "evaluating", "statistics", "loops")
GUIDES += ("scaling", "optimizers", "extending", "from-elsewhere", "vectors")
PILOTS = ("recipe", "headline-tune")  # folders of packs without a page: their losses are not compared
PICTURE = re.compile(r"^!\[([^\]]*)\]\(([^)\s]+\.svg)\)$", re.MULTILINE)

# ---------------------------------------------------------------- pages


def pages(root: Path = ROOT) -> dict[str, str]:
    """Path -> Markdown of every page. Arguments: root, the folder with README.md, docs/ and runs/reference/."""
    documents = [*root.glob("*.md"), *(root / "docs").rglob("*.md")]
    documents += [*(root / "runs" / "reference").glob("*.md"), *(root / "benchmarks").glob("*.md")]
    written = {
        file.relative_to(root).as_posix(): with_pictures(without_note(file.read_text("utf-8")), file.parent)
        for file in documents
    }
    files = (root / "runs" / "reference").rglob("*.zip")
    folders = [folder_of(file) for file in files if file.parent.name not in PILOTS]
    packs = sorted({folder.with_name(folder.name.removesuffix("-tune")) for folder in folders})  # or of its search
    names = {pack.relative_to(root / "runs" / "reference").as_posix(): pack for pack in packs}
    reports = {name: report_of(pack, name) for name, pack in names.items()}
    written |= {f"results/{name}.md": page for name, page in reports.items()}
    ours = [build(*of) for of in (read([pack]) for pack in packs if find_runs(pack)) if not is_of_tasks(of[0])]
    written["results/published.md"] = published_page(ours)
    heads = heads_of(ours)
    rows = {name: list(rows_of(page)) for name, page in reports.items()}
    written |= {f"schemes/{name}.md": scheme_page(name, rows, heads.get(name, "")) for name in choices("scheme")}
    written |= {f"tasks/{name}.md": task_page(name, reports) for name in tasks()}
    lines = [f"| [{name}]({name}.md) | {description('scheme', name)} |" for name in choices("scheme")]
    written["schemes/index.md"] = "\n".join(["# Schemes", "", "| scheme | what it does |", "|---|---|", *lines])
    written["api.md"] = api_page()
    return written


def without_note(text: str) -> str:
    """Return the page without the first line of a written one: a title must come first to be the page's in the menu."""
    return re.sub(r"\A<!-- Written by .* -->\n+", "", text)


def with_pictures(text: str, folder: Path) -> str:
    """Return the page with its drawings inlined, so that they take its colours."""

    def drawn(match: re.Match[str]) -> str:
        file = folder / match[2]
        drawing = re.sub(r"\n\s*", "\n", inline_svg(file.read_text("utf-8"), file.stem))
        return f'<figure class="picture {file.stem}">{drawing}<figcaption>{match[1]}</figcaption></figure>'

    return PICTURE.sub(drawn, text)


def report_of(pack: Path, name: str) -> str:
    """Return the report of a pack's runs, as `posbench report` writes it, with a title."""
    say(f"report of {name}")
    with tempfile.TemporaryDirectory() as folder:
        report(pack, output=folder, console=console(quiet=True), title=name)
        page = (Path(folder) / "report.md").read_text("utf-8").replace("# posbench: ", "# ", 1)
        # The site has no CSV files.
        return with_pictures(re.sub(r"\[(\w+\.csv)\]\(\1\)", r"\1", page), Path(folder))


def rows_of(page: str) -> Iterator[tuple[str, str, str, str]]:
    """Return the rows of a report's tables of schemes: the table's title, its heading, the scheme, and the row."""
    title = heading = ""
    for line in page.splitlines():
        if line.startswith("#"):
            title = line.lstrip("# ")
        elif line.startswith("scheme | "):
            heading = line
        elif not line:
            heading = ""
        elif heading and not line.startswith(":--"):
            yield title, heading, re.split(r" [|(·]", line)[0], line


def scheme_page(name: str, rows: dict[str, list[tuple[str, str, str, str]]], heads: str) -> str:
    """Write a scheme's page: what it is, how it looks, what trained heads do, its row in every table, its code."""
    say(f"scheme {name}")
    kind = read_row(name).kind
    cls = scheme_class(kind)
    parts = [f"# {name}", description("scheme", name), f"## {cls.__name__}", prose(cls), picture(name), heads]
    found: dict[tuple[str, str], list[str]] = {}
    for pack, of_pack in rows.items():
        for title, heading, scheme, line in of_pack:
            if scheme == name:
                if title == pack:  # a report's first table
                    title = "Loss" if " loss" in heading else "Tasks: up to which length"
                figures = line.partition(" | ")[2]
                found.setdefault((title, heading), []).append(f"[{pack}](../results/{pack}.md) | {figures}")
    parts.append("## Its row in every table")
    for title in dict.fromkeys(title for title, _ in found):
        parts.append(f"### {title}")
        for (of_title, heading), lines in found.items():
            if of_title == title:
                rule = "|".join([":--", *["--:"] * heading.count("|")])
                parts.append("\n".join([heading.replace("scheme", "runs", 1), rule, *lines]))
    parts += ["## Code", fenced("yaml", choices("scheme")[name].read_text("utf-8"))]
    parts.append(fenced("python", Path(inspect.getfile(cls)).read_text("utf-8")))
    if kind in definitions():
        parts += [
            "The definition that it is held to, in NumPy:",
            fenced("python", inspect.getsource(definitions()[kind])),
        ]
    return "\n\n".join(filter(None, parts))


def picture(name: str) -> str:
    """Draw what the scheme does by distance before it learns; return an empty string if nothing can be drawn."""
    config = compose([f"scheme={name}", *scheme_plots.MODEL, f"train.context_length={scheme_plots.LONGEST}"])
    try:
        scheme = build_model(config, 2).scheme
        # A scheme with a longest input is drawn up to its last position.
        drawn = scheme_plots.curves_of(scheme.first, min(scheme_plots.LONGEST, (scheme.longest or 1 << 20) - 1))
    except (ConfigError, AttributeError):
        return ""
    curves = {what: (drawn.distances, getattr(drawn, what)) for what in ("score", "value")}
    curves = {what: line for what, line in curves.items() if line[1] is not None}
    if not curves or config.scheme.attention:
        return ""
    drawing = inline_svg(encode(scheme_plots.grid(curves, ""), "svg").decode(), name)
    said = {"score": "what the scheme adds to a score", "value": "how much of a value arrives unchanged"}
    caption = f"Before training, by distance: {', and '.join(said[what] for what in curves)}."
    return f'<figure class="picture curves-{len(curves)}">{drawing}<figcaption>{caption}</figcaption></figure>'


def heads_of(ours: list[SeedComparison]) -> dict[str, str]:
    """Scheme -> the pictures of its heads, of the first of our experiments whose runs were scored by `mechanism`."""
    found: dict[str, str] = {}
    for comparison in ours:
        heads_of_all = mechanism.read_heads(comparison.runs, comparison.schemes, comparison.training_length)
        for scheme, heads in heads_of_all.groupby("scheme"):
            if scheme not in found:
                name = pack_of(comparison)
                figures = [
                    f'<figure class="picture">{drawn(plot, str(scheme))}'
                    f"<figcaption>{plot.caption}</figcaption></figure>"
                    for plot in mechanism.head_plots(heads)
                ]
                trained = (
                    f"After training, seed {heads['seed'].iloc[0]} of [{name}](../results/{name}.md); a line a head."
                )
                found[str(scheme)] = "\n\n".join(["## What its heads do", trained, *figures])
    return found


def drawn(plot: Plot, scheme: str) -> str:
    """Return the picture of a scheme's heads, as an element of the page."""
    with style():
        figure = by_head(plot)
    return inline_svg(encode(figure, "svg").decode(), f"{scheme}-{plot.name}")


def pack_of(comparison: SeedComparison) -> str:
    """Return the name of the experiment that these runs belong to."""
    return Path(comparison.runs["path"].iloc[0]).parents[1].name


def task_page(name: str, reports: dict[str, str]) -> str:
    """Write a task's page: what it is, with a problem; its tables, options and code."""
    cls = tasks()[name]
    parts = [f"# {name}", prose(inspect.getmodule(cls)), prose(cls)]
    for pack, page in reports.items():
        if own := re.search(rf"^## {name}\n(.*?)(?=^## )", page, re.MULTILINE | re.DOTALL):
            parts += [f"## [{pack}](../results/{pack}.md)", own[1].strip()]
    options = choices("data")[name].read_text("utf-8")
    parts += ["## Code", fenced("yaml", options), fenced("python", Path(inspect.getfile(cls)).read_text("utf-8"))]
    return "\n\n".join(parts)


def published_page(ours: list[SeedComparison]) -> str:
    """Each publication beside those of our runs that have most of its schemes."""
    parts = ["# Published results beside ours", "Other models, text and sizes: compare orders and signs, never levels."]
    for published in all_published().values():
        schemes = {scheme for each in published.measurements for scheme in each.values}
        comparison = max(ours, key=lambda c: (len(schemes & set(c.schemes)), len(c.seeds)))
        shown = agreements(published, comparison)
        if shown:
            name = pack_of(comparison)
            facts = [f"- {what}: {text}" for what, text in published.setup.items()]
            parts += [f"## {published.title}", f"[Source]({published.source}). Ours: [{name}]({name}.md)."]
            parts += ["\n".join([*facts, *(f"- {note}" for note in published.notes)])]
        for each in shown:
            parts += [f"{each.theirs.description}; ours: {each.ours}.", markdown(published_table(each))]
    return "\n\n".join(parts)


def api_page() -> str:
    """Every public name with its signature and its docstring."""
    parts = ["# The Python API", prose(posbench)]
    for name in posbench.__all__:
        value = getattr(posbench, name)
        if callable(value):
            signature = str(inspect.signature(value)) if inspect.isfunction(value) else ""
            signature = re.sub(r"(: |-> )'([^']+)'", r"\1\2", signature)
            parts += [f"## {name}", fenced("python", f"posbench.{name}{signature}"), prose(value), members(value)]
    return "\n\n".join(parts)


def members(thing: Any) -> str:
    """Return a list of a class's own attributes and methods that have docstrings, with their first lines, or ""."""
    kinds = (property, cached_property, FunctionType)
    public = [name for name, value in vars(thing).items() if isinstance(value, kinds) and not name.startswith("_")]
    texts = {name: inspect.getdoc(vars(thing)[name]) for name in public} if inspect.isclass(thing) else {}
    return "\n".join(f"- `.{name}`: {text.splitlines()[0]}" for name, text in texts.items() if text)


def prose(thing: Any) -> str:
    """Return a docstring as Markdown: its parts (`Arguments:`, `Raises:`) are paragraphs."""
    text = inspect.getdoc(thing) or ""
    return re.sub(r"\n(Arguments|Options|Returns|Raises|Example):", r"\n\n**\1:**", text)


def fenced(language: str, text: str) -> str:
    return f"```{language}\n{text.strip()}\n```"


# ---------------------------------------------------------------- MkDocs


def on_config(config: Any) -> Any:
    """Set the order of the pages (MkDocs calls this first)."""
    written = on_config.pages = pages()  # type: ignore[attr-defined]
    below = {group: sorted(name for name in written if name.startswith(f"{group}/")) for group in ("tasks", "results")}
    schemes = ["schemes/index.md", *sorted(f"schemes/{name}.md" for name in choices("scheme"))]
    internals = sorted(name for name in written if name.startswith("docs/internals/"))
    lists = sorted(name for name in written if re.match("docs/lists/[^/]+$", name))
    findings = sorted(name for name in written if name.startswith("docs/lists/results/"))
    config.nav = [
        {"Home": "README.md"},
        {"Guides": [f"docs/{name}.md" for name in GUIDES]},
        {
            "Results": [
                "docs/results.md",
                "docs/how-far-a-small-result-carries.md",
                "docs/how-far-table.md",
                {"Tables": findings},
                {"Whole reports": below["results"]},
                {"Packs": ["runs/reference/README.md", "runs/reference/packs.md"]},
            ]
        },
        {"Schemes": schemes},
        {"Tasks": below["tasks"]},
        {"Reference": ["api.md", *lists, *internals, "benchmarks/README.md", "CONTRIBUTING.md", "CHANGELOG.md"]},
    ]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages and what they link to in the repository (MkDocs calls this with the files of assets/)."""
    from mkdocs.structure.files import File

    written: dict[str, str] = on_config.pages  # type: ignore[attr-defined]
    for path, text in written.items():
        files.append(File.generated(config, path, content=text))
        for link in re.findall(r"\]\(([^)#\s:]+)", text):
            target = (ROOT / path).parent / link
            if target.is_file() and target.suffix not in (".md", ".svg"):
                name = target.resolve().relative_to(ROOT).as_posix()
                if files.get_file_from_path(name) is None:
                    files.append(File.generated(config, name, content=target.read_bytes()))
    return files


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Put worker.js in place of the script that the theme would fetch for search (MkDocs calls this per page)."""
    say(f"page {page.url}")
    base = "../" * page.url.count("/")
    return output.replace("https://unpkg.com/iframe-worker/shim", f"{base}worker.js")


def on_post_build(config: Any) -> None:
    """Check all pages (MkDocs calls this last). Raises: SystemExit if a link is dead or a page fetches something."""
    (Path(config.site_dir) / "404.html").unlink()  # its links work at one address alone
    faults = broken(Path(config.site_dir))
    if faults:
        sys.exit("\n".join(faults))


class _Page(HTMLParser):
    """What a page links to, what it fetches, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        of = {name: value or "" for name, value in attrs}
        self.anchors |= {of[name] for name in ("id", "name") if name in of}
        if tag == "a" and "href" in of:
            self.links.append(of["href"])
        elif tag not in ("use", "clippath"):
            self.fetched += [of[name] for name in ("src", "href", "poster") if of.get(name)]


def broken(site: Path) -> list[str]:
    """Dead links and anchors of a built site, and what a page would fetch from elsewhere."""
    found = {file: _Page(file.read_text("utf-8")) for file in sorted(site.rglob("*.html"))}
    faults = []
    for file, page in found.items():
        for link in page.links + page.fetched:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if link in page.fetched and parts.scheme != "data":
                    faults.append(f"{file}: fetches {link}")
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            target = target / "index.html" if target.is_dir() else target
            is_dead = not target.is_file() or link.startswith("/")
            if is_dead or (parts.fragment and target in found and unquote(parts.fragment) not in found[target].anchors):
                faults.append(f"{file}: {link} leads nowhere")
    for file in (*site.rglob("*.css"),):
        faults += [
            f"{file}: fetches {url}" for url in re.findall(r"url\([\"']?(https?:[^)]+)", file.read_text("utf-8"))
        ]
    return faults
