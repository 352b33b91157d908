"""The notebook, the lists and the site are what their generators make of documents, code and packs."""

import json
import re
import shlex
from pathlib import Path

import generated
import notebook
import pytest

from tests.cli.commands import posbench  # noqa: F401

ROOT = Path(__file__).parents[1]


def test_the_notebook_is_the_page():
    page = (ROOT / "docs/first-ablation.md").read_text(encoding="utf-8")
    written = (ROOT / "docs/first-ablation.ipynb").read_text(encoding="utf-8")
    assert written == notebook.notebook(page), "python docs/site/notebook.py"
    code = ["".join(cell["source"]) for cell in json.loads(written)["cells"] if cell["cell_type"] == "code"]
    assert len(code) == 8 and sum(text.startswith("!posbench") for text in code) == 5


# These read the runs of every rate, which takes a minute.
OF_RATES = (
    (generated.extending_tables, "page_of_tables"),
    (generated.optimizer_tables, "page_of_tables"),
    (generated.how_far, "page_of_the_table"),
)


@pytest.mark.parametrize("left_out", [OF_RATES, pytest.param((), marks=pytest.mark.slow)], ids=["fast", "all"])
def test_lists_are_what_code_configurations_and_packs_say(left_out, monkeypatch):
    # It builds a model of every family, which takes minutes: tests/test_open_models.py.
    monkeypatch.setattr(generated.open_models, "page_of_models", lambda: None)
    for module, function in left_out:
        monkeypatch.setattr(module, function, lambda: None)
    if left_out:
        monkeypatch.setattr(generated, "pictures", dict)
    written = {path: text for path, text in generated.pages().items() if text is not None}
    stale = [path for path, text in written.items() if (ROOT / path).read_text(encoding="utf-8") != text]
    assert not stale, "python docs/site/generated.py"
    assert set(generated.choices("experiment")) - {"task"} == set(
        re.findall(r"^\| \[`(\w+)`\]", written["docs/lists/experiments.md"], re.MULTILINE)
    )


# Every result page takes seconds to make; `headline` is checked in the fast tests too.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "headline" else pytest.mark.slow) for name in generated.RESULTS]
)
def test_a_page_of_results_is_what_its_packs_say(name):
    written = (ROOT / f"docs/lists/results/{name}.md").read_text(encoding="utf-8")
    assert written == generated.results_page(name), f"python docs/site/generated.py {name}"


# Figures of docs/results.md that no report has, and why they may be there.
NOT_OF_A_REPORT = {
    "0.07": "tests/analysis/test_claims.py",
    "2.307": "tests/evaluation/test_kneser_ney.py",
    "2.150": "tests/evaluation/test_kneser_ney.py",
    "0.96": "tests/analysis/test_stability.py",
    **dict.fromkeys(("0.142", "0.029", "0.023"), "tests/analysis/test_extending.py"),
    **dict.fromkeys(("0.091", "0.52", "0.25"), "tests/analysis/test_optimizers.py"),
    **dict.fromkeys(
        ("0.015", "0.012", "0.005", "0.009", "0.0018", "0.0012"), "tests/analysis/test_long_range_order.py"
    ),
    **dict.fromkeys(("2.14", "0.9", "0.95", "0.1", "1.07", "0.90", "0.7"), "tests/analysis/test_claims.py"),
    **dict.fromkeys(("0.186", "0.026", "0.326", "0.113", "0.159", "0.067"), "tests/analysis/test_claims.py"),
    **dict.fromkeys(("0.238", "0.027", "0.025", "0.135", "0.052", "0.056"), "tests/analysis/test_claims.py"),
    **dict.fromkeys(("0.022", "0.051", "0.040", "0.107", "0.097", "0.082", "0.072"), "tests/analysis/test_claims.py"),
    **dict.fromkeys(("4.436", "2.058"), "tests/analysis/test_extending.py"),
    **dict.fromkeys(("24.6", "0.08", "0.06"), "a prediction"),
    **dict.fromkeys(("0.065", "0.089", "6.14"), "published, and a size"),
    **dict.fromkeys(("0.40", "0.05"), "pilots, which are not reported"),
    **dict.fromkeys(("0.016",), "by another program"),
    **dict.fromkeys(
        ("3.11", "2.8", "4.5", "0.17", "0.43", "0.94", "3.07", "4.1", "8.2", "12.3"), "sizes of text, models and runs"
    ),
}


def test_each_figure_of_the_findings_is_in_a_report_that_its_section_links_to():
    page = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    checked = 0
    for section in re.split(r"^#+ ", page, flags=re.MULTILINE):
        reports = set(re.findall(r"\(lists/results/(\w+)\.md", section))
        text = "".join((ROOT / f"docs/lists/results/{name}.md").read_text(encoding="utf-8") for name in reports)
        for figure in re.findall(r"(?<![\d.])\d+\.\d+(?![\d.]*/)", re.sub(r"\]\([^)]*\)", "", section)):
            is_there = re.search(rf"(?<![\d.]){re.escape(figure)}(?!\d)", text)
            assert is_there or figure in NOT_OF_A_REPORT, (figure, section.partition("\n")[0])
            checked += bool(is_there)
    assert checked > 60


def test_no_page_of_results_is_left_over():
    assert {file.stem for file in (ROOT / "docs/lists/results").iterdir()} == set(generated.RESULTS)


@pytest.mark.slow
def test_the_notebook_runs_in_its_small_form(posbench):  # noqa: F811
    """Run the cells in order, with a tiny model of bytes and two steps in place of 500k tokens."""
    small = ["model=tiny", "tokenizer=bytes", "data.cache_dir=cache", "train.context_length=32", "train.batch_size=4"]
    small += ["train.validation_tokens=256", "hydra/launcher=basic"]
    exec(notebook.TEXT, {})
    for file in sorted(Path("notes").iterdir())[::3]:
        file.unlink()
    for kind, text in notebook.cells((ROOT / "docs/first-ablation.md").read_text(encoding="utf-8")):
        for line in text.replace("\\\n", "").splitlines() if kind == "code" and text.startswith("!posbench") else ():
            words = shlex.split(line)[1:]
            shorter = {"train.tokens=500k": "train.steps=2", "seed=0,1,2": "seed=0"}
            words = [shorter.get(word, word) for word in words]
            if words[0] in ("train", "prepare"):
                words += small if words[0] == "train" else small[1:3]
            result = posbench(*(word for word in words if word not in ("--jobs", "2")))
            assert result.status == 0, (line, result)
    assert Path("runs/mine/report/gaps.svg").is_file()
