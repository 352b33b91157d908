"""Write docs/how-far-table.md from the packs and published.yaml."""

import math
from functools import cache
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import rankdata, t

from posbench.analysis.published import all_published
from posbench.config.units import plus_minus
from posbench.runs import find_runs

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "runs/reference"
PAGE = ROOT / "docs/how-far-a-small-result-carries.md"
TABLE = ROOT / "docs/how-far-table.md"
CLOSE = 0.02  # published gaps below this, in nats, are a class of their own
# What one would guess without training: each class is better than the next.
GUESS = (
    {"alibi", "t5", "kerple", "fire", "fox", "dape"},
    {"qk_rope", "p_rope_25", "p_rope_75"},
    {"q_rope", "k_rope", "v_rope", "o_rope", "vo_rope", "qkv_rope", "qkvo_rope"},
    {"sinusoidal", "learned"},
    {"nope"},
)
# A pair is compared in the first of these that has both schemes. The last has two seeds, so it decides nothing.
EXPERIMENTS = {"headline": "0.43M", "ladder_m": "0.43M", "all_schemes": "0.17M"}
TASKS = ("copy", "count", "flip_flop", "index", "index_from_end", "mqar")


@cache
def losses(experiment):
    """Return the loss in nats per token of each run: columns scheme, seed, ratio (length / training length), loss."""
    cells = []
    for run in find_runs(REFERENCE / experiment):
        for result in run.results()[0]:
            if result.key.options or result.key.data or result.protocol not in ("validation", "fixed"):
                continue
            ratio = result.length / run.config.train.context_length
            if (ratio == 1) == (result.protocol == "validation"):
                cells.append((run.config.scheme.name, run.config.seed, ratio, result.loss))
    return pd.DataFrame(cells, columns=["scheme", "seed", "ratio", "loss"])


@cache
def reciprocal_ranks(schemes):
    """Return each seed's mean over tasks of 1 / rank of accuracy at twice the trained length, negated, by scheme."""
    cells = []
    for task in TASKS:
        for run in find_runs(REFERENCE / "tasks" / task):
            if run.config.scheme.name in schemes:
                length = 2 * max(run.config.data.lengths)
                [accuracy] = {
                    r.header["accuracy"]
                    for r in run.results()[0]
                    if (r.protocol, r.length) == ("accuracy", length) and not r.key.options
                }
                cells.append((task, run.config.scheme.name, run.config.seed, accuracy))
    frame = pd.DataFrame(cells, columns=["task", "scheme", "seed", "accuracy"])
    table = frame.pivot_table(index=["seed", "task"], columns="scheme", values="accuracy")
    ranks = pd.DataFrame(rankdata(-table, axis=1, method="min"), table.index, table.columns)
    return -(1 / ranks).groupby("seed").mean()


def ours(measurement, scheme, baseline):
    """Return where the pair was measured, and each seed's gap, which is below 0 if `scheme` is better."""
    if measurement.metric == "mean reciprocal rank":
        table = reciprocal_ranks(tuple(sorted(measurement.values)))
        return "tasks, 2 layers of 64", (table[scheme] - table[baseline]).to_numpy()
    for experiment, size in EXPERIMENTS.items():
        cells = losses(experiment)
        of_pair = cells[cells["scheme"].isin([scheme, baseline])]
        has_both = of_pair.groupby("ratio")["scheme"].nunique() == 2
        ratios = has_both.index[has_both].to_numpy()
        distances = np.abs(np.log2(ratios / measurement.ratio))
        if len(ratios) and distances.min() <= math.log2(1.25):
            at_nearest = of_pair[of_pair["ratio"] == ratios[distances.argmin()]]
            table = at_nearest.pivot(index="seed", columns="scheme", values="loss")  # refuses two losses of one run
            return f"{experiment}, {size}", (table[scheme] - table[baseline]).dropna().to_numpy()
    return None


def rows():
    """Return (outcome, line) of each published pair, in the order of the page's table."""
    entries = [
        (outcome, axis, line)
        for published in all_published().values()
        for measurement in published.measurements
        for scheme in measurement.values
        if scheme != published.baseline
        for outcome, axis, line in [row(published, measurement, scheme)]
        if outcome
    ]
    order = ["disagree", "undecided, opposite sign", "undecided, same sign", "agree"]
    entries.sort(key=lambda entry: (order.index(entry[0]), ["within", "beyond", "tasks"].index(entry[1])))
    return [(outcome, line) for outcome, _, line in entries]


def row(published, measurement, scheme):
    """Return outcome, axis and Markdown of one published pair; "" as the outcome if no pack has it."""
    pair = ours(measurement, scheme, published.baseline)
    if pair is None:
        return "", "", ""
    place, gaps = pair
    theirs = measurement.losses[scheme] - measurement.losses[published.baseline]
    half = t.ppf(0.975, len(gaps) - 1) * gaps.std(ddof=1) / math.sqrt(len(gaps))
    axis = "tasks" if measurement.metric == "mean reciprocal rank" else "beyond" if measurement.ratio > 1 else "within"
    decided = len(gaps) > 2 and abs(gaps.mean()) > half
    same = theirs * gaps.mean() > 0
    outcome = ("agree" if same else "disagree") if decided else f"undecided, {'same' if same else 'opposite'} sign"
    size = measurement.model or published.setup.get("parameters", "")
    size = size.removesuffix(" parameters").replace("about ", "")
    where = f"{axis}, {measurement.ratio:.2g}x" if axis == "beyond" else axis
    shown = plus_minus(gaps.mean(), half if len(gaps) > 2 else math.nan, sign=True)
    cells = [f"[{published.name}]({published.source})", size, where, f"{scheme} - {published.baseline}"]
    return (
        outcome,
        axis,
        "| " + " | ".join([outcome, *cells, f"{theirs:+.3f}", shown, f"{place}, {len(gaps)} seeds"]) + " |",
    )


def decided_pairs():
    """Return every pair of every published table that our runs decide, also those without the table's baseline.

    Columns: source, axis, first, second, published and our gap (nats, first minus second), with_baseline.
    """
    found = []
    for published in all_published().values():
        for measurement in published.measurements:
            axis = "beyond" if measurement.ratio > 1 else "within"
            if measurement.metric == "mean reciprocal rank":
                axis = "tasks"
            for first, second in combinations(measurement.values, 2):
                _, gaps = ours(measurement, first, second) or ("", np.empty(0))
                if len(gaps) < 3 or abs(gaps.mean()) <= half_interval(gaps):
                    continue
                theirs = measurement.losses[first] - measurement.losses[second]
                with_baseline = published.baseline in (first, second)
                found.append((published.name, axis, first, second, theirs, gaps.mean(), with_baseline))
    return pd.DataFrame(found, columns=["source", "axis", "first", "second", "published", "ours", "with_baseline"])


def half_interval(gaps):
    return float(t.ppf(0.975, len(gaps) - 1) * gaps.std(ddof=1) / math.sqrt(len(gaps)))


def agreeing_by_chance(pairs, trials=10_000, keeps=""):
    """Return how many of these pairs within the training length agree if our schemes' names are permuted, [trials].

    All sources are permuted alike, because they are compared with the same runs. Arguments: keeps, a scheme that keeps
    its name.
    """
    level = losses("ladder_m").query("ratio == 1").groupby("scheme")["loss"].mean()
    names = [name for name in level.index if name in {*pairs["first"], *pairs["second"]}]
    moved = [name for name in names if name != keeps]
    random, agreeing = np.random.default_rng(0), []
    for _ in range(trials):
        shuffled = dict(zip(moved, random.permutation(moved), strict=True)) | ({keeps: keeps} if keeps else {})
        gaps = level[pairs["first"].map(shuffled)].to_numpy() - level[pairs["second"].map(shuffled)].to_numpy()
        agreeing.append(int((gaps * pairs["published"] > 0).sum()))
    return np.array(agreeing)


def guessed(pairs):
    """Return how many of the pairs GUESS gets right."""
    place = {scheme: n for n, names in enumerate(GUESS) for scheme in names}
    difference = pairs["first"].map(place) - pairs["second"].map(place)
    return int((difference * pairs["published"] > 0).sum())


def sentences():
    """Return the sentences of the page that hold figures."""
    pairs = decided_pairs()
    is_same = pairs["published"] * pairs["ours"] > 0
    by_axis = []
    for axis, name in (("within", "within the training length"), ("beyond", "beyond it"), ("tasks", "on tasks")):
        of_axis = is_same[pairs["axis"] == axis]
        by_axis.append(f"{of_axis.sum()} of {len(of_axis)} {name}")
    is_close = pairs["published"].abs() < CLOSE
    close, far = is_same[is_close], is_same[~is_close]
    kexue = is_same[pairs["source"] == "kexue-10862"]
    with_baseline = pairs[pairs["with_baseline"] & (pairs["axis"] == "within")]
    in_ladder = with_baseline[
        with_baseline[["first", "second"]].isin(losses("ladder_m")["scheme"].unique()).all(axis=1)
    ]
    observed = int((in_ladder["published"] * in_ladder["ours"] > 0).sum())
    chance = {keeps: agreeing_by_chance(in_ladder, keeps=keeps) for keeps in ("", "nope")}
    p = {keeps: (counts >= observed).mean() for keeps, counts in chance.items()}
    return [
        f"Our runs decide {len(pairs)} pairs of published tables, and {is_same.sum()} have the published sign: "
        f"{', '.join(by_axis)}.",
        f"Of pairs that are published with less than {CLOSE} nats, {close.sum()} of {len(close)} agree, of the others "
        f"{far.sum()} of {len(far)}.",
        f"Of the table of kexue 10862 (Su Jianlin's at about 1B), {kexue.sum()} of {len(kexue)} decided pairs agree.",
        f"With the baseline of the published table, {observed} of {len(in_ladder)} pairs within the training length "
        f"agree; if the names of our schemes are permuted, {chance[''].mean():.0f} ±{chance[''].std():.1f} "
        f"(p {p['']:.2f}; {p['nope']:.2f} with NoPE kept last).",
        f"A guess without training (biases, then RoPE, other rotations, absolute positions, none) has "
        f"{guessed(with_baseline)} of {len(with_baseline)}.",
    ]


def reversals():
    """Return the pairs that are decided against the published sign, as text, those within the training length."""
    pairs = decided_pairs()
    against = pairs[(pairs["published"] * pairs["ours"] < 0) & (pairs["axis"] == "within")]
    texts = []
    for pair in against.itertuples():
        texts.append(f"{pair.first} - {pair.second} ({pair.source}: {pair.published:+.3f}, ours {pair.ours:+.2f})")
    return texts


def page_of_the_table():
    head = (
        "<!-- Written by python docs/site/generated.py from published.yaml and the packs. -->\n\n"
        "# Published pairs and ours\n\n"
        "What the columns mean is in [how far a small result carries](how-far-a-small-result-carries.md).\n\n"
        "## Reversed pairs within the training length\n\n"
        "All pairs of the published tables that our runs decide, also those without the table's baseline.\n\n"
        + "\n".join(f"- {pair}" for pair in reversals())
        + "\n\n## Every pair with a published baseline\n\n"
        "| outcome | source | size | axis | pair | published | ours | our runs |\n"
        "|---|---|--:|---|---|--:|--:|---|\n"
    )
    return head + "\n".join(line for _, line in rows()) + "\n"
