"""The report as it is written and printed."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

import posbench
from posbench.analysis.agreement import choose
from posbench.analysis.comparison import Comparison, build
from posbench.analysis.table import read
from posbench.config import ConfigError
from posbench.config.units import number, perplexity_text, plus_minus
from posbench.reporting.figures import draw_all, encode, inline_svg, looks, new_figure, spread_out, style
from posbench.reporting.report import report
from posbench.reporting.sections import all_pairs, while_training
from posbench.reporting.text import group_text
from posbench.runs import Run, append_metrics, find_runs
from tests.analysis.fabricate import World, comparison, fabricate, fabricate_search, rescore, run_of, write_evaluation

REFERENCE = Path("runs/reference")


def written(places: Any, target: Path, **options: Any) -> tuple[str, str]:
    """Return the Markdown of a report, and what a terminal of 80 columns shows."""
    console = Console(file=io.StringIO(), width=80)
    report(places, output=target, console=console, **options)
    return (target / "report.md").read_text(), console.file.getvalue()  # type: ignore[attr-defined]


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the figures of reports, which take most of their time."""
    monkeypatch.setattr("posbench.reporting.figures.draw_all", lambda c, sections: {})


@pytest.fixture(scope="module")
def full(experiment: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the report of the fabricated experiment, with all its parts."""
    target = tmp_path_factory.mktemp("report")
    written(experiment, target, against="kexue-10862", latex=True)
    return target


@pytest.mark.slow
def test_every_figure_of_the_tables_is_in_the_csv_files(full: Path) -> None:
    cells, text = pd.read_csv(full / "table.csv", keep_default_na=False), (full / "report.md").read_text()
    alibi = cells[(cells["scheme"] == "alibi") & (cells["metric"] == "loss")].set_index(["protocol", "length"])
    row = alibi.loc[("validation", 256)]
    half = (float(row["gap_high"]) - float(row["gap_low"])) / 2
    shown = plus_minus(float(row["gap"]), half, sign=True)
    row_text = rf"^alibi \| 4 \| \w+ \| [\d.]+ ±[\d.]+ \| {re.escape(shown)} \| worse \| 1/3$"
    assert re.search(row_text, text, re.MULTILINE)
    assert f"{float(alibi.loc[('fixed', 2048), 'gap']):+.3f}" in text
    described = pd.read_csv(full / "columns.csv", keep_default_na=False)
    assert set(described["file"]) == {file.name for file in full.glob("*.csv")} - {"columns.csv"}
    assert (described["meaning"] != "").all()


@pytest.mark.usefixtures("undrawn")
def test_runs_of_another_name_do_not_take_the_description_and_the_publication_of_the_demo(tmp_path: Path) -> None:
    worlds = [
        World({"qk_rope": 0.0, "nope": 0.4}, (0, 1), lengths=(), probes=False, experiment=n) for n in ("demo", "demo2")
    ]
    target = tmp_path / "report"
    demo, other_report = (written(fabricate(tmp_path, world), target, latex=True)[0] for world in worlds)
    assert all(words in demo and words not in other_report for words in ("Eleven position schemes", "kexue.fm"))
    assert (target / "latex/loss.tex").is_file() and not (target / "latex/context.tex").exists()


@pytest.mark.slow
def test_every_picture_is_in_both_pages_and_wide_tables_scroll(full: Path) -> None:
    text, page = ((full / f"report.{kind}").read_text() for kind in ("md", "html"))
    pictures = set(re.findall(r"\]\((\S+\.svg)\)", text))
    assert pictures == {file.name for file in full.glob("*.svg")} and len(pictures) == 7
    assert page.count("<figure ") == 7 and "<img" not in page and "<script" not in page and "http:" not in page[:2000]
    assert page.count("<table>") == page.count('<div class="scroll"><table>') == text.count("\n:-- |")


def test_the_loss_curve_is_the_mean_of_the_logged_losses(analysis: Comparison, experiment: Path) -> None:
    (section,) = while_training(analysis)
    axes = draw_all(analysis.runs, [section])["training"].axes[0]
    lines = {line.get_label(): line for line in axes.get_lines()}
    last = {seed: run_of(experiment, "nope", seed).logged[-2] for seed in analysis.seeds}
    assert set(analysis.schemes) < set(lines) and {row["kind"] for row in last.values()} == {"train"}
    assert lines["nope"].get_ydata()[-1] == pytest.approx(np.mean([row["loss"] for row in last.values()]))
    assert lines["nope"].get_xdata()[-1] == last[0]["tokens"]


def test_a_picture_of_pairs_has_numbers_and_three_schemes_need_none(analysis: Comparison, experiment: Path) -> None:
    pairs = all_pairs(analysis, 0.01)
    texts = [text.get_text() for text in draw_all(analysis.runs, pairs)["pairs"].axes[0].texts]
    gap = analysis.losses["nope"].mean() - analysis.losses["qk_rope"].mean()
    assert len(texts) == 6 and f"{gap:.2f} ●" in texts
    summary, rows = read([experiment])
    assert all_pairs(build(choose(summary, ["qk_rope", "nope", "alibi"]), rows), 0.01) == []


def test_a_picture_in_the_page_is_at_most_as_wide_as_it_was_drawn() -> None:
    with style():
        figure, _ = new_figure(2.0, width=3.0)
    assert 'style="max-width: 216pt"' in inline_svg(encode(figure, "svg").decode(), "x")


@pytest.mark.slow
def test_latex_tables_are_tabulars_with_captions(full: Path) -> None:
    text = (full / "latex" / "loss.tex").read_text()
    assert r"\begin{tabular}{lrrrrrr}" in text and r"\caption{Loss on held-out text" in text and r"qkvo\_rope" in text
    assert re.search(r"[+$]0\.\d+", text) and not re.search(r"& -\d", text), "a minus sign is no hyphen"
    assert "±" not in text and (full / "latex" / "gaps.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.slow
def test_two_seeds_are_said_to_be_too_few_once_and_nothing_is_ranked(experiment_copy: Path, tmp_path: Path) -> None:
    text, shown = written(experiment_copy, tmp_path, seeds=[0, 1])
    assert text.count("Two seeds are too few to rank schemes.") == 1 == shown.count("Two seeds are too few")
    assert "±" not in text and "group" not in text and "pairs.svg" not in text and "detectable" not in text
    losses = comparison(experiment_copy).losses.loc[[0, 1]]
    gaps = ", ".join(f"{gap:+.3f}" for gap in losses["nope"] - losses["qk_rope"])
    assert f"| {gaps}\n" in text and "2 of 3 schemes" not in shown


@pytest.mark.slow
def test_seeds_that_use_long_range_order_stand_beside_the_loss(experiment_copy: Path, tmp_path: Path) -> None:
    starts = {"qk_rope": [200, 250, 300, 350], "qkvo_rope": [200, 250, 500, 500], "nope": [500] * 4, "alibi": [100] * 4}
    for scheme, of_seeds in starts.items():
        for seed, start in enumerate(of_seeds):
            for tokens in range(0, 400_000, 50_000):
                worth = max(0.0, (tokens - start * 1000) / 1e6 + 0.05)
                worth = 0.06 if (scheme, seed, tokens) == ("nope", 0, 100_000) else worth  # for a moment: not caught on
                row = {"kind": "order", "step": tokens // 2048, "tokens": tokens, "order_beyond_32": worth}
                append_metrics(run_of(experiment_copy, scheme, seed).path / "metrics.jsonl", row)
    text, shown = written(experiment_copy, tmp_path)
    assert re.search(r"^qkvo_rope \| 4 \| [\d.]+ \| 2/4 \|", text, re.MULTILINE)
    assert "Seeds of qkvo_rope split in two" in " ".join(shown.split())
    assert "alibi | 4/4 | 100k | 100k, 100k, 100k, 100k | 0.12" in text  # all earlier, and 2 / 2^4
    assert "qkvo_rope | 2/4 | 250k | 200k, 250k, >399k, >399k | 0.5" in text  # two seeds of four differ, alike
    assert "nope | 0/4 | >399k" in text and (tmp_path / "onset.svg").is_file()
    assert "five are needed to rank schemes" in " ".join(shown.split()) and "±" not in text.split("## Perplexity")[0]
    grouped, _ = written(experiment_copy, tmp_path / "by", by="train.lr")
    alone, shown_alone = written(experiment_copy, tmp_path / "alone", schemes=["nope"], baseline="nope")
    assert "## When" not in alone
    assert "No run's order more than 32 tokens back is worth 0.05 nats by the end." in " ".join(shown_alone.split())
    assert re.search(r"100k \(4/4\) \| 399k \(0/4\) \| 275k \(4/4\) \| 312k \(2/4\) \| 272k$", grouped, re.MULTILINE)
    table = posbench.results(experiment_copy).set_index(["scheme", "seed"])
    assert table.loc[("qk_rope", 1), "onset_tokens"] == 250_000 and np.isinf(table.loc[("nope", 0), "onset_tokens"])


RATES = [5e-4, 1e-3, 2e-3, 4e-3, 8e-3]


def searched(root: Path, noise: float) -> Path:
    """Write a finished search: qk_rope leads by 0.05 at 2e-3, the best rate of both; at 1e-3 runs have this noise."""
    effects = {rate: {"qk_rope": 1.3, "nope": 1.4} for rate in RATES}
    effects |= {2e-3: {"qk_rope": 0.0, "nope": 0.05}, 1e-3: {"qk_rope": 0.06, "nope": 0.12}}
    seeds = {rate: range(5 if rate in (1e-3, 2e-3) else 2) for rate in RATES}
    return fabricate_search(root, effects, seeds, {1e-3: noise})


@pytest.mark.usefixtures("undrawn")
def test_a_claim_at_best_rates_needs_both_rates_and_one_at_these_rates_says_so(tmp_path: Path) -> None:
    text, shown = written(searched(tmp_path, 0.002), tmp_path / "report")
    assert "At best rates, 1 of 1 pairs is decided: qk_rope beats nope." in " ".join(shown.split())
    assert "verdict at best rates | beats at best rates | beats at these rates" in text
    assert re.search(r"^nope \| 5 \| b \| .* \| worse \| 0/1 \| 0/1$", text, re.MULTILINE)
    assert "**3.0" in text.split("## Learning rates")[1] and "(5)**" in text, "kept rates are bold"
    text, shown = written(searched(tmp_path / "noisy", 0.4), tmp_path / "noisy/report")
    assert "At best rates, 0 of 1 pairs are decided. Open: qk_rope and nope." in " ".join(shown.split())
    assert re.search(r"^qk_rope \| 5 \| a \| .* \|  \| 0/1 \| 1/1$", text, re.MULTILINE), (
        "by its best rates alone it would"
    )


@pytest.mark.usefixtures("undrawn")
def test_seeds_beyond_the_planned_ones_are_named_and_not_tested(tmp_path: Path) -> None:
    folder = searched(tmp_path, 0.002)
    shutil.copytree(tmp_path / "demo-tune/lr=0.002/nope/seed=4", tmp_path / "demo-tune/lr=0.002/nope/seed=5")
    Run(tmp_path / "demo-tune/lr=0.002/nope/seed=5").update_manifest(seed=5)
    text, _ = written(folder, tmp_path / "report")
    assert "- not compared: nope at 0.002, seeds 5: beyond the 5 planned seeds" in text and "nope | 5 | b" in text


@pytest.mark.usefixtures("undrawn")
def test_an_unfinished_search_ranks_nothing_and_says_what_is_left(tmp_path: Path) -> None:
    folder = searched(tmp_path, 0.002)
    shutil.rmtree(tmp_path / "demo-tune/lr=0.001/nope/seed=4")
    text, shown = written(folder, tmp_path / "report")
    assert "nothing is ranked: at most 1 runs are left to train (nope 1" in " ".join(shown.split())
    assert "group" not in text and "verdict" not in text and "beats" not in text


@pytest.mark.usefixtures("undrawn")
def test_claims_of_runs_at_one_rate_say_that_they_hold_at_this_rate(experiment_copy: Path, tmp_path: Path) -> None:
    text, shown = written(experiment_copy, tmp_path)
    assert "At this rate, " in shown and "verdict at this rate | beats at this rate" in text
    assert "at best rates" not in text and "All runs use one learning rate" in " ".join(shown.split())


def test_coordinates_are_cut_and_numbers_that_are_read_are_not() -> None:
    with style():
        figure, (axes,) = new_figure(2.0)
        axes.set_title("0.0625")
        drawing = encode(figure, "svg")
    assert b">0.0625<" in drawing and not re.search(rb'd="[^"]*\.\d{3}', drawing)


@pytest.mark.usefixtures("undrawn")
def test_one_seed_is_called_a_hint(experiment_copy: Path, tmp_path: Path) -> None:
    text, _ = written(experiment_copy, tmp_path, seeds=[2])
    assert "One seed only: treat these gaps as a hint." in text and "±" not in text.split("## Perplexity")[0]


@pytest.mark.usefixtures("undrawn")
def test_a_missing_baseline_is_said_first(experiment_copy: Path, tmp_path: Path) -> None:
    shutil.rmtree(experiment_copy / "qk_rope")
    text, shown = written(experiment_copy, tmp_path)
    sentence = "The baseline qk_rope has no finished run here, so gaps are measured against qkvo_rope, the best scheme."
    assert text.split("\n\n")[2].startswith(sentence) and sentence[:40] in shown


@pytest.mark.usefixtures("undrawn")
def test_what_is_special_about_runs_is_said_in_the_table(experiment_copy: Path, tmp_path: Path) -> None:
    for run in find_runs(experiment_copy):
        layers = {"scheme.layers": [{"name": "a"}] * 9} if run.manifest.scheme == "nope" else {}
        run.update_manifest(identity=run.manifest.identity | layers | {"model.num_layers": 4})
    run_of(experiment_copy, "alibi", 0).update_manifest(status="died", reason="the loss is nan")
    text, _ = written(experiment_copy, tmp_path)
    assert "nope (4 of 9 layers) |" in text and "- not compared: alibi seed 0: died: the loss is nan" in text
    assert "scheme | seeds | group" in text and "alibi | 3 |" in text, "schemes have unlike numbers of seeds"


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_other_text_and_options_at_evaluation_have_tables_of_their_own(experiment_copy: Path, tmp_path: Path) -> None:
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
def test_by_groups_runs_by_a_setting_and_marks_the_best(experiment_copy: Path, tmp_path: Path) -> None:
    world = World({"qk_rope": 0.2, "nope": 0.1}, seeds=(0, 1, 2, 3), lengths=(), probes=False, experiment="fast")
    other_experiment = fabricate(experiment_copy.parent, world)
    for run in other_experiment.glob("*/seed=*"):
        manifest = run_of(other_experiment, run.parent.name, int(run.name[-1])).manifest
        run_of(other_experiment, run.parent.name, int(run.name[-1])).update_manifest(
            identity=manifest.identity | {"train.lr": 0.5}
        )
    with pytest.raises(ConfigError, match=r"--by train\.lr"):
        written([experiment_copy, other_experiment], tmp_path)
    text, shown = written([experiment_copy, other_experiment], tmp_path, by="train.lr")
    slow, fast = (comparison(place).losses.mean() for place in (experiment_copy, other_experiment))
    row = next(line for line in text.splitlines() if line.startswith("nope | "))
    assert re.search(rf"\*\*{slow['nope']:.3f}", row) and f"{fast['nope']:.2f}"[:4] in row
    assert slow["nope"] < fast["nope"] and "posbench: demo, fast by train.lr" in shown
    assert set(pd.read_csv(tmp_path / "table.csv")["group"]) == {0.005, 0.5}
    with pytest.raises(
        ConfigError, match=r"'train\.lx' is not a column of these runs; they differ in experiment, train\.lr"
    ):
        written([experiment_copy, other_experiment], tmp_path, by="train.lx")


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_speeds_measured_while_training_are_no_costs(experiment_copy: Path, tmp_path: Path) -> None:
    costs = written(experiment_copy, tmp_path, latex=True)[0].partition("## Costs")[2]
    assert "tokens/s" not in costs and "Compare speeds by `posbench bench`" in costs
    assert "tokens_per_second" in pd.read_csv(tmp_path / "runs.csv") and not (tmp_path / "latex/costs.tex").exists()


@pytest.mark.usefixtures("undrawn")
def test_lengths_just_past_training_are_behind_an_option(experiment_copy: Path, tmp_path: Path) -> None:
    for scheme in ("qk_rope", "nope"):
        run = run_of(experiment_copy, scheme, 0)
        rows = next(r for r in run.results()[0] if (r.protocol, r.length) == ("fixed", 512)).windows
        write_evaluation(run, "fixed", 257, "test", rows)
    head = "scheme | 256 (trained) | 512 |"
    assert head in written(experiment_copy, tmp_path)[0]
    assert "scheme | 256 (trained) | 257 | 512 |" in written(experiment_copy, tmp_path, every_length=True)[0]


@pytest.mark.usefixtures("undrawn")
def test_a_scheme_without_the_longest_length_has_no_gap_there(experiment_copy: Path, tmp_path: Path) -> None:
    for file in experiment_copy.glob("alibi/seed=*/eval/fixed/512.*"):
        file.unlink()
    text, _ = written(experiment_copy, tmp_path)
    rows = text.split("## Perplexity by length: fixed")[1]
    assert re.search(r"^alibi \| [\d.]+ \| – \| – \| –$", rows, re.MULTILINE), rows[:800]


@pytest.mark.usefixtures("undrawn")
def test_what_other_windows_leave_out_is_said_once_and_in_its_place(
    experiment_copy: Path, tmp_path: Path, undrawn: None
) -> None:
    rescore(run_of(experiment_copy, "nope", 1), "fixed", None, lambda rows: rows.assign(start=rows["start"] + 1))
    for seed in range(4):
        rows = run_of(experiment_copy, "alibi", seed).results()[0][1].windows
        write_evaluation(
            run_of(experiment_copy, "alibi", seed), "nonoverlapping", 512, "test", rows[1:], "rescale=yarn"
        )
    text, printed = written(experiment_copy, tmp_path / "report")
    assert "## Perplexity by length: fixed\n\nfixed at 256, 512 is left out: alibi seed 0 and nope seed 1" in text
    assert "512 under rescale=yarn scored other windows than as trained, so do not compare the two" in text
    assert text.count("--again` scores all alike") == 2 == printed.count("--again` scores all alike")


def test_names_are_text_in_the_page(experiment_copy: Path, tmp_path: Path) -> None:
    written(experiment_copy, tmp_path, title="<b>a & b</b>")
    page = (tmp_path / "report.html").read_text()
    assert "<b>a" not in page and "&lt;b&gt;a &amp; b" in page


@pytest.mark.slow
@pytest.mark.parametrize("pack, lines, words", [("demo_cpu", 155, 2080), ("all_schemes", 260, 2600)])
def test_the_reference_reports_stay_short(pack: str, lines: int, words: int, tmp_path: Path) -> None:
    text, shown = written(REFERENCE / pack, tmp_path)
    assert len(text.splitlines()) <= lines and len(text.split()) <= words
    prose = [line for line in shown.splitlines()[:-1] if "`posbench eval" not in line]  # a command stays in one line
    assert len(shown.splitlines()) < 60 and max(map(len, prose)) <= 80


@pytest.mark.slow
def test_a_report_imports_neither_torch_nor_hydra(experiment: Path, tmp_path: Path) -> None:
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


def test_what_cannot_be_reported_is_said(experiment_copy: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="contains no runs"):
        report(tmp_path / "empty")
    with pytest.raises(ConfigError, match="--margin 0 must be above 0"):
        report(experiment_copy, margin=0)
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        written(experiment_copy, tmp_path / "file" / "there")


@pytest.mark.parametrize(
    "value, half, text",
    [
        (2.712, 0.0013, "2.7120 ±0.0013"),
        (2.71234, 0.18, "2.71 ±0.18"),
        (2.7, float("nan"), "2.700"),
        (float("nan"), 1, "–"),
    ],
)
def test_numbers_have_the_digits_that_their_interval_allows(value: float, half: float, text: str) -> None:
    assert plus_minus(value, half) == text


def test_small_numbers() -> None:
    assert [number(v, sign=True) for v in (0.1, -0.0001, 1e-9)] == ["+0.100", "-0.0001", "0"]
    assert [perplexity_text(v, 1e-5) for v in (18.8267, 1631.5)] == ["18.83", "1,631.50"]
    assert [group_text(v) for v in (0.005, 1_024_000, "demo", ("ladder_s", 2048000))][-1] == "ladder_s 2.05M"


def test_a_scheme_looks_the_same_in_every_report_and_no_two_look_alike(experiment: Path) -> None:
    runs = posbench.results(experiment)
    every = looks(runs)
    assert len(set(every.values())) == 4 and looks(runs[runs["scheme"] == "alibi"])["alibi"] == every["alibi"]


def test_names_at_the_ends_of_lines_do_not_overlap() -> None:
    placed = spread_out(np.array([5.0, 5.1, 5.2, 40.0]), room=10, low=0, high=50)
    assert (np.diff(np.sort(placed)) >= 10 - 1e-9).all() and placed[3] == 40


def test_pairs_fixed_before_training_stand_in_a_table_of_their_own(tmp_path: Path, undrawn: None) -> None:
    effects = {"qk_rope": 0.0, "alibi": -0.1, "nope": 0.003}
    words = ("model=tiny", "experiment.primary=[qk_rope alibi, nope qk_rope]", "train.context_length=256")
    text, shown = written(fabricate(tmp_path, World(effects, overrides=words)), tmp_path / "report")
    rows = re.findall(r"^(\w+) \| (\w+) \| 5 \| ([\d.]+) ±[\d.]+ \| [\d.e-]+ \| (\w+)$", text, re.MULTILINE)
    assert [(left, right, verdict) for left, right, _, verdict in rows] == [
        ("alibi", "qk_rope", "differ"),
        ("qk_rope", "nope", "equal"),
    ]
    assert float(rows[0][2]) == pytest.approx(0.1, abs=0.01)
    assert "1 of 2 pairs that were fixed before training is decided: alibi beats qk_rope" in " ".join(shown.split())


SAYS = re.compile(r"`posbench report ([\w/]+)` says:\n\n((?:> .*\n)+)")
QUOTES = [match for page in ("README.md", "docs/results.md") for match in SAYS.findall(Path(page).read_text("utf-8"))]


def test_the_pages_quote_reports() -> None:
    """Other reports are quoted whole in docs/lists/results, which tests/test_site.py holds to the packs."""
    assert "headline" in dict(QUOTES)


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("name", "quote"),
    [pytest.param(*quote, marks=[] if quote[0] == "headline" else pytest.mark.slow) for quote in QUOTES],
)
def test_pages_quote_the_whole_paragraph_of_a_report(name: str, quote: str, tmp_path: Path) -> None:
    paragraphs = [" ".join(part.split()) for part in written(REFERENCE / name, tmp_path)[1].split("\n\n")]
    assert " ".join(quote.replace("> ", "").split()) in paragraphs
