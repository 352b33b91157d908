"""Names stay inside the runs folder, and say nothing to a terminal, a page or a spreadsheet."""

from __future__ import annotations

import ast
import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from rich.progress import Progress, TextColumn
from rich.table import Table as RichTable
from rich.text import Text

from posbench import cli, compose
from posbench.composition import checked
from posbench.config import ConfigError, check_name
from posbench.machine.files import sealed
from posbench.machine.terminal import Terminal
from posbench.runs import run_folder
from tests.cli.commands import Give, left

NAMES = [
    "..",
    ".",
    ".hidden",
    "../x",
    "x/../../y",
    "x/y",
    "/etc",
    "\\\\host\\share",
    "a\0b",
    "a\nb",
    "a\rb",
    "x" * 101,
    "x" * 300,
    "",
    " ",
    "a b",
    "é",
    "-rf",
    "~",
    "$HOME",
    "`id`",
    "a;b",
    "[red]",
    "<b>",
    "\x1b[31m",
    "=cmd()",
    "@x",
    "%2e%2e",
    "a:b",
    "a*",
]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_name_that_is_no_plain_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"experiment_name=.* cannot name a folder"):
        check_name("experiment_name", name)


@pytest.mark.parametrize("field", ["experiment_name", "scheme.name", "experiment.name"])
def test_names_of_folders_are_held_to_that_in_every_configuration(field: str) -> None:
    mapping = compose().to_mapping()
    *groups, last = field.split(".")
    place = mapping[groups[0]] if groups else mapping
    place[last] = "a b"
    with pytest.raises(ConfigError, match=f"{field}='a b' cannot name a folder"):
        checked(mapping)


def test_a_plain_name_stays_inside(posbench: Give) -> None:
    config = compose()
    for name in ("a", "vo_rope", "base=1e6", "v1.2+x-y", "x" * 100):
        folder = run_folder(replace(config, experiment_name=name, scheme=replace(config.scheme, name=name)))
        assert folder.resolve().is_relative_to(Path("runs").resolve()) and len(folder.parts) == 4


@pytest.mark.parametrize("place", ["demo", "demo/nope", "demo/nope/seed=0"])
def test_a_link_out_of_the_runs_folder_is_not_followed(posbench: Give, short: list[str], place: str) -> None:
    Path("elsewhere").mkdir()
    link = Path("runs") / place
    link.parent.mkdir(parents=True)
    link.symlink_to(Path("elsewhere").absolute())
    refusal = posbench("train", *short, "scheme=nope").refusal
    assert f"runs/{place} is a symbolic link" in refusal and "runs_dir=" in refusal
    assert list(Path("elsewhere").iterdir()) == []


def test_the_runs_folder_itself_may_be_a_link(posbench: Give, short: list[str]) -> None:
    Path("elsewhere").mkdir()
    Path("runs").symlink_to("elsewhere")
    assert posbench("train", *short, "scheme=nope").status == 0
    assert Path("elsewhere/demo/nope/seed=0/run.json").is_file()


def test_links_among_runs_are_not_read(posbench: Give, runs: Path) -> None:
    (runs / "demo" / "alias").symlink_to(runs / "demo" / "nope")
    said = posbench("eval", "demo", "--length", "64")
    assert said.status == 0 and "alias" not in said.out + said.error


HOSTILE = "[red]=cmd()|'<script>alert(1)</script>\x1b[31m\x07\u202e](javascript:alert(2))"


@pytest.fixture
def hostile(runs: Path) -> Path:
    """Runs whose free texts, manifests and settings say things to terminals and pages."""
    for run in runs.glob("demo/*/seed=*"):
        manifest = json.loads((run / "run.json").read_text())
        manifest["device"]["name"] = manifest["versions"]["torch"] = HOSTILE
        if run.parent.name == "nope":
            manifest["scheme"] = HOSTILE
        (run / "run.json").write_text(json.dumps(sealed(manifest)))
        config = yaml.safe_load((run / "config.yaml").read_text())
        config["experiment"]["description"] = config["experiment"]["source"] = HOSTILE
        config["tracking"]["project"] = f"{HOSTILE}{run.parent.name}"
        (run / "config.yaml").write_text(yaml.safe_dump(config))
    return runs


@pytest.mark.parametrize(
    "words",
    [
        ["eval", "demo", "--length", "64"],
        ["compare", "demo/nope/seed=0", "demo/vo_rope/seed=0"],
    ],
    ids=lambda words: words[0],
)
def test_hostile_texts_are_shown_and_not_obeyed(posbench: Give, hostile: Path, words: list[str]) -> None:
    before = set(left(hostile))
    said = posbench(*words)
    assert said.status in (0, 2) and "Traceback" not in said.error, said.error
    assert "checksum" not in said.error, "the manifests are believed"
    for text in (said.out, said.error):
        assert not set(text) & {"\x1b", "\x07", "\u202e"}
    for name in set(left(hostile)) - before:
        if not name.endswith((".md", ".html", ".csv", ".svg")):
            continue
        text = (hostile / name).read_text()
        assert not set(text) & {"\x1b", "\x07", "\u202e"}, name
        if not name.endswith(".csv"):
            assert "<script>alert" not in text, name
            assert name.endswith(".html") or "](javascript:" not in text, name
        else:
            cells = [cell for row in csv.reader(io.StringIO(text)) for cell in row]
            assert not [cell for cell in cells if cell.startswith(("=", "@", "\t", "\r"))], name


@pytest.mark.parametrize("words", [["eval", "{}"], ["report", "{}"], ["compare", "{}", "{}"], ["verify", "{}"]])
def test_what_is_typed_is_echoed_without_control_characters(posbench: Give, words: list[str]) -> None:
    said = posbench(*(word.format("x\x1b[31m[red]\x07") for word in words))
    assert said.status == 2 and not set(said.error + said.out) & {"\x1b", "\x07"}
    assert "[red]" in said.error, "as it was typed, not as markup"


CHOICES = [
    ["train", "scheme=../own/scheme/evil"],
    ["train", "scheme=../../../../../../../../../../etc/passwd"],
    ["train", "scheme=/etc/passwd"],
    ["train", "+schema='../scheme/nope'"],
    ["train", "model=../model/tiny"],
    ["train", "-m", "scheme=nope,../scheme/nope"],
    ["train", "--config-dir", "own", "experiment=lists"],
    ["train", "--config-dir", "own", "experiment=paths"],
    ["train", "-m", "--config-dir", "own", "experiment=sweeps"],
    ["train", "-m", "--config-dir", "own", "scheme=nope,lists"],
    ["plan", "scheme=nope,../scheme/nope"],
    ["verify", "../scheme/nope"],
    ["bench", "--schemes", "nope,../scheme/nope"],
]


@pytest.mark.parametrize("given", CHOICES, ids=lambda given: " ".join(given))
def test_the_name_of_a_choice_leads_to_no_file_elsewhere(posbench: Give, given: list[str]) -> None:
    for place, content in {
        "own/scheme/evil.yaml": "name: evil\nkind: nope\n",
        "own/experiment/lists.yaml": "# @package _global_\ndefaults: [{override /scheme: ../scheme/nope}]\n",
        "own/experiment/paths.yaml": "# @package _global_\ndefaults: [/../own/scheme/evil]\n",
        "own/scheme/lists.yaml": "defaults: [../scheme/evil@]\n",
        "own/experiment/sweeps.yaml": "# @package _global_\nhydra: {sweeper: {params: {scheme: 'nope,../x'}}}\n",
    }.items():
        Path(place).parent.mkdir(parents=True, exist_ok=True)
        Path(place).write_text(content)
    before = left(Path.cwd())
    refusal = posbench(*given).refusal
    assert "cannot be the name of a choice: give a name from conf/" in refusal
    assert left(Path.cwd()) == before


def test_a_list_of_defaults_is_written_out(posbench: Give) -> None:
    file = Path("own/experiment/mine.yaml")
    file.parent.mkdir(parents=True)
    file.write_text("# @package _global_\nx: [{override /scheme: ../scheme/nope}]\ndefaults: ${x}\n")
    refusal = posbench("train", "--config-dir", "own", "experiment=mine").refusal
    assert "mine.yaml: defaults='${x}' is not a list" in refusal


def test_a_terminal_shows_what_others_wrote_and_obeys_none_of_it() -> None:
    """In lines, cells, titles and bars, with and without colours."""
    for colours in (True, False):
        file = io.StringIO()
        terminal = Terminal(file=file, force_terminal=colours, width=300)
        table = RichTable(HOSTILE, title=Text(HOSTILE))
        table.add_row(Text(HOSTILE, style="bold red" if colours else ""))
        bar = Progress(TextColumn("{task.description}", markup=False), console=terminal)
        with bar:
            bar.add_task(HOSTILE)
        for what in (HOSTILE, Text(HOSTILE), table):
            terminal.print(what, markup=False)
        shown = re.sub(r"\x1b\[(\?25[hl]|[0-9;]*m|\d?[AK])", "", file.getvalue())  # rich's own codes
        assert not set(shown) & {"\x1b", "\x07", "\u202e"} and r"\x1b[31m" in shown and r"\u202e" in shown


def test_there_is_one_door_to_the_terminal() -> None:
    """No other file makes a console or writes to standard output and error: `Terminal` and `say` do."""
    doors = {"machine/terminal.py", "machine/notices.py"}
    ways = {"Console", "print", "sys.stdout.write", "sys.stderr.write"}
    package = Path(cli.__file__).parent
    found = {
        (str(file.relative_to(package)), ast.unparse(node.func))
        for file in package.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ways
    }
    others = {(file, way) for file, way in found if file not in doors}
    of_hydra = ("composition/application.py", "sys.stdout.write")  # what it printed, made inert
    assert others == {of_hydra, ("reporting/report.py", "Console")}


def test_folders_of_hostile_names_are_shown_inert(posbench: Give, runs: Path) -> None:
    place = runs / "a\x1b]0;owned\x07\u202eb"
    (runs / "demo").rename(place)
    for words in (["eval", "--length", "64"], ["compare", *(str(place / "nope" / f"seed={n}") for n in (0, 1))]):
        said = posbench(*words)
        assert said.status in (0, 2) and not set(said.out + said.error) & {"\x1b", "\x07", "\u202e"}
        assert words[0] == "compare" or (r"a\x1b]0;owned" in said.out and r"\u202eb" in said.out)


def test_a_configuration_is_shown_inert(posbench: Give) -> None:
    file = Path("own/experiment/mine.yaml")
    file.parent.mkdir(parents=True)
    file.write_text('# @package _global_\nexperiment: {name: mine, description: "a\\u202eb\\e[31mc"}\n')
    for flags in (["--cfg", "job"], ["--info", "config"]):
        said = posbench("train", "--config-dir", "own", "experiment=mine", *flags)
        assert said.status == 0 and "description" in said.out and not set(said.out + said.error) & {"\x1b", "\u202e"}
