"""Write docs/lists/extending-tables.md from the packs."""

from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import yaml

from posbench.analysis.statistics import LEVEL, compare, interval
from posbench.runs import find_runs

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "runs/reference"
PAGE = (ROOT / "docs/extending.md").read_text(encoding="utf-8")
TABLES = ROOT / "docs/lists/extending-tables.md"
BEGAN = 4800  # the step of the base's checkpoint
LENGTHS = (256, 1024, 2048, 4096)  # most tokens of context
# Experiment and scheme -> the row's name on the page.
ROWS = {
    ("extend_base", "qk_rope"): "the base, to its end at 256",
    ("extend-short", "qk_rope_short"): "control: 256, the arms' text",
    ("extend-arms", "qk_rope_plain"): "nothing changed",
    ("extend-arms", "qk_rope_pi"): "PI",
    ("extend-arms", "qk_rope_ntk"): "NTK",
    ("extend-arms", "qk_rope_base_x4"): "base 40,000",
    ("extend-arms", "qk_rope_yarn"): "YaRN",
    ("extend-arms", "qk_rope_dropped"): "positions dropped",
    ("extend-long", "qk_rope"): "control: 1,024 from the first step",
    ("extend_base", "alibi"): "ALiBi, the base, to its end at 256",
    ("extend-arms", "alibi_plain"): "ALiBi, nothing changed",
}


@cache
def runs_of(experiment):
    """Return the runs of a pack, {(scheme, seed): run}, or {} without such a pack."""
    place = REFERENCE / f"{experiment}.zip"
    runs = find_runs(place) if place.exists() else []
    return {(run.manifest.scheme, run.manifest.seed): run for run in runs}


@cache
def losses(experiment, scheme, length, under=(), anchor=4096):
    """Return each seed's loss on the test text with up to `length` tokens of context, nats per token.

    Arguments: anchor, the longest length that was scored on the same targets.
    """
    by_seed = {}
    for (name, seed), run in runs_of(experiment).items():
        for result in run.results()[0] if name == scheme else ():
            key = result.key
            is_asked = (key.protocol, key.length, key.anchor) == ("fixed", length, anchor)
            if is_asked and tuple(key.under) == under:
                by_seed[seed] = result.windows["nll"].sum() / result.windows["targets"].sum()
    return pd.Series(by_seed, dtype=float).sort_index()


def copyable(experiment, scheme):
    """Return what order more than 32 tokens back is worth on copyable targets to each seed, nats per token."""
    by_seed = {}
    for (name, seed), run in runs_of(experiment).items():
        if name == scheme:
            [last] = [row for row in run.logged if row["kind"] == "order"][-1:]
            by_seed[seed] = last["copyable_order_beyond_32"]
    return pd.Series(by_seed, dtype=float).sort_index()


def tokens_until_better(experiment, scheme):
    """Return after how many thousand tokens each seed's validation loss is below its checkpoint's."""
    by_seed = {}
    for (name, seed), run in runs_of(experiment).items():
        rows = [row for row in run.logged if row["kind"] == "validation"]
        start = next((row["loss"] for row in rows if row["step"] == BEGAN), np.nan)
        if name == scheme:
            below = [row["step"] - BEGAN for row in rows if row["step"] > BEGAN and row["loss"] < start]
            by_seed[seed] = 1.024 * below[0] if below else np.inf
    return pd.Series(by_seed, dtype=float).sort_index()


def plus_minus(values, digits=3):
    mean, low, high = interval(values.to_numpy(float))
    half = f" ±{(high - low) / 2:.{digits}f}" if len(values) > 2 else ""
    return f"{mean:.{digits}f}{half}"


def table():
    lines = [
        "| | seeds | ≤ 256 | ≤ 1,024 | ≤ 2,048 | ≤ 4,096 | copyable order | better after |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for (experiment, scheme), name in ROWS.items():
        at = [losses(experiment, scheme, length) for length in LENGTHS]
        if at[0].empty:
            continue
        cells = [name, str(len(at[0])), *map(plus_minus, at), plus_minus(copyable(experiment, scheme), 2)]
        after = tokens_until_better(experiment, scheme)
        text = "–"
        if experiment == "extend-arms":
            text = "never" if np.isinf(after).all() else f"{after.min():.0f}k to {after.max():.0f}k"
        cells.append(text)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def prediction():
    """Return the table of the ways to rescale, without and with training, best first without training."""
    options = {
        "YaRN": (("rescale=yarn",), "qk_rope_yarn"),
        "PI": (("rescale=pi",), "qk_rope_pi"),
        "NTK": (("rescale=ntk",), "qk_rope_ntk"),
        "base 40,000": (("base=40000",), "qk_rope_base_x4"),
        "nothing": ((), "qk_rope_plain"),
    }
    lines = ["| | without training | after training |", "|---|--:|--:|"]
    order = []
    for name, (under, arm) in options.items():
        before = losses("extend_base", "qk_rope", 1024, under, 1024)
        after = losses("extend-arms", arm, 1024)
        order.append((before.mean(), after.mean()))
        lines.append(f"| {name} | {plus_minus(before)} | {plus_minus(after)} |")
    assert order == sorted(order) and [after for _, after in order] == sorted(after for _, after in order)
    return lines


def fixed_pairs():
    """Return the pairs of QK's arms that were fixed beforehand, on the test text, with p by Holm's correction."""
    names = {scheme: name for (experiment, scheme), name in ROWS.items() if experiment == "extend-arms"}
    arms = [scheme for scheme in names if scheme.startswith("qk_rope")]
    table = pd.DataFrame({scheme: losses("extend-arms", scheme, 1024) for scheme in arms})
    planned = yaml.safe_load((ROOT / "conf/experiment/extend.yaml").read_text(encoding="utf-8"))["experiment"][
        "primary"
    ]
    tests = compare(table, primary=planned).dropna(subset="p_claimed")
    lines = ["| pair | difference | p, 11 pairs |", "|---|--:|--:|"]
    for pair in tests.sort_values("p_claimed").itertuples():
        half = (pair.difference_high - pair.difference_low) / 2
        verdict = "" if pair.p_claimed <= LEVEL else " (open)"
        name = f"{names[pair.left]} before {names[pair.right]}"
        lines.append(f"| {name} | {pair.difference:.3f} ±{half:.3f} | {pair.p_claimed:.2g}{verdict} |")
    return lines


def page_of_tables():
    return "\n".join(
        [
            "<!-- Written by python docs/site/generated.py from the packs. -->",
            "\n# Extending: tables\n\n[Extending](../extending.md) says what they mean.",
            "\n## Pairs that were fixed beforehand\n",
            "Arms of `qk_rope`, on the test text with up to 1,024 tokens of context; p with Holm's correction over all",
            "eleven planned pairs. The first one has the lower loss.\n",
            *fixed_pairs(),
            "\n## Every arm and control\n",
            "Losses on the test text with up to so many tokens of context, nats per token, ± half of the 95 % interval",
            "over seeds. Copyable order: what order more than 32 tokens back is worth on copyable targets, in windows",
            "of the trained length, so rows trained at 256 are not comparable with the others. Better after:",
            "tokens until the validation loss at 1,024 is below the loss that the checkpoint had at 256.\n",
            *table(),
            "\n## Without training, and after it\n\nTest losses at 1,024 tokens of the base, trained to its end at 256 "
            "and read under each option, and of the arms.\n",
            *prediction(),
            "",
        ]
    )
