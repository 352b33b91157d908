"""How often the intervals of a report hold the truth: over seeds, over documents, and over both together.

Documents are the 180 of the test split of `data=stdlib` (Python 3.11), their gaps to `qk_rope` those of three schemes
(2 layers of 64, a vocabulary of 512, 0.5M tokens, mean of three seeds). `documents.csv` holds their scored tokens and
their gaps in nats/token, made by

    posbench train -m scheme=qk_rope,nope,vo_rope,alibi seed=0,1,2 experiment_name=population model=tiny data=stdlib \
        tokenizer.vocab_size=512 train.tokens=500000 train.context_length=128 train.batch_size=16 train.lr=3e-3
    posbench eval runs/population/*/* -p nonoverlapping -l 128        (with evaluation.max_tokens above the text's)

A set of documents is drawn from them with replacement, as long as they are or cut to CUT tokens, as windows dealt in
rounds do. In each of its trials a document's gap is that of a document of about its length. The truth is the
token-weighted mean of all.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from posbench.evaluation.documents import FEWEST, document_error, effective
from posbench.reporting.joint import joint_error
from posbench.reporting.moderation import Floats
from posbench.reporting.statistics import t_interval

MEASURED = {"0.2M tokens": (0.035, 0.031), "1M tokens": (0.006, 0.0115)}  # sd: of a seed, of what remains in a scheme
SEEDS = (3, 5, 8)
COUNTS = (8, 11, 16, 27, 60, 120, 400)  # documents
CUT = 1024  # tokens of a document
ALIKE = 12  # documents of about one length
IN_A_SET = 25  # trials of one set of documents
FAILURE, OFTEN = 20.0, 0.1  # sd by which a failed seed is worse, and how many of all fail


@dataclass(frozen=True)
class Held:
    """How often an interval held the truth."""

    what: str
    case: str
    column: str
    rate: float


@cache
def population() -> tuple[Floats, Floats]:
    """Scored tokens [documents], shortest first, and gaps [schemes, documents] in nats/token."""
    with (Path(__file__).parent / "documents.csv").open(encoding="utf-8") as file:
        rows = [list(map(float, row)) for row in list(csv.reader(file))[1:]]
    table = np.array(rows)
    return table[:, 0], table[:, 1:].T


class Documents:
    """A set of documents, and trials of it: their tokens, and the gap of one scheme in each, nats/token."""

    def __init__(self, random: np.random.Generator, count: int, cut: float, scheme: int) -> None:
        tokens, gaps = population()
        self._gaps, self._random = gaps[scheme], random
        places = random.integers(0, len(tokens), count)
        self.targets = np.minimum(tokens, cut)[places]
        self._first = places // ALIKE * ALIKE
        mean = self._gaps.reshape(-1, ALIKE).mean(axis=1).repeat(ALIKE)  # of what a document's gap is drawn from
        self.truth = float(np.average(mean, weights=np.minimum(tokens, cut)))

    def gaps(self, trials: int) -> Floats:
        """[trials, documents]."""
        return self._gaps[self._first + self._random.integers(0, ALIKE, (trials, len(self.targets)))]


def over_documents(trials: int, seed: int) -> Iterator[Held]:
    """Intervals over documents; sets with too few effective documents have none and do not count."""
    random = np.random.default_rng([seed, 1])
    for cut, column in ((np.inf, "whole documents"), (CUT, f"at most {CUT} tokens of each")):
        for count in COUNTS:
            hits = given = 0
            sets = trials // IN_A_SET
            for n in range(sets):
                documents = Documents(random, count, cut, n % 3)
                if effective(documents.targets) < FEWEST:
                    continue
                nll = documents.gaps(IN_A_SET) * documents.targets
                off = np.abs(nll.sum(axis=1) / documents.targets.sum() - documents.truth)
                hits, given = hits + int((off <= document_error(nll, documents.targets)).sum()), given + IN_A_SET
            if given >= trials // 10:
                yield Held("over documents holds the truth", f"{count} documents", column, hits / given)
                share = given / (IN_A_SET * sets)
                yield Held("over documents is given, of sets", f"{count} documents", column, share)


def gap_residuals(random: np.random.Generator, shape: tuple[int, int], sd: float, case: str) -> Floats:
    """What a seed adds to a gap [trials, seeds], mean 0, by the noise of its two schemes."""
    of_scheme, of_base = sd * random.normal(size=shape), sd * random.normal(size=shape)
    if case == "of one family":  # 90 % of their variance in common
        return np.sqrt(0.1) * (of_scheme - of_base)
    if case == "one seed in ten fails":
        of_scheme += FAILURE * sd * ((random.random(shape) < OFTEN) - OFTEN)
    return of_scheme - of_base


CASES = ("two schemes", "of one family", "one seed in ten fails")


def over_seeds(trials: int, seed: int) -> Iterator[Held]:
    """Student's interval of a paired gap. What a seed does to all schemes drops out of it."""
    random = np.random.default_rng([seed, 2])
    for case in CASES:
        for seeds in SEEDS:
            values = gap_residuals(random, (trials, seeds), MEASURED["1M tokens"][1], case)
            intervals = [t_interval(gaps) for gaps in values]
            hits = sum(interval.low <= 0 <= interval.high for interval in intervals)
            yield Held("of a gap over seeds holds the truth", case, f"{seeds} seeds", hits / trials)


def together(trials: int, seed: int) -> Iterator[Held]:
    """The joint interval, with an effect of seed and document together as measured: it falls with a document's length.

    With fewer than its least number of seeds it is not given in reports; what it would do there stands in this table.
    """
    random = np.random.default_rng([seed, 3])
    texts = {
        name: [Documents(random, *text, n % 3) for n in range(trials // IN_A_SET)]
        for name, text in {"64 cut": (64, CUT), "27 whole": (27, np.inf), "180 whole": (180, np.inf)}.items()
    }
    for noise, (_, sd) in MEASURED.items():
        for case in CASES:
            for name, sets in texts.items() if case != CASES[-1] else list(texts.items())[:1]:
                for seeds in SEEDS:
                    hits = given = 0
                    for documents in sets:
                        off, half = _joint_trials(random, documents, seeds, sd, case)
                        hits, given = hits + int((off <= half).sum()), given + int(np.isfinite(half).sum())
                    where, rate = f"{noise}, {name}, {case}", hits / given
                    yield Held("of a gap over seeds and documents holds the truth", where, f"{seeds} seeds", rate)


def _joint_trials(
    random: np.random.Generator, documents: Documents, seeds: int, sd: float, case: str
) -> tuple[Floats, Floats]:
    """How far off each trial is, and half its interval."""
    targets = documents.targets
    both = np.sqrt(0.01**2 + 0.5**2 / targets) * random.normal(size=(IN_A_SET, seeds, len(targets)))
    of_seed = gap_residuals(random, (IN_A_SET, seeds), sd, case)
    nll = (of_seed[..., None] + documents.gaps(IN_A_SET)[:, None] + both) * targets
    off = np.abs(nll.sum(axis=(1, 2)) / targets.sum() / seeds - documents.truth)
    return off, joint_error(nll, targets, fewest_seeds=2)


def markdown(found: list[Held]) -> str:
    """A table for each kind of interval: a row a case, a column a number of seeds or a way to score documents."""
    lines = []
    for what in dict.fromkeys(held.what for held in found):
        here = [held for held in found if held.what == what]
        columns = list(dict.fromkeys(held.column for held in here))
        rates = {(held.case, held.column): held.rate for held in here}
        lines += [f"| Interval {what}, % of trials | " + " | ".join(columns) + " |", "|---|" + "--:|" * len(columns)]
        for case in dict.fromkeys(held.case for held in here):
            figures = [f"{100 * rates[case, c]:.1f}" if (case, c) in rates else "–" for c in columns]
            lines.append(f"| {case} | " + " | ".join(figures) + " |")
        lines.append("")
    return "\n".join(lines)
