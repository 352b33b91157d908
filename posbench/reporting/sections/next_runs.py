"""What to run next: the pairs that matter and are open, the seeds each takes, and the command."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from itertools import count, islice
from typing import Any

from posbench.config import Config, ConfigError
from posbench.reporting.findings import Findings
from posbench.reporting.sections.ranking import seeds_text
from posbench.reporting.sections.section import Section
from posbench.reporting.statistics import Pair
from posbench.reporting.tables import Table, plus_minus

FIRST_SEEDS = 5  # where there are too few to test anything
MOST_PLANNED = 30  # seeds: a pair that takes more is named, without a command


def next_runs(findings: Findings) -> Section | None:
    """The last section: open pairs and a command for them. None where no pair that matters is open."""
    seeds, schemes = len(findings.joined.seeds), len(findings.schemes)
    if len(findings.schemes) < 2:
        return None
    if seeds < 2:
        step = _step(findings, FIRST_SEEDS, "The pairs can be tested then")
        return Section("What to run next", ["Nothing can be tested with 1 seed."], commands=[step])
    rows = open_pairs(findings)
    if not rows:
        return None
    needed = {pair: max(seeds + 1, pair.seeds_to_settle) for pair, _ in rows}
    words = [
        f"Only seeds that all compared schemes have are used, so one more seed means {schemes} more runs. The text "
        "under the ranking says how the numbers of seeds are estimated."
    ]
    commands = []
    within = {pair: int(total) for pair, total in needed.items() if total <= MOST_PLANNED}
    for total in dict.fromkeys(sorted({min(within.values(), default=0), max(within.values(), default=0)})):
        settled = [f"{pair.left} ~ {pair.right}" for pair, enough in within.items() if enough <= total]
        if settled:
            commands.append(_step(findings, total, f"Probably enough for {', '.join(settled)}"))
    beyond = [f"{pair.left} ~ {pair.right}" for pair in needed if pair not in within]
    if beyond:
        words.append(f"More than {MOST_PLANNED} seeds would be needed for {', '.join(beyond)}.")
    return Section("What to run next", words, [_table(rows)], commands=commands)


def open_pairs(findings: Findings) -> list[tuple[Pair, str]]:
    """The pairs that matter and are open, with why they matter; the fewest seeds first."""
    chain = findings.chain
    why: dict[frozenset[str], list[str]] = {}
    for left, sign, right in zip(chain.order, chain.signs, chain.order[1:], strict=False):
        if sign in "~,":
            why.setdefault(frozenset((left, right)), []).append("neighbours here")
    for better, sign, worse in findings.links:
        text = "published neighbours" if sign == "," else f"published {better} {sign} {worse}"
        why.setdefault(frozenset((better, worse)), []).append(text)
    pairs = [pair for pair in findings.pairs if pair.is_open and frozenset((pair.left, pair.right)) in why]
    pairs.sort(key=lambda pair: pair.seeds_to_settle)
    return [(pair, ", ".join(why[frozenset((pair.left, pair.right))])) for pair in pairs]


def _table(rows: list[tuple[Pair, str]]) -> Table:
    headers = ["open pair", "why it matters", "difference\nnats/token", "seeds needed\nfor >", "seeds needed\nfor ≈"]
    cells = [
        [
            f"{pair.left} ~ {pair.right}",
            why,
            plus_minus(pair.difference, pair.interval.half_width),
            seeds_text(pair.seeds_to_decide),
            seeds_text(pair.seeds_to_equate),
        ]
        for pair, why in rows
    ]
    return Table("Open pairs that matter", headers, cells, left=frozenset({0, 1}))


def _step(findings: Findings, total: int, what: str) -> tuple[str, str]:
    """What it is for, such as `4 more seeds, 44 runs. About enough for a ~ b.`, and the command."""
    from posbench.composition import choices

    have = set(findings.joined.seeds)
    new = list(islice((seed for seed in count() if seed not in have), total - len(have)))
    runs = len(new) * len(findings.schemes)
    said = f"{len(new)} more seed{'s' * (len(new) > 1)}, {runs} runs. {what}."
    others = [scheme for scheme in findings.schemes if scheme not in choices("scheme")]
    if others:
        said += f" Train the same seeds of {', '.join(others)} with the words that made the first."
    return said, command(findings, new)


def command(findings: Findings, seeds: list[int]) -> str:
    """`posbench train -m experiment=demo scheme=nope,qk_rope seed=5,6`: the compared schemes under other seeds.

    A scheme of a name of one's own (`scheme.name=...`) is not a choice of conf/scheme, so it is not in the list.
    """
    from posbench.composition import choices

    known = choices("scheme")
    schemes = ",".join(scheme for scheme in findings.schemes if scheme in known)
    words = [*settings(findings.config), f"scheme={schemes}", f"seed={','.join(map(str, seeds))}"]
    return " ".join(["posbench train -m", *map(shlex.quote, words)])


def settings(config: Config) -> list[str]:
    """The words that make this configuration again, its scheme and seed aside: the experiment, and what differs."""
    from posbench.composition import choices, compose

    name = config.experiment.name
    words = [f"experiment={name}"] if name in choices("experiment") else []
    try:
        usual = _flat(compose([*words, f"scheme={config.scheme.name}"]).to_mapping())
    except ConfigError:  # a scheme of a name of one's own
        usual = _flat(compose(words).to_mapping())
    actual = _flat(config.to_mapping())
    if config.trunk_name is not None:  # its trunk trains it too, for less
        branches = usual["train.branch_tokens"] or [config.train.tokens]
        trunk = {"tokens": config.train.trunk_tokens, "trunk_tokens": None, "branch_tokens": branches}
        actual |= {"experiment_name": config.trunk_name, **{f"train.{key}": value for key, value in trunk.items()}}
    aside = ("scheme.", "experiment.", "tracking.", "launch.")
    return words + [
        f"{key}={_word(value)}"
        for key, value in actual.items()
        if key != "seed" and not key.startswith(aside) and value != usual.get(key)
    ]


def _flat(mapping: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        is_group = isinstance(value, Mapping) and key != "lr_of"
        flat |= _flat(value, f"{above}{key}.") if is_group else {f"{above}{key}": value}
    return flat


def _word(value: Any) -> str:
    """A value as a word of the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{_word(each)}' for key, each in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(_word, value))}]"
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    return str(value)
