"""What a report says and in which order: findings as sections of sentences, tables and pictures, before any of them is shown."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from posbench.reporting.evaluations import LENGTH_PROTOCOLS, VALIDATION
from posbench.reporting.findings import Findings
from posbench.reporting.frame import FINGERPRINTS
from posbench.reporting.published import SETUP, Comparison
from posbench.reporting.statistics import LEVEL, MOST_SEEDS, POWER, Chain, Pair, sd_range
from posbench.reporting.tables import DASH, Table, length_text, number, perplexity_text, plus_minus

if TYPE_CHECKING:
    import pandas as pd


@dataclass
class Section:
    """A heading with what stands under it, in this order: sentences, tables, pictures."""

    title: str
    words: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    pictures: list[tuple[str, str]] = field(default_factory=list)  # file stem, caption
    on_terminal: bool = True
    chain: Chain | None = None  # the first sentence then is its text
    short: str = ""  # the title where there is little room


def sections(findings: Findings, pictures: Iterable[str]) -> list[Section]:
    """All sections that have something to say, best first. `pictures` names the figures that were drawn."""
    drawn = list(pictures)
    made = [
        losses(findings, drawn),
        ranking(findings),
        *(against(findings, comparison) for comparison in findings.against),
        training(drawn),
        *extrapolation(findings, drawn),
        position(drawn),
        retrieval(findings, drawn),
        setup(findings),
        fingerprints(findings),
        left_out(findings),
    ]
    return [section for section in made if section is not None]


def losses(findings: Findings, drawn: list[str]) -> Section:
    """The loss table: one row a scheme, best first; at the end the schemes that have no run to compare."""
    there, base = findings.at(VALIDATION), findings.baseline
    words = []
    if there:
        m = next(iter(there.values()))
        words.append(
            f"Loss on the {m.split} split at the training length of {m.length:,} tokens: {m.targets:,} tokens scored in {m.documents:,} documents, the same for every scheme."
        )
    seeds = len(findings.joined.seeds)
    if seeds > 1:
        words.append(f"± is half the 95% interval over {seeds} seeds (Student's t), each interval by itself. Gaps are paired: within a seed all schemes have the same initial weights and batches.")
    else:
        words.append("1 seed: how much another seed would change is not known, so there are no intervals over seeds and no order is claimed.")
    if base and len(findings.schemes) > 1:
        words.append("“By texts” is another doubt, not added to the first: half the 95% interval that the choice of documents leaves around the gap of these models (bootstrap over documents).")
    caption = f"Gap to {base}: mean and 95% interval over seeds; dots below it are seeds" + (", rings above it are published." if findings.against else ".")
    return Section("Loss on held-out text", words, [loss_table(findings)], _pictures(drawn, "gaps", caption))


def loss_table(findings: Findings) -> Table:
    there, joined, base = findings.at(VALIDATION), findings.joined, findings.baseline
    published = findings.against[0] if findings.against else None
    theirs = {row.scheme: row for row in published.rows} if published else {}
    headers = ["scheme", "position", "loss\nnats/token"]
    headers += [f"gap to {base}\nnats/token"] if base else []
    headers += ["seeds"]
    headers += [f"published\n{published.measurement.metric}"] if published else []
    headers += ["gap\nby texts"] if base else []
    headers += ["bits\nper byte", "speed\ntokens/s", "memory\nMiB"]
    rows = []
    for scheme in findings.schemes:
        m, t = there.get(scheme), theirs.get(scheme)
        runs = joined.runs[joined.runs["scheme"] == scheme]
        row = [scheme, position_text(findings, scheme)]
        row += [plus_minus(m.loss.mean, m.loss.half_width) if m else number(runs["loss"].mean())]
        row += [gap_text(m.gap.mean, m.gap.half_width, scheme == base) if m else DASH] if base else []
        row += [str(len(runs))]
        if published:
            row += [number(t.theirs, 3 if published.measurement.metric == "loss" else 2) if t else DASH]
        if base:
            row += [f"± {m.gap_documents:.4f}" if m and scheme != base and not math.isnan(m.gap_documents) else DASH]
        row += [number(m.bits_per_byte if m else runs["bits_per_byte"].mean(), 3)]
        row += [_whole(runs["tokens_per_second"].mean()), _whole(runs["peak_memory_bytes"].max() / 2**20)]
        rows.append(row)
    for scheme, status in absent_schemes(findings).items():
        rows.append([scheme, DASH, status, *[DASH] * (len(headers) - 3)])
    return Table("Loss on held-out text", headers, rows, left=frozenset({0, 1}))


def position_text(findings: Findings, scheme: str) -> str:
    """What the scheme was measured to be, and what it promises where that is not the same."""
    measured = findings.measured.get(scheme, "not measured")
    runs = findings.joined.runs
    promised = runs.loc[runs["scheme"] == scheme, "is_relative"].iloc[0]
    word = {True: "relative", False: "absolute"}.get(promised, "unknown")
    return measured if measured == word else f"{measured} ({word} promised)"


def gap_text(mean: float, half_width: float, is_baseline: bool, digits: int = 4) -> str:
    return "0" if is_baseline else plus_minus(mean, half_width, sign=True, digits=digits)


def absent_schemes(findings: Findings) -> dict[str, str]:
    """Schemes with runs of which none is compared -> their status."""
    gone = findings.frame[~findings.frame["scheme"].isin(findings.schemes)]
    return {str(scheme): ", ".join(sorted({"not compared" if s == "finished" else s for s in group["status"]})) for scheme, group in gone.groupby("scheme")}


def ranking(findings: Findings) -> Section | None:
    """The chain, and for each `~` what these seeds could have seen."""
    chain, pairs = findings.chain, findings.pairs
    if not pairs:
        return None
    if not chain.is_tested:
        words = [f"By loss, lowest first: {chain.text}", "1 seed: order not tested. A paired test needs at least 2 seeds; train more with `posbench train -m seed=0,1,2`."]
        return Section("Ranking", [words[0], words[1]], chain=chain)
    low, high = sd_range(chain.seeds)
    words = [
        chain.text,
        f"Paired t-tests over {chain.seeds} seeds for all {len(pairs)} pairs, Holm's correction: the chance of any false “>” is at most {LEVEL:.0%}. “>” stands where every scheme to its left is decided better "
        "than every scheme to its right; “~” where that cannot be said, which is no evidence that they are equal.",
    ]
    tables = []
    undecided = [(a, b) for a, sign, b in zip(chain.order, chain.signs, chain.order[1:], strict=False) if sign == "~"]
    if undecided:
        by_names = {(p.left, p.right): p for p in pairs}
        rows = [_open_pair(by_names[names]) for names in undecided]
        headers = ["neighbours", "difference\nnats/token", "p\n(Holm)", f"smallest visible\n({POWER:.0%} power)", "seeds to\ndecide it"]
        tables.append(Table("Where the chain says ~", headers, rows))
        words.append(
            f"Smallest visible: the true difference that these seeds would have decided with {POWER:.0%} probability at the corrected level of p = {pairs[0].level:.2g}. Seeds to decide: how many would give the observed "
            f"difference that chance. Both rest on a spread measured with {chain.seeds} seeds, which the true one is {low:.1f} to {high:.1f} times (95%): take them as orders of magnitude."
        )
    if chain.inside:
        said = "; ".join(f"{p.left} is better than {p.right} by {p.difference:.4f}" for p in chain.inside)
        words.append(f"Decided although no “>” stands between them: {said}.")
    return Section("Ranking", words, tables, chain=chain)


def _open_pair(pair: Pair) -> list[str]:
    """A pair can be decided and yet stand around a `~`: then another pair across that place is not."""
    return [
        f"{pair.left} ~ {pair.right}",
        plus_minus(pair.difference, pair.interval.half_width),
        f"{pair.p_holm:.2g}",
        f"{pair.smallest_visible:.4f}",
        "decided" if pair.is_decided else seeds_text(pair.seeds_to_decide),
    ]


def seeds_text(seeds: float) -> str:
    return DASH if math.isnan(seeds) else f"more than {MOST_SEEDS}" if math.isinf(seeds) else f"about {seeds:.0f}"


def against(findings: Findings, c: Comparison) -> Section:
    """Ours beside one published column."""
    title, short = f"Against {c.published.title}: {c.measurement.what}", f"Against {c.published.name}"
    if not c.rows:
        why = "no length of ours is near theirs" if not c.where else "no scheme of theirs is among ours"
        return Section(title, [f"Nothing of ours to set beside it: {why}."], on_terminal=False, short=short)
    base = c.baseline or "?"
    headers = ["scheme", f"published\n{c.measurement.metric}", f"ours\n{c.measurement.metric}", f"published gap\nto {base}", f"our gap\nto {base}"]
    loss = c.measurement.metric == "loss"
    rows = [
        [
            r.scheme,
            number(r.theirs, 3) if loss else perplexity_text(r.theirs),
            number(r.ours.loss.mean) if loss else perplexity_text(r.ours.perplexity),
            gap_text(r.their_gap, math.nan, r.scheme == base, 3),
            gap_text(r.our_gap, math.nan, r.scheme == base),
        ]
        for r in c.rows
    ]
    words = [f"Ours: {c.where}. Gaps in nats/token, each side of its own tokens."]
    if len(c.rows) > 1:
        words.append(f"Kendall's tau of the two orders: {c.tau:.2f} over {len(c.rows)} schemes" + (f" (p = {c.p:.2g} against no relation)." if len(c.rows) > 2 else " (of two schemes it can only be 1 or -1)."))
    tables = [Table("Published and ours", headers, rows)]
    if c.disagreements:
        shown = [[f"{d.better}, {d.worse}", number(d.their_difference, 3, sign=True), plus_minus(-d.pair.difference, d.pair.interval.half_width, sign=True), _decided(d.pair)] for d in c.disagreements]
        tables.append(Table("Pairs that stand the other way round", ["published better, worse", "published\nworse - better", "ours\nworse - better", "ours decided?"], shown, left=frozenset({0, 3})))
    elif len(c.rows) > 1:
        words.append("No pair stands the other way round.")
    words += c.published.notes
    if c is findings.against[0]:
        tables.append(setup_differences(findings, c))
    return Section(title, words, tables, short=short)


def _decided(pair: Pair) -> str:
    if pair.seeds < 2:
        return "1 seed: not tested"
    return f"{'yes' if pair.is_decided else 'no'} (p = {pair.p_holm:.2g})"


def setup_differences(findings: Findings, c: Comparison) -> Table:
    """What they trained, what we trained, what they do not say."""
    config, runs = findings.config, findings.joined.runs
    ours = {
        "runs a scheme": str(len(findings.joined.seeds)),
        "parameters": _millions(runs["parameters"].max()),
        "architecture": f"LLaMA-style decoder, {config.model.num_layers} layers of {config.model.d_model}",
        "data": f"{config.data.name}, validation split",
        "training tokens": _millions(runs["tokens"].max()),
        "context length": str(config.train.context_length),
        "learning rate": f"{config.train.lr:g}",
        "seeds": ", ".join(map(str, findings.joined.seeds)),
        "unit": f"a token of {config.tokenizer.kind}, {findings.vocab_size or 'unknown'} entries",
    }
    rows = [[what, c.published.setup.get(what, "not recorded here"), ours[what]] for what in SETUP]
    return Table("Set-up", ["", "published", "ours"], rows, left=frozenset({0, 1, 2}))


def training(drawn: list[str]) -> Section | None:
    found = _pictures(drawn, "curves", "Validation loss while training (mean over seeds) and, below, the same as gaps to the baseline with their 95% intervals; the gap's scale leaves out the first quarter.")
    return Section("Training", pictures=found, on_terminal=False) if found else None


def extrapolation(findings: Findings, drawn: list[str]) -> list[Section]:
    """Perplexity by length, one section a protocol."""
    return [_by_length(findings, protocol, drawn) for protocol in LENGTH_PROTOCOLS if findings.lengths(protocol)]


_PROTOCOLS = {
    "fixed": "Fixed targets: the same tokens are scored at every length, only the context to their left grows.",
    "nonoverlapping": "Non-overlapping windows: the text is cut into windows and every token scored. A longer window gains already by having fewer tokens near its start.",
    "sliding": "Sliding windows: windows overlap and only the last tokens of each are scored.",
}


def _by_length(findings: Findings, protocol: str, drawn: list[str]) -> Section:
    lengths = findings.lengths(protocol)
    places = {length: findings.at(protocol, length) for length in lengths}
    some = next(iter(places[lengths[0]].values()))
    headers = ["scheme", *(length_text(n) + ("*" if n == findings.training_length else "") for n in lengths)]
    schemes = [s for s in findings.schemes if any(s in places[n] for n in lengths)]
    rows = [[s, *(perplexity_text(places[n][s].perplexity) if s in places[n] else DASH for n in lengths)] for s in schemes]
    words = [f"{_PROTOCOLS[protocol]} The {some.split} split, {some.targets:,} tokens scored at {length_text(some.length)}, {some.documents:,} documents; exp of the mean loss over {len(some.seeds)} seed{'s' if len(some.seeds) > 1 else ''}. * marks the training length."]
    tables = [Table(f"Perplexity by length in tokens: {protocol}", headers, rows)]
    if protocol == "nonoverlapping" and not findings.early.empty:
        tables.append(early_table(findings))
        words.append(
            "“Early”: what windows longer than the training length T would gain if no token were the better or worse for more than T tokens of context, only because fewer tokens stand near a window's start: "
            "(1 - T/length) times (mean loss at T - loss at the end of a T-token window; its last bucket, so at least this much). Gain less early is what the longer context did."
        )
    return Section(f"Perplexity by length in tokens: {protocol}", words, tables, _pictures(drawn, f"perplexity-{protocol}", f"Perplexity against length, both on log scales ({protocol})."), short=f"Perplexity: {protocol}")


def early_table(findings: Findings) -> Table:
    """How much of the gain of long non-overlapping windows is only fewer early tokens."""
    early = findings.early.set_index(["scheme", "length"])
    lengths = sorted(set(findings.early["length"]))
    schemes = [s for s in findings.schemes if s in set(findings.early["scheme"])]
    headers = ["scheme", *(f"{length_text(n)} {part}" for n in lengths for part in ("\ngain", "\nearly"))]
    rows = [[s, *(number(early.loc[s, n][part], 3, sign=True) if (s, n) in early.index else DASH for n in lengths for part in ("gain", "early"))] for s in schemes]
    return Table(f"Gain over windows of {length_text(findings.training_length)}, nats/token, and the part that fewer early tokens explain", headers, rows)


def position(drawn: list[str]) -> Section | None:
    found = [p for stem in drawn if stem.startswith("position-") for p in _pictures(drawn, stem, f"Mean loss by position in windows of {stem.removeprefix('position-')} tokens, in log-spaced buckets.")]
    return Section("Loss by position", pictures=found, on_terminal=False) if found else None


def retrieval(findings: Findings, drawn: list[str]) -> Section | None:
    """The retrieval probe, a table a length."""
    if findings.retrieval.empty:
        return None
    tables, pictures = [], []
    for length, rows in findings.retrieval.groupby("length"):
        grid = rows.pivot(index="scheme", columns="gap", values="drop")
        shown = [[s, *(number(v, 2, sign=True) for v in grid.loc[s])] for s in findings.schemes if s in grid.index]
        tables.append(Table(f"Drop of the loss on the second copy by gap in tokens, nats/token (windows of {length})", ["scheme", *(length_text(int(g)) for g in grid)], shown))
        pictures += _pictures(drawn, f"retrieval-{length}", f"How much easier a passage is the second time, against the gap between its copies (windows of {length} tokens).")
    words = ["A held-out passage, other text, the same passage again: the drop of the loss from the first copy to the second. Perplexity alone misleads: a scheme can keep it beyond the training length and find nothing there."]
    return Section("Retrieval", words, tables, pictures)


def setup(findings: Findings) -> Section:
    """What was trained, in full."""
    config, runs = findings.config, findings.joined.runs
    mapping = config.to_mapping()
    rows = [["experiment", f"{config.experiment.name}: {config.experiment.description}"], ["schemes", ", ".join(findings.schemes)], ["seeds", ", ".join(map(str, findings.joined.seeds))]]
    rows += [["parameters", _millions(runs["parameters"].max())], ["tokens trained on", f"{int(runs['tokens'].max()):,}"], ["device", ", ".join(sorted({f"{r.device} ({r.dtype})" for r in runs.itertuples()}))]]
    rows += [["skipped steps", ", ".join(f"{r.scheme} seed {r.seed}: {r.skipped_steps}" for r in runs.itertuples() if r.skipped_steps and r.skipped_steps > 0) or "none"]]
    for group in ("model", "data", "tokenizer", "train", "evaluation"):
        rows.append([group, ", ".join(f"{k}={v}" for k, v in mapping[group].items() if v is not None)])
    return Section("Set-up", tables=[Table("What was trained", ["", "value"], rows, left=frozenset({0, 1}))], on_terminal=False)


def fingerprints(findings: Findings) -> Section:
    """What all compared runs share, checked and not hoped."""
    runs = findings.joined.runs
    rows = [[name, _distinct(runs[f"fingerprint.{name}"])] for name in FINGERPRINTS]
    rows += [[column.removeprefix("version."), _distinct(runs[column])] for column in runs if column.startswith("version.")]
    rows += [["first started", str(runs["started"].min())], ["last ended", str(runs["ended"].max())]]
    words = ["data, tokenizer, config and code agree between all compared runs; initial weights and batches between the schemes of each seed."]
    return Section("Versions and fingerprints", words, [Table("Versions and fingerprints", ["", "value"], rows, left=frozenset({0, 1}))], on_terminal=False)


def left_out(findings: Findings) -> Section:
    """Every run that takes no part, and every remark on those that do."""
    rows = [[r.scheme, str(r.seed), r.why] for r in sorted(findings.joined.left_out, key=lambda r: (r.scheme, r.seed))]
    tables = [Table("Runs left out", ["scheme", "seed", "why"], rows, left=frozenset({0, 2}))] if rows else []
    words = [*findings.notes] or ([] if rows else ["Nothing: every run found is in the tables."])
    return Section("Left out", words, tables)


def _pictures(drawn: list[str], stem: str, caption: str) -> list[tuple[str, str]]:
    return [(stem, caption)] if stem in drawn else []


def _distinct(column: pd.Series) -> str:
    return ", ".join(sorted({str(v) for v in column.dropna()})) or DASH


def _whole(value: float) -> str:
    return DASH if math.isnan(value) else f"{value:,.0f}"


def _millions(count: float) -> str:
    if count is None or math.isnan(count):
        return DASH
    return f"{count / 1e9:.3g} billion" if count >= 1e9 else f"{count / 1e6:.3g} million"
