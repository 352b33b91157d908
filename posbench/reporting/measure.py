"""Losses by scheme, protocol and length: means over seeds, paired gaps, and the doubt that documents leave."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from posbench.reporting.evaluations import LOSS_PROTOCOLS, VALIDATION, Evaluation, perplexity
from posbench.reporting.joining import Joined, common_seeds
from posbench.reporting.statistics import Floats, Interval, document_error, t_interval

Found = dict[tuple[str, int], list[Evaluation]]  # scheme, seed -> what the run holds
Place = dict[tuple[str, int], Evaluation]  # scheme, seed -> one protocol at one length
_NOTHING = Interval(math.nan, math.nan, math.nan)


@dataclass(frozen=True)
class Measurement:
    """One scheme by one protocol at one length, over the seeds compared there. Losses in nats/token."""

    scheme: str
    protocol: str
    split: str
    length: int  # tokens
    seeds: tuple[int, ...]
    losses: tuple[float, ...]  # one a seed
    loss: Interval  # mean over seeds, 95% t interval
    gap: Interval  # to the baseline, paired by seed; NaN without a baseline
    loss_documents: float  # half the 95% interval that the choice of documents leaves around the mean loss
    gap_documents: float  # ... around the gap, over the same documents
    bits_per_byte: float  # mean over seeds
    targets: int  # tokens scored, each seed
    windows: int
    documents: int
    evaluations: tuple[Evaluation, ...] = ()  # one a seed, what the figures above are of

    @property
    def perplexity(self) -> float:
        """exp of the mean loss: the geometric mean over seeds."""
        return perplexity(self.loss.mean)


def measure(found: Found, joined: Joined, training_length: int, notes: list[str]) -> list[Measurement]:
    """Every scheme by every protocol at every length that was evaluated. What had to be left out goes to `notes`."""
    made: list[Measurement] = []
    targets: dict[int, tuple[Any, ...]] = {}  # what the fixed protocol scored, by length
    partly: dict[str, list[str]] = {}  # seeds and schemes -> where they alone could be compared
    for protocol in LOSS_PROTOCOLS:
        for length in lengths_of(found, protocol):
            if protocol == VALIDATION and length != training_length:
                continue
            same = same_task(found, protocol, length, notes)
            here = _measure_place(same, joined)
            made += here
            missing = sorted(set(joined.schemes) - {m.scheme for m in here})
            if missing or set(here[0].seeds) != set(joined.seeds):
                partly.setdefault(only(here[0].seeds, missing), []).append(f"{protocol} at {length}")
            if protocol == "fixed":
                targets[length] = next(iter(same.values())).task
    notes += compared_over(partly)
    if len(set(targets.values())) > 1:
        usual = Counter(targets.values()).most_common(1)[0][0]
        others = ", ".join(str(length) for length, task in targets.items() if task != usual)
        notes.append(
            f"fixed: the targets at {others} are not those of the other lengths, so these columns cannot be compared "
            "with the others; run `posbench eval --again`."
        )
    return made


def only(seeds: Iterable[int], missing: list[str]) -> str:
    """`seeds 0, 2 without nope`"""
    which = ", ".join(map(str, seeds))
    return f"seed{'s' * (',' in which)} {which}" + (f" without {', '.join(missing)}" if missing else "")


def compared_over(partly: dict[str, list[str]]) -> list[str]:
    """The notes that name where only some seeds and schemes (see `only`) could be compared."""
    return [
        f"Compared over {those}, since the others lack this evaluation: {', '.join(places)}."
        for those, places in partly.items()
    ]


def lengths_of(found: Found, protocol: str) -> list[int]:
    """The lengths at which any run was evaluated by `protocol`."""
    return sorted({e.length for held in found.values() for e in held if e.protocol == protocol})


def same_task(found: Found, protocol: str, length: int, notes: list[str]) -> Place:
    """The evaluations by one protocol at one length that scored the same windows: the most frequent kind."""
    there = {key: e for key, held in found.items() for e in held if (e.protocol, e.length) == (protocol, length)}
    task, count = Counter(e.task for e in there.values()).most_common(1)[0]
    same = {key: e for key, e in there.items() if e.task == task}
    if count < len(there):
        others = ", ".join(f"{scheme} seed {seed}" for scheme, seed in there if (scheme, seed) not in same)
        mend = "train them again with the same settings" if protocol == VALIDATION else "run `posbench eval --again`"
        notes.append(
            f"{protocol} at {length}: left out {others}, which scored other windows than the rest, or in another "
            f"number format or by other code; {mend} on them."
        )
    return same


def _measure_place(there: Place, joined: Joined) -> list[Measurement]:
    """Every scheme by one protocol at one length. Seeds are those that all schemes evaluated here share."""
    has: dict[str, set[int]] = {}
    for scheme, seed in there:
        has.setdefault(scheme, set()).add(seed)
    schemes, seeds = common_seeds(has, joined.baseline or "")
    first = there[schemes[0], seeds[0]]
    losses = {s: np.array([there[s, seed].loss for seed in seeds]) for s in schemes}
    windows = first.header.get("windows")  # a window is a row for each document in it
    documents = sorted(first.windows["document"].unique())
    targets = _by_document(first, "targets", documents)
    nll = {s: np.mean([_by_document(there[s, seed], "nll", documents) for seed in seeds], axis=0) for s in schemes}
    base = joined.baseline if joined.baseline in schemes else None
    error = document_error(np.stack([*nll.values(), *(nll[s] - nll[base] for s in schemes if base)]), targets)
    return [
        Measurement(
            scheme=s,
            protocol=first.protocol,
            split=str(first.header.get("split", "unknown")),
            length=first.length,
            seeds=tuple(seeds),
            losses=tuple(losses[s].tolist()),
            loss=t_interval(losses[s]),
            gap=t_interval(losses[s] - losses[base]) if base else _NOTHING,
            loss_documents=float(error[n]),
            gap_documents=float(error[len(schemes) + n]) if base else math.nan,
            bits_per_byte=float(np.mean([there[s, seed].bits_per_byte for seed in seeds])),
            targets=int(targets.sum()),
            windows=windows if isinstance(windows, int) else len(first.windows),
            documents=len(documents),
            evaluations=tuple(there[s, seed] for seed in seeds),
        )
        for n, s in enumerate(schemes)
    ]


def _by_document(evaluation: Evaluation, column: str, documents: list[int]) -> Floats:
    """The sum of a column over the windows of each document."""
    return np.asarray(evaluation.sums(["document"])[column].loc[documents], dtype=np.float64)
