"""The report as it is written and printed."""

import io
import json
import math
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from posbench.config.units import plus_minus
from posbench.reporting import figures
from posbench.reporting.report import report
from posbench.reporting.section import Format, Plot, Table
from posbench.reporting.text import latex
from posbench.runs import Run, find_runs
from tests.analysis.fabricate import World, comparison, fabricate, run_of, searched, write_evaluation
from tests.refusals import refuses

REFERENCE = Path("runs/reference")


def written(places, target, **options):
    """Return the Markdown of a report, and what a terminal of 80 columns shows."""
    console = Console(file=io.StringIO(), width=80)
    report(places, output=target, console=console, **options)
    return (target / "report.md").read_text(), console.file.getvalue()


@pytest.fixture
def undrawn(monkeypatch):
    """Leave out the figures of reports, which take most of their time."""
    monkeypatch.setattr("posbench.reporting.figures.draw_all", lambda c, sections: {})


@pytest.fixture(scope="module")
def full(experiment, tmp_path_factory):
    """Return the report of the fabricated experiment, with all its parts."""
    target = tmp_path_factory.mktemp("report")
    written(experiment, target, against="kexue-10862", latex=True)
    return target


@pytest.mark.slow
def test_every_figure_of_the_tables_is_in_the_csv_files(full):
    cells, text = pd.read_csv(full / "table.csv", keep_default_na=False), (full / "report.md").read_text()
    alibi = cells[(cells["scheme"] == "alibi") & (cells["metric"] == "loss")].set_index(["protocol", "length"])
    row = alibi.loc[("validation", 256)]
    half = (float(row["gap_high"]) - float(row["gap_low"])) / 2
    shown = plus_minus(float(row["gap"]), half, sign=True)
    row_text = rf"^alibi \| worse \| 4 \| \w+ \| [\d.]+ ±[\d.]+ \| {re.escape(shown)} \| 1/3$"
    assert re.search(row_text, text, re.MULTILINE)
    assert f"{float(alibi.loc[('fixed', 2048), 'gap']):+.3f}" in text
    described = pd.read_csv(full / "columns.csv", keep_default_na=False)
    assert set(described["file"]) == {file.name for file in full.glob("*.csv")} - {"columns.csv"}
    assert (described["meaning"] != "").all()
    assert set(re.findall(r"\]\((\S+\.csv)\)", text)) == {file.name for file in full.glob("*.csv")}


@pytest.mark.slow
def test_the_loss_of_each_seed_is_the_last_table_of_the_page_only(full):
    runs = pd.read_csv(full / "runs.csv").set_index(["scheme", "seed"])["loss"]
    text = (full / "report.md").read_text().partition("## Losses of each seed")[2]
    losses = " | ".join(f"{runs['alibi', seed]:.4f}" for seed in range(4))
    assert "scheme | seed 0 | seed 1 | seed 2 | seed 3\n" in text and f"alibi | {losses}\n" in text
    assert re.findall("^## (.*)$", text, re.MULTILINE) == ["Setup"]


@pytest.mark.slow
def test_every_picture_is_in_both_pages_and_wide_tables_scroll(full):
    text, page = ((full / f"report.{kind}").read_text() for kind in ("md", "html"))
    pictures = set(re.findall(r"\]\((\S+\.svg)\)", text))
    assert pictures == {file.name for file in full.glob("*.svg")} and len(pictures) == 6
    assert page.count("<figure ") == 6 and "<img" not in page and "<script src" not in page
    assert "http:" not in page[:2000] and page.count("#fff") == 1, "pictures are as dark as the page"
    assert page.count("<table>") == page.count('<div class="scroll"><table>') == text.count("\n:-- |")


@pytest.mark.slow
def test_latex_tables_are_tabulars_with_captions(full):
    text = (full / "latex" / "loss.tex").read_text()
    assert text.startswith("% needs \\usepackage{booktabs}\n") and r"\begin{tabular}{lrrrrrr}" in text
    caption = r"$\pm$: half the 95 \% interval over seeds; gaps are paired by seed. Verdicts are at this rate, with "
    assert caption + "Holm's correction over 6 pairs. 4 position schemes, 4 seeds; models of" in text
    assert r"qkvo\_rope" in text and re.search(r"& \$\+0\.\d+ \\pm 0\.\d+\$ &", text)
    assert not re.search(r"& -\d", text), "a minus sign is no hyphen"
    assert "±" not in text and (full / "latex" / "gaps.pdf").read_bytes().startswith(b"%PDF")


def test_a_small_gap_is_not_rounded_to_zero():
    assert [plus_minus(0.003, 0.18), plus_minus(-0.003, 0.18, sign=True)] == ["0.003 ±0.18", "-0.003 ±0.18"]
    assert [plus_minus(0.03, 0.18), plus_minus(0.0123, 0.018)] == ["0.03 ±0.18", "0.012 ±0.018"]


def test_a_bold_number_with_its_interval_is_one_bold_formula():
    bold = Table(
        pd.DataFrame({"loss": [1.0], "half": [0.25], "bold": [True]}), {"loss": Format(half="half", bold="bold")}
    )
    assert r"\textbf{\boldmath $1.00 \pm 0.25$}" in latex(bold, "", "")


@pytest.mark.usefixtures("undrawn")
def test_seeds_beyond_the_planned_ones_are_named_and_not_tested(tmp_path):
    folder = searched(tmp_path, qk_rope=0.0, nope=0.05)
    shutil.copytree(tmp_path / "demo-tune/lr=0.002/nope/seed=4", tmp_path / "demo-tune/lr=0.002/nope/seed=5")
    Run(tmp_path / "demo-tune/lr=0.002/nope/seed=5").update_manifest(seed=5)
    text, _ = written(folder, tmp_path / "report")
    assert (
        "- not compared: nope at 0.002, seeds 5: beyond the 5 planned seeds" in text
        and "nope | worse | 5 | b |" in text
    )
    # The sentence says all: there is only one pair.
    assert "\nAt best rates, against qk_rope: nope is worse. By mean loss" in text and "decided:" not in text


@pytest.mark.usefixtures("undrawn")
def test_an_unfinished_search_ranks_nothing_and_says_what_is_left(tmp_path):
    folder = searched(tmp_path, qk_rope=0.0, nope=0.05)
    shutil.rmtree(tmp_path / "demo-tune/lr=0.001/nope/seed=4")
    text, shown = written(folder, tmp_path / "report")
    assert "nothing is ranked: at most 1 runs are left to train (nope 1" in " ".join(shown.split())
    assert "group" not in text and "verdict" not in text and "beats" not in text


@pytest.mark.usefixtures("undrawn")
def test_what_is_special_about_runs_is_said_in_the_table(experiment_copy, tmp_path):
    for run in find_runs(experiment_copy):
        layers = {"scheme.layers": [{"name": "a"}] * 9} if run.manifest.scheme == "nope" else {}
        run.update_manifest(identity=run.manifest.identity | layers | {"model.num_layers": 4})
    run_of(experiment_copy, "alibi", 0).update_manifest(status="died", reason="the loss is nan")
    text, _ = written(experiment_copy, tmp_path)
    assert "nope (4 of 9 layers) |" in text and "- not compared: alibi seed 0: died: the loss is nan" in text
    assert re.search(r"^alibi \| failed \| 3 \|", text, re.MULTILINE), "schemes have unlike numbers of seeds"
    # A sentence of its own says that alibi failed.
    sentence = text.split("\n\n")[2].partition(" By mean")[0]
    assert sentence == "At this rate, against qk_rope: qkvo_rope is equal; nope is worse."


@pytest.mark.usefixtures("undrawn")
def test_the_command_that_made_the_runs_is_in_the_setup(experiment_copy, tmp_path):
    def commands():
        return re.findall(r"^- commands: (.*)$", written(experiment_copy, tmp_path)[0], re.MULTILINE)

    for run in find_runs(experiment_copy):
        of_run = [f"scheme={run.manifest.scheme}", f"seed={run.manifest.seed}", f"runs_dir=/{run.manifest.seed}"]
        run.update_manifest(command=["experiment=demo", "scheme.lr=1", *of_run])
    settings = "experiment=demo scheme.lr=1 scheme=alibi,nope,qk_rope,qkvo_rope seed=0,1,2,3"
    assert commands() == [f"`posbench train -m {settings}`, `posbench pack demo`"]
    for other in (["experiment=demo", "scheme=alibi", "seed=0"], None):
        run_of(experiment_copy, "alibi", 0).update_manifest(command=other)
        assert not commands()
    for run in find_runs(experiment_copy):
        run.update_manifest(command=None)
    assert not commands()


@pytest.mark.usefixtures("undrawn")
def test_the_command_of_a_search_is_tune(tmp_path):
    folder = searched(tmp_path, qk_rope=0.0, nope=0.05)
    for run in find_runs(tmp_path / "demo-tune"):
        rate = run.manifest.experiment.removeprefix("lr=")
        of_run = [f"scheme={run.manifest.scheme}", f"scheme.lr={rate}", f"experiment_name=lr={rate}", "seed=0"]
        run.update_manifest(command=["experiment=demo", *of_run])
    tune = "`posbench tune experiment=demo scheme=nope,qk_rope experiment_name=demo`"
    assert f"- commands: {tune}, `posbench pack demo`" in written(folder, tmp_path / "report")[0]


@pytest.mark.usefixtures("undrawn")
def test_the_table_fits_into_80_columns(tmp_path):
    shown = written(REFERENCE / "headline_gpu_muon", tmp_path)[1]
    lines = shown.partition("──")[0].splitlines()
    assert lines[-1].split() == ["scheme", "verdict", "seeds", "group", "loss", "order", "qk_rope", "beats"]
    assert re.search(r"^alibi +better +5 +a +[\d.]+ ±[\d.]+ +5/5 +-[\d.]+ ±[\d.]+ +1/1 \(1/1\)$", shown, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_other_text_and_options_at_evaluation_have_tables_of_their_own(experiment_copy, tmp_path):
    for scheme in ("qk_rope", "nope"):
        for seed in range(4):
            run = run_of(experiment_copy, scheme, seed)
            for result in run.results()[0]:
                if result.protocol == "fixed" and result.length <= 512:
                    write_evaluation(run, "fixed", result.length, "test", result.windows, "rescale=yarn")
                    write_evaluation(run, "fixed", result.length, "test", result.windows, "weights=bfloat16")
                if result.protocol == "validation":
                    write_evaluation(run, "validation", result.length, "test", result.windows, "data=wiki")
    text, _ = written(experiment_copy, tmp_path)
    assert "## On wiki" in text and "### Other options at evaluation" in text
    assert re.search(r"^scheme \| as trained \| yarn$", text, re.MULTILINE)
    assert "Perplexity at 512 tokens; the best of each row is bold." in text


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_each_text_has_its_own_latex_table_and_one_protocol(experiment_copy, tmp_path):
    """Wiki is scored by `validation`, and for one scheme also by `fixed`, here with losses nine times as high."""
    for run in find_runs(experiment_copy):
        for result in run.results()[0]:
            rows = result.windows
            if result.protocol == "validation":
                write_evaluation(run, "validation", result.length, "test", rows, "data=wiki")
            if result.protocol == "fixed":
                write_evaluation(run, "fixed", result.length, "test", rows, "data=my/books")
            if result.protocol == "fixed" and run.manifest.scheme == "nope":
                rows = rows.assign(nll=9 * rows["nll"])
                write_evaluation(run, "fixed", result.length, "test", rows, "data=wiki")
    text, _ = written(experiment_copy, tmp_path, latex=True)
    section = text.partition("## On wiki")[2].partition("##")[0]
    losses = [float(number) for number in re.findall(r"^\w+ \| ([\d.]+)", section, re.MULTILINE)]
    assert len(losses) == 4 and max(losses) < 2 * min(losses) and "Protocol validation." in section
    names = {path.name for path in (tmp_path / "latex").glob("perplexity-*")}
    assert {"perplexity-fixed.tex", "perplexity-fixed-my-books.tex"} <= names
    assert "on my/books" in (tmp_path / "latex" / "perplexity-fixed-my-books.tex").read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_by_groups_runs_by_a_setting_and_marks_the_best(experiment_copy, tmp_path):
    world = World({"qk_rope": 0.2, "nope": 0.1}, seeds=(0, 1, 2, 3), experiment="fast")
    other_experiment = fabricate(experiment_copy.parent, world)
    for run in find_runs(other_experiment):
        run.update_manifest(identity=run.manifest.identity | {"train.lr": 0.5})
    refuses(r"--by train\.lr", written, [experiment_copy, other_experiment], tmp_path)
    text, shown = written([experiment_copy, other_experiment], tmp_path, by="train.lr")
    slow, fast = (comparison(place).values.mean() for place in (experiment_copy, other_experiment))
    row = next(line for line in text.splitlines() if line.startswith("nope | "))
    assert re.search(rf"\*\*{slow['nope']:.3f}", row) and f"{fast['nope']:.2f}"[:4] in row
    assert slow["nope"] < fast["nope"] and "posbench: demo, fast by train.lr" in shown
    assert set(pd.read_csv(tmp_path / "table.csv")["group"]) == {0.005, 0.5}
    for run in find_runs(other_experiment):
        run.update_manifest(identity=run.manifest.identity | {"train.lr": 0.005, "model.qk_norm": True})
    written([experiment_copy, other_experiment], tmp_path, by="model.qk_norm")
    assert set(pd.read_csv(tmp_path / "table.csv")["group"]) == {"default", "True"}
    refuses(
        r"'train\.lx' is not a column of these runs; they differ in experiment, model\.qk_norm",
        written,
        [experiment_copy, other_experiment],
        tmp_path,
        by="train.lx",
    )


@pytest.mark.usefixtures("undrawn")
def test_lengths_just_past_training_are_behind_an_option(experiment_copy, tmp_path):
    for scheme in ("qk_rope", "nope"):
        run = run_of(experiment_copy, scheme, 0)
        rows = next(r for r in run.results()[0] if (r.protocol, r.length) == ("fixed", 512)).windows
        write_evaluation(run, "fixed", 257, "test", rows)
    head = "scheme | 256 (trained) | 512 |"
    assert head in written(experiment_copy, tmp_path)[0]
    assert "scheme | 256 (trained) | 257 | 512 |" in written(experiment_copy, tmp_path, every_length=True)[0]


def test_names_are_text_in_the_page(experiment_copy, tmp_path):
    written(experiment_copy, tmp_path, title="<b>a & b</b>")
    page = (tmp_path / "report.html").read_text()
    assert "<b>a" not in page and "&lt;b&gt;a &amp; b" in page


@pytest.mark.slow
def test_a_report_imports_neither_torch_nor_hydra(experiment, tmp_path):
    words = ["posbench", "report", str(experiment), "--output", str(tmp_path)]
    program = f"""
import sys
sys.argv = {json.dumps(words)}
from posbench.cli import app
try:
    app()
except SystemExit:
    pass
print({{name for name in ("torch", "hydra", "omegaconf", "wandb", "datasets") if name in sys.modules}})
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()", done.stdout + done.stderr
    assert (tmp_path / "report.html").is_file()


SAYS = re.compile(r"`posbench report ([\w/]+)` says:\n\n((?:> .*\n)+)")
QUOTES = [match for page in ("README.md", "docs/results.md") for match in SAYS.findall(Path(page).read_text("utf-8"))]


def test_the_pages_quote_reports():
    """Other reports are quoted whole in docs/lists/results, which tests/test_site.py holds to the packs."""
    assert "headline" in dict(QUOTES)


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("name", "quote"),
    [pytest.param(*quote, marks=[] if quote[0] == "headline" else pytest.mark.slow) for quote in QUOTES],
)
def test_pages_quote_the_whole_paragraph_of_a_report(name, quote, tmp_path):
    paragraphs = [" ".join(part.split()) for part in written(REFERENCE / name, tmp_path)[1].split("\n\n")]
    assert " ".join(quote.replace("> ", "").split()) in paragraphs


def test_a_gap_far_beyond_all_others_is_a_figure_at_the_edge():
    marks = pd.DataFrame(
        {"scheme": ["qk_rope", "alibi", "nope"], "x": [0.0, -0.1, 1.36], "half": [math.nan, 0.02, 0.1]}
    )
    plot = Plot("gaps", "gaps", "", pd.DataFrame(columns=["scheme", "x"]), marks=marks.assign(is_open=False))
    look = dict.fromkeys(marks["scheme"], ("black", "-", "o"))
    axes = figures.gaps(plot, look).axes[0]
    assert [text.get_text() for text in axes.texts] == ["+1.36 →"]
    assert axes.get_xlim()[1] < 0.1
    assert not figures.gaps(replace(plot, marks=plot.marks[:2]), look).axes[0].texts


def test_beyond_all_looks_schemes_look_alike():
    names = [f"scheme_{number}" for number in range(130)]
    looks = figures.looks(pd.DataFrame({"scheme": names, "is_relative": True}))
    assert len(looks) == 130 and len(set(looks.values())) == 120
