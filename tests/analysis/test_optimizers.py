"""Check each figure of docs/optimizers.md."""

import math
import re

import pandas as pd
import pytest
from optimizer_tables import (
    GROUPS,
    PAGE,
    PAIR,
    RATES,
    REFERENCE,
    ROOT,
    at_rate,
    difference,
    differences,
    losses_of,
    main_table,
    onsets_apart,
    plus_minus,
    six_schemes,
)
from scipy import stats
from typer.testing import CliRunner

from posbench.cli import app
from posbench.config import units
from posbench.runs import find_runs

pytestmark = pytest.mark.slow  # they read the runs of every rate


def test_the_order_of_six_schemes_on_cpus_is_the_same():
    losses = [[cell.strip() for cell in line.split("|")[2:4]] for line in six_schemes()[2:]]
    adamw, muon = zip(*losses, strict=True)
    assert list(muon) == sorted(muon) and list(adamw) == sorted(adamw)


def test_the_rows_that_came_last():
    results = " ".join((ROOT / "docs/results.md").read_text(encoding="utf-8").split())

    def step(first, second):
        gaps = at_rate("headline_muon_rows", second, 4e-3) - at_rate("headline_muon_rows", first, 4e-3)
        assert gaps.index.to_list() == [0, 1, 2]
        half = float(stats.t.ppf(0.975, 2)) * gaps.std() / 3**0.5
        return units.plus_minus(abs(gaps.mean()), half)

    sentences = [
        f"the latent without position costs {step('gqa_qk_rope', 'mla_nope')} nats",
        f"decoupled RoPE wins {step('mla_nope', 'mla')} back",
    ]
    for sentence in sentences:
        assert sentence in results, sentence


def test_the_lead_at_twice_the_tokens():
    gaps = at_rate("headline_muon_long", "qk_rope", 4e-3) - at_rate("headline_muon_long", "alibi", 2e-3)
    [gap] = gaps.dropna()
    assert f"one seed) ALiBi leads by {gap:.3f} nats" in " ".join(PAGE.split())


def test_the_page_has_the_table():
    assert "\n".join(main_table()) in PAGE, "\n" + "\n".join(main_table())


def test_the_page_has_the_sentences():
    page = " ".join(PAGE.split())
    optimizers, without, _, undecided = (line.strip("- ;.") for line in differences()[2:])
    for line in (optimizers, without, *onsets_apart()):
        assert line in page, line
    p = re.search(r"\(p (0\.\d+)\) between AdamW and Muon without orthogonalisation", undecided)
    assert p and float(p[1]) > 0.05 and f"(p {p[1]})" in page


def test_the_readme_says_the_same():
    adamw, muon = losses_of("headline_gpu_adamw"), losses_of("headline_gpu_muon")
    gaps = [plus_minus(each["qk_rope"] - each["alibi"]).lstrip("+") for each in (adamw, muon)]
    apart = difference(adamw, muon).lstrip("+").partition(" nats")[0]
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"{gaps[0]} nats under AdamW and {gaps[1]} under Muon" in readme, gaps
    assert f"difference {apart})" in readme, apart


def test_vo_is_behind_elsewhere():
    behind = at_rate("headline_muon-tune", "vo_rope", 2e-3) - at_rate("headline_muon-tune", "qk_rope", 2e-3)
    assert len(behind.dropna()) == 3 and (behind.dropna() > 0).all()
    findings = " ".join((ROOT / "docs/results.md").read_text(encoding="utf-8").split())
    losses = {}  # scheme -> {seed: loss} of the whole runs at 1e-3, without their branches
    for run in find_runs(REFERENCE / "headline_prose-tune"):
        if run.path.parts[-3] == "lr=0.001":
            losses.setdefault(run.manifest.scheme, {})[run.manifest.seed] = run.manifest.loss
    gaps = pd.Series(losses["vo_rope"]) - pd.Series(losses["qk_rope"])
    gap, half = gaps.mean(), 4.3027 * gaps.std() / math.sqrt(3)  # t with two degrees of freedom
    assert len(gaps) == 3 and f"by {gap:.3f} ±{half:.3f}" in findings
    assert "by 0.058 and 0.071" in findings and (gaps > 0).all()


def test_the_reports_own_test(tmp_path, monkeypatch):
    """The report tests the planned seeds only, on the test text."""
    monkeypatch.chdir(tmp_path)
    names = ["headline_gpu_adamw", "headline_gpu_muon"]
    output = CliRunner().invoke(app, ["report", *names, "--by", "train.optimizer", "--runs-dir", str(REFERENCE)]).output
    [file] = tmp_path.rglob("interaction.csv")
    [row] = pd.read_csv(file).to_dict("records")
    half = (row["difference_high"] - row["difference_low"]) / 2
    quote = f"{row['difference']:+.2f} ±{half:.2f} (p {row['p']:.4f})"
    assert row["seeds"] == 5, output
    assert quote in PAGE, quote


def test_what_is_left_under_muon_is_not_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    CliRunner().invoke(app, ["report", "headline_gpu_muon", "--runs-dir", str(REFERENCE), "--output", str(tmp_path)])
    [row] = re.findall(
        r"^qk_rope \| 5 \| (.*) \| (.*) \| (-?\d+)% to (-?\d+)%$", (tmp_path / "report.md").read_text(), re.MULTILINE
    )
    assert f"{row[0]} and {row[1]})" in " ".join(PAGE.split()), row
    assert int(row[2]) < 0 < int(row[3]) < 10


def test_the_rates_are_each_optimizers_best():
    for optimizer in ("adamw", "muon"):
        for scheme, rate in zip(PAIR, GROUPS[f"headline_gpu_{optimizer}"][1:], strict=True):
            means = {each: at_rate(f"headline_gpu_{optimizer}-tune", scheme, each).mean() for each in RATES}
            assert min(means, key=lambda each: means[each]) == rate
