"""Write docs/lists/optimizer-tables.md from the packs."""

from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd

from posbench.analysis.setups import paired_effects
from posbench.analysis.statistics import interval
from posbench.evaluation.protocols import PROTOCOLS
from posbench.runs import find_runs

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "runs/reference"
PAGE = (ROOT / "docs/optimizers.md").read_text(encoding="utf-8")
TABLES = ROOT / "docs/lists/optimizer-tables.md"
PAIR = ("alibi", "qk_rope")
# Experiment on the GPU -> its name on the page, and the rates of ALiBi and QK.
GROUPS = {
    "headline_gpu_adamw": ("AdamW", 2e-3, 2e-3),
    "headline_gpu_adamw_tables": ("AdamW, everything but the layers' matrices at 4e-3", 4e-3, 4e-3),
    "headline_gpu_muon_ns0": ("Muon without orthogonalisation", 2e-3, 4e-3),
    "headline_gpu_muon": ("Muon", 2e-3, 4e-3),
}
RATES = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)


@cache
def runs_of(folder):
    """Return the runs of a folder of packs: rate, scheme, seed, loss in nats, onset in millions of tokens."""
    rows = []
    for run in find_runs(REFERENCE / folder):
        onset = PROTOCOLS["order"].of_training(run.logged)["onset_tokens"] / 1e6
        row = {"rate": run.config.train.lr, "scheme": run.config.scheme.name, "seed": run.config.seed}
        rows.append(row | {"loss": run.manifest.loss, "onset": onset})
    return pd.DataFrame(rows)


def at_rate(folder, scheme, rate, values="loss"):
    """Return one value of each seed's run of a scheme at a rate."""
    runs = runs_of(folder)
    return runs[(runs["scheme"] == scheme) & (runs["rate"] == rate)].set_index("seed")[values].sort_index()


def losses_of(experiment):
    """Return the losses of ALiBi and QK at the page's rates, a row per seed."""
    _, *rates = GROUPS[experiment]
    return pd.DataFrame({s: at_rate(f"{experiment}-tune", s, rate) for s, rate in zip(PAIR, rates, strict=True)})


def plus_minus(differences):
    mean, low, high = interval(differences.to_numpy(float))
    return f"{mean:+.2f} ±{(high - low) / 2:.2f}"


def onset_text(onsets):
    median = onsets.quantile(0.5, interpolation="lower")
    return f"{'never' if np.isinf(median) else f'{median:.1f}'} ({np.isfinite(onsets).sum()})"


def main_table():
    lines = [
        "| optimizer | rates, ALiBi and QK | ALiBi | QK | QK − ALiBi | onset, ALiBi | onset, QK |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for experiment, (name, *rates) in GROUPS.items():
        losses = losses_of(experiment)
        onsets = [at_rate(f"{experiment}-tune", s, r, "onset") for s, r in zip(PAIR, rates, strict=True)]
        cells = [name, f"{rates[0]:g}, {rates[1]:g}", *losses.mean().map("{:.3f}".format)]
        cells += [plus_minus(losses["qk_rope"] - losses["alibi"]), *map(onset_text, onsets)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def table_by_rate():
    lines = [
        "| rate | AdamW, ALiBi | AdamW, QK | Muon, ALiBi | Muon, QK |",
        "|--:|--:|--:|--:|--:|",
    ]
    for rate in RATES:
        columns = [(f"headline_gpu_{o}-tune", s) for o in ("adamw", "muon") for s in PAIR]
        cells = [f"{at_rate(folder, scheme, rate).mean():.3f}" for folder, scheme in columns]
        lines.append(f"| {rate:g} | {' | '.join(cells)} |")
    return lines


def difference(first, second):
    """Return the difference of two groups' gaps as text, with its interval and p."""
    groups = {("first",): first, ("second",): second}
    [row] = paired_effects(groups, ["optimizer"], [PAIR]).to_dict("records")
    half = (row["difference_high"] - row["difference_low"]) / 2
    return f"{row['difference']:+.2f} ±{half:.2f} nats (p {row['p']:.2g})"


def differences():
    muon, adamw = losses_of("headline_gpu_muon"), losses_of("headline_gpu_adamw")
    plain, tables = losses_of("headline_gpu_muon_ns0"), losses_of("headline_gpu_adamw_tables")
    return [
        "The gap QK − ALiBi, paired by seed, differs by",
        "",
        f"- {difference(adamw, muon)} between AdamW and Muon;",
        f"- {difference(plain, muon)} between Muon without and with orthogonalisation;",
        f"- {difference(tables, muon)} between AdamW with all but the layers' matrices at 4e-3 and Muon;",
        f"- {difference(adamw, plain)} between AdamW and Muon without orthogonalisation.",
    ]


def on_cpus():
    """Return what the same runs on CPUs say: how far their losses are from the GPU's, and the difference of gaps."""
    cpu = {"AdamW": "headline-6.14M", "Muon": "headline_muon-tune"}
    sentences, losses = [], {}
    for optimizer, (_, *rates) in zip(cpu, (GROUPS["headline_gpu_adamw"], GROUPS["headline_gpu_muon"]), strict=True):
        of_schemes = {s: at_rate(cpu[optimizer], s, rate) for s, rate in zip(PAIR, rates, strict=True)}
        losses[optimizer] = pd.DataFrame(of_schemes).dropna()
        stacked = losses_of(f"headline_gpu_{optimizer.lower()}").loc[:4]
        apart = stacked - losses[optimizer]
        intervals = [interval(apart[s].to_numpy(float)) for s in PAIR]
        assert all(low > -0.01 and high < 0.01 for _, low, high in intervals), "stacked runs may not share tables"
        alibi, qk = (f"{mean:+.4f} ({low:+.4f} to {high:+.4f})" for mean, low, high in intervals)
        sentences.append(f"- {optimizer}: ALiBi {alibi}, QK {qk}")
    apart = difference(losses["AdamW"], losses["Muon"])
    return [
        *sentences,
        "",
        f"On CPUs alone, by validation losses, the two optimizers' gaps differ by {apart} over "
        f"{len(losses['Muon'])} seeds.",
    ]


# Scheme -> its rate under AdamW, in the order of losses under Muon.
SIX = {"alibi": 2e-3, "qk_rope": 2e-3, "qkvo_rope": 2e-3, "vo_rope": 1e-3, "k_rope": 1e-3, "nope": 1e-3}


def gaps_to_qk(scheme):
    """Return how far a scheme is behind QK under AdamW and Muon as text, seeds 0 to 2 on CPUs."""
    adamw = at_rate("headline-6.14M", scheme, SIX[scheme]) - at_rate("headline-6.14M", "qk_rope", SIX["qk_rope"])
    muon = at_rate("headline_muon-tune", scheme, 2e-3) - at_rate("headline_muon-tune", "qk_rope", 2e-3)
    return [plus_minus(gaps.loc[:2]) for gaps in (adamw, muon)]


def six_schemes():
    """Return the table of runs on CPUs at one rate under Muon, beside AdamW at each scheme's own rate."""
    lines = ["| scheme | AdamW | Muon | behind QK, AdamW | behind QK, Muon | onset, AdamW | onset, Muon |"]
    lines.append("|---|--:|--:|--:|--:|--:|--:|")
    for scheme, rate in SIX.items():
        adamw, muon = [], []
        for values, text in (("loss", lambda losses: f"{losses.mean():.3f}"), ("onset", onset_text)):
            adamw.append(text(at_rate("headline-6.14M", scheme, rate, values).loc[:2]))
            muon.append(text(at_rate("headline_muon-tune", scheme, 2e-3, values).loc[:2]))
        gaps = ["", ""] if scheme == "qk_rope" else gaps_to_qk(scheme)
        cells = [scheme, adamw[0], muon[0], *gaps, adamw[1], muon[1]]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def page_of_tables():
    return "\n".join(
        [
            "<!-- Written by python docs/site/generated.py from the packs. -->",
            "\n# Optimizers: tables\n\n[Optimizers](../optimizers.md) says what they mean. Losses in nats per token.",
            "\n## By learning rate\n\nTwo seeds at the outer rates, eight at the others.\n",
            *table_by_rate(),
            "\n## Differences of gaps\n",
            *differences(),
            "\nThe p values are not corrected for four comparisons.",
            "\n## The same on CPUs\n\nLosses on the GPU minus losses on CPUs, at the same rates, seeds 0 to 4: means "
            "and 95 % intervals.\n",
            *on_cpus(),
            "\nThree seeds on CPUs, Muon at 0.002, AdamW at each scheme's own rate (VO, K and NoPE 0.001). QKVO and K "
            "under Muon are exploratory.\n",
            *six_schemes(),
            "",
        ]
    )


def onsets_apart():
    """Return how much later QK begins under Muon at the same rates."""
    later = []
    for rate in (2e-3, 4e-3):
        medians = [at_rate("headline_gpu_muon-tune", s, rate, "onset").median() for s in PAIR]
        later.append(medians[1] - medians[0])
    return [f"at the same rate {min(later):.1f} to {max(later):.1f} million tokens after ALiBi"]
