"""Check the figures of README and of pages that no generated report shows against the packs."""

import re
from pathlib import Path

import numpy as np
import pytest
from optimizer_tables import at_rate, losses_of

import posbench
from posbench.analysis.comparison import build
from posbench.analysis.onset import decayed_points
from posbench.analysis.reading import read_runs
from posbench.analysis.statistics import interval
from posbench.catalogue.choices import choices
from posbench.reporting.sections import gaps_by_tokens
from posbench.runs import find_runs
from posbench.system.console import console

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "runs" / "reference"


def page(name):
    return " ".join((ROOT / name).read_text(encoding="utf-8").split())


def plus_minus(values, digits=3):
    mean, low, _ = interval(values)
    return f"{mean:+.{digits}f} ±{mean - low:.{digits}f}"


@pytest.fixture(scope="module")
def headline():
    return build(*read_runs([REFERENCE / "headline"], None, console(quiet=True)))


def test_gaps_at_three_budgets(headline):
    """Branches of headline end at 3.07 and 6.14 million tokens."""
    gaps = gaps_by_tokens(headline, decayed_points(headline.runs)).set_index(["scheme", "x"])
    texts = {}
    for scheme, tokens in gaps.index:
        row = gaps.loc[(scheme, tokens)]
        texts[scheme, tokens] = (row["y"], row["y"] - row["low"])
    behind, lead = ([texts[scheme, n * 1_024] for n in (3_000, 6_000, 12_000)] for scheme in ("vo_rope", "alibi"))
    first, second, third = (f"{mean:+.3f} ±{half:.3f}" for mean, half in behind)
    assert f"{first} nats at 3.07 million tokens (behind with every seed), {second} at 6.14, {third} at 12.3" in page(
        "docs/results.md"
    )
    first, second, third = (f"{-mean:.3f} ±{half:.3f}" for mean, half in lead)
    assert f"({first} at 3.07 million, {second} at 6.14, {third} at 12.3)" in page("docs/results.md")
    points = decayed_points(headline.runs).pivot(index=["seed", "tokens"], columns="scheme", values="loss")
    assert ((points["vo_rope"] - points["qk_rope"]).xs(3_072_000.0, level="tokens") > 0).all()


def test_onset_and_loss_within_schemes(headline):
    found = {
        s: headline.onsets[s].corr(headline.values[s], method="spearman") for s in ("qk_rope", "qkvo_rope", "vo_rope")
    }
    qk, qkvo, vo = found.values()
    assert f"it is {qk:.2f} (QK), {qkvo:.1f} (QKVO) and {vo:.1f} (VO)" in page("docs/results.md")


def test_the_setup_of_the_headline():
    runs = [run for run in find_runs(REFERENCE / "headline") if run.manifest.seed == 0]
    of = next(run.manifest.identity for run in runs if run.manifest.scheme == "qk_rope")
    table = posbench.results(REFERENCE / "headline")
    bytes_per_token = (table["loss"] / np.log(2) / table["bits_per_byte"]).mean()
    text = page("docs/results.md")
    assert f"{of['model.num_layers']} layers of {of['model.d_model']}, six heads of {of['model.head_dim']}" in text
    assert f"SwiGLU of {of['model.ffn_dim']}" in text and of["model.num_heads"] == 6 and not of["model.tied_embeddings"]
    assert (
        f"{of['scheme.base']:,.0f})" in text
        and f"({table['epochs'].iloc[0]:.2f} epochs), {of['train.num_steps']:,}" in text
    )
    assert f"is {bytes_per_token:.2f} bytes" in text and round(256 * bytes_per_token, -1) == 550
    assert f"betas {of['train.beta1']} and {of['train.beta2']}, weight decay {of['train.weight_decay']}" in text
    rates = {run.manifest.scheme: run.manifest.identity["train.lr"] for run in runs}
    assert rates == {"alibi": 2e-3, "qk_rope": 2e-3, "qkvo_rope": 2e-3, "vo_rope": 1e-3, "k_rope": 1e-3, "nope": 1e-3}


def test_adamws_gap_is_a_mixture():
    optimizers = page("docs/optimizers.md")
    adamw, muon = losses_of("headline_gpu_adamw"), losses_of("headline_gpu_muon")
    adamw, muon = adamw["qk_rope"] - adamw["alibi"], muon["qk_rope"] - muon["alibi"]
    begun = np.isfinite(at_rate("headline_gpu_adamw-tune", "qk_rope", 2e-3, "onset"))
    waiting, others = adamw[~begun], adamw[begun]
    assert len(waiting) == len(others) == 4
    assert f"{waiting.min():.2f} to {waiting.max():.2f} nats with the four seeds whose QK has not begun" in optimizers
    assert f"{others.min():.2f} to {others.max():.2f} with the four others" in optimizers
    assert f"Muon's is {muon.min():.2f} to {muon.max():.2f}" in optimizers
    assert f"With those four seeds the difference is {plus_minus((adamw - muon)[begun], 2).lstrip('+')}" in optimizers
    new = (adamw - muon).loc[5:]
    assert len(new) == 3 and f"new seeds alone give {plus_minus(new, 2).lstrip('+')}" in optimizers


def test_order_far_back_at_25_million_parameters():
    rows = posbench.results(REFERENCE / "kexue_25m", tidy=True)
    rows = rows[(rows["protocol"] == "order") & (rows["metric"] == "lost_order") & (rows["first"] == 33)]
    sums = rows.groupby(["scheme", "seed"], observed=True)[["value", "count"]].sum()
    lost = (sums["value"] / sums["count"]).round(3)
    nope, qk = ([f"{value:.3f}" for value in lost[scheme]] for scheme in ("nope", "qk_rope"))
    assert f"({' and '.join(nope)} nats; QK {' and '.join(qk)})" in page("docs/results.md")
    assert (lost.drop("nope").max()) < lost["nope"].max() and (lost["nope"] > lost["qk_rope"]).all()


def test_alibis_lead_on_prose_under_adamw():
    leads = {}
    for rate in ("0.001", "0.002"):
        runs = find_runs(REFERENCE / "headline_prose-tune" / f"lr={rate}-6.14M")
        losses = {(run.manifest.scheme, run.manifest.seed): run.manifest.loss for run in runs}
        leads[rate] = [losses["qk_rope", seed] - losses["alibi", seed] for seed in range(3)]
    low, high = leads["0.001"], leads["0.002"]
    sentence = f"by {min(low):.3f} to {max(low):.3f} nats at 1e-3 and {min(high):.3f} to {max(high):.3f} at 2e-3"
    assert sentence in page("docs/results.md")


def test_heads():
    losses = {
        name: posbench.results(REFERENCE / name).pivot(index="seed", columns="scheme", values="loss")
        for name in (
            "heads-2x16",
            "heads-2x48",
            "heads-6x48",
            "heads-2x48-adamw-3.07M",
            "heads-2x48-adamw-6.14M",
            "setups",
        )
    }
    gaps = {name: table["alibi"] - table["qk_rope"] for name, table in losses.items()}
    readme, results = page("README.md"), page("docs/results.md")
    assert (gaps["heads-2x16"] > 0).all() and f"by {plus_minus(gaps['heads-2x16'], 2).lstrip('+')}. No pair" in results
    mean, low, _ = interval(gaps["heads-6x48"])
    assert f"its lead is {-mean:.3f} ±{mean - low:.3f} (five seeds)" in readme
    effects = (ROOT / "docs/lists/results/heads.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^model\.(num_heads|head_dim) \| qk_rope \| alibi \|.*\| \S?([\d.]+ ±[\d.]+) \|", effects, re.MULTILINE
    )
    number, width = dict(rows)["num_heads"], dict(rows)["head_dim"]
    assert f"falls by {number}" in results and f"nothing is shown ({width};" in results
    assert f"QK leads by {plus_minus(gaps['heads-2x48']).lstrip('+')}" in readme
    steep = plus_minus(losses["heads-2x48"]["alibi_steep"] - losses["heads-2x48"]["qk_rope"]).lstrip("+")
    assert f"only by {steep} if ALiBi's slopes are steeper" in readme and f"gap to QK is {steep} instead" in results
    early, later = losses["heads-2x48-adamw-3.07M"], losses["heads-2x48-adamw-6.14M"]
    to_alibi, to_vo = (plus_minus(early[scheme] - early["qk_rope"]).lstrip("+") for scheme in ("alibi", "vo_rope"))
    assert f"ahead of ALiBi by {to_alibi} at 3.07 million" in results and f"of VO by {to_vo} and again" in results
    assert (later["qk_rope"] < later["alibi"]).all() and (later["qk_rope"] < later["vo_rope"]).all()
    # Setups 0, 1, 4 and 5 have six heads of 16 (conf/experiment/setups.yaml), the others two of 48.
    assert list(gaps["setups"].loc[:7] < 0) == [True, True, False, False, True, True, False, False]


def test_what_the_readme_says_of_other_pages():
    readme = page("README.md")
    assert f"[{len(choices('scheme'))} schemes](docs/lists/schemes.md)" in readme
    demo = page("docs/lists/results/demo.md")
    assert "10 of 12 pairs that were fixed before training are decided" in demo and "Ten of twelve pairs" in readme
    assert "lowest first: qkvo_rope 2.936, qk_rope 2.961, qkv_rope 3.030," in demo and "QKVO better than QK" in readme
    tables = (ROOT / "docs/lists/extending-tables.md").read_text(encoding="utf-8").partition("## Without training")[2]
    rows = dict(re.findall(r"^\| (YaRN|nothing) \| ([\d.]+) ", tables, re.MULTILINE))
    yarn, nothing = (f"{float(rows[name]):.2f}" for name in ("YaRN", "nothing"))
    assert f"a loss of {yarn} instead of {nothing}" in readme
    headline = page("docs/lists/results/headline.md")
    assert "51% to 90%" in headline and "51 to 90 % of its lead" in readme and "31 to 46 %" in page("docs/results.md")


def test_the_prediction():
    """The rule is in conf/experiment/prediction.yaml: 0.08 inside of the interval, and 0.159 outside."""
    runs = posbench.results(REFERENCE / "prediction")
    losses = runs.pivot(index="seed", columns="scheme", values="loss")
    assert list(losses.index) == list(range(16, 24))
    leads = losses["qk_rope"] - losses["alibi"]
    _, low, high = interval(leads)
    assert low <= 0.08 <= high < 0.159
    lead, results, readme = plus_minus(leads).lstrip("+"), page("docs/results.md"), page("README.md")
    assert f"confirmed**: the lead is {lead}" in results and f"give {lead}, but not" in readme
    assert f"{lead}, confirmed" in page("conf/experiment/prediction.yaml")
    onsets = runs[runs["scheme"] == "qk_rope"].set_index("seed")["onset_tokens"] / 1e6
    late = onsets.idxmax()
    assert f"one late seed ({onsets[late]:.1f} million) the lead is {leads.drop(late).mean():.2f}" in results
    of_report = page("docs/lists/results/prediction.md")
    median = re.search(r"qk_rope \| 8/8 \| ([\d.]+)M", of_report)
    gap, low, high = re.search(r"qk_rope \| 8 \| \S+ \S+ \| \+(\S+ \S+) \| (\d+)% to (\d+)%", of_report).groups()
    assert f"(median {median[1]} instead of" in results and f"ALiBi leads by {gap}. So {low} to {high} %" in results
    assert f"{low} to {high} % goes with the onset" in readme
