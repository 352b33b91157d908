"""Losses by scheme, protocol and length: means over seeds, paired gaps, and the doubt that documents leave."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd

from posbench.evaluation.documents import document_error
from posbench.evaluation.protocols import PROTOCOLS, Protocol
from posbench.reporting.gathering import Found, Place, at_place, lengths_of
from posbench.reporting.joining import Joined, common_seeds
from posbench.reporting.joint import joint_error
from posbench.reporting.statistics import NOTHING, Floats, Interval, larger, t_interval
from posbench.runs.readings import Result, perplexity


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
    results: tuple[Result, ...] = ()  # one a seed, what the figures above are of
    gap_joint: float = math.nan  # half the 95% interval of the gap over seeds and documents together: see `joint`
    change: Interval = NOTHING  # of the loss from that at the training length, paired by seed: see `changes`
    change_documents: float = math.nan  # half the 95% interval that the choice of documents leaves around it

    @property
    def change_half(self) -> float:
        """The larger of half the interval of the change over seeds and over documents; NaN where neither is known."""
        return float(larger(self.change.half_width, self.change_documents))

    @property
    def perplexity(self) -> float:
        """exp of the mean loss: the geometric mean over seeds."""
        return perplexity(self.loss.mean)


def measure(found: Found, joined: Joined, training_length: int, notes: list[str]) -> list[Measurement]:
    """Every scheme by every protocol at every length that was evaluated. What had to be left out goes to `notes`."""
    measurements: list[Measurement] = []
    targets: dict[str, dict[int, tuple[Any, ...]]] = {}  # of protocols that promise the same at every length: by length
    partly: dict[str, list[str]] = {}  # seeds and schemes -> where they alone could be compared
    for protocol in (p for p in PROTOCOLS.values() if p.is_loss_table or p.is_by_length):
        for length in lengths_of(found, protocol.name):
            if protocol.is_loss_table and length != training_length:
                continue
            same = same_task(found, protocol, length, notes)
            here = _measure_place(same, joined)
            measurements += here
            missing = sorted(set(joined.schemes) - {m.scheme for m in here})
            if missing or set(here[0].seeds) != set(joined.seeds):
                partly.setdefault(only(here[0].seeds, missing), []).append(f"{protocol.name} at {length}")
            if protocol.same_rows:
                targets.setdefault(protocol.name, {})[length] = task_of(next(iter(same.values())))
    notes += compared_over(partly)
    for name, tasks in targets.items():
        usual = Counter(tasks.values()).most_common(1)[0][0]
        others = ", ".join(str(length) for length, task in tasks.items() if task != usual)
        if others:
            notes.append(
                f"{name}: the targets at {others} are not those of the other lengths, so these columns cannot be "
                "compared with the others; run `posbench eval --again`."
            )
    return measurements


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


def same_task(found: Found, protocol: Protocol, length: int, notes: list[str]) -> Place:
    """The results by one protocol at one length that scored the same windows: the most frequent kind.

    Those of one scheme were also computed by the same code of the scheme.
    """
    place = at_place(found, protocol.name, length)
    task, _ = Counter(task_of(result) for result in place.values()).most_common(1)[0]
    same = {key: result for key, result in place.items() if task_of(result) == task}
    codes: dict[str, Counter[str]] = {}
    for (scheme, _), result in same.items():
        codes.setdefault(scheme, Counter())[_scheme_code(result)] += 1
    same = {key: r for key, r in same.items() if _scheme_code(r) == codes[key[0]].most_common(1)[0][0]}
    if len(same) < len(place):
        others = ", ".join(f"{scheme} seed {seed}" for scheme, seed in place if (scheme, seed) not in same)
        notes.append(
            f"{protocol.name} at {length}: left out {others}, which scored other windows than the rest, or in another "
            f"number format or by other code; run `posbench eval --protocol {protocol.name} --again` on them."
        )
    return same


def _scheme_code(result: Result) -> str:
    return str(result.header.get("scheme_code"))


def _measure_place(place: Place, joined: Joined) -> list[Measurement]:
    """Every scheme by one protocol at one length. Seeds are those that all schemes evaluated here share."""
    has: dict[str, set[int]] = {}
    for scheme, seed in place:
        has.setdefault(scheme, set()).add(seed)
    schemes, seeds = common_seeds(has, joined.baseline or "")
    first = place[schemes[0], seeds[0]]
    losses = {s: np.array([place[s, seed].loss for seed in seeds]) for s in schemes}
    windows = first.header.get("windows")  # a window is a row for each document in it
    documents = sorted(first.windows["document"].unique())
    targets = by_document(first, "targets", documents)
    nll = {s: np.stack([by_document(place[s, seed], "nll", documents) for seed in seeds]) for s in schemes}
    base = joined.baseline if joined.baseline in schemes else None
    gaps = [nll[s] - nll[base] for s in schemes if base]  # each [seeds, documents]
    error = document_error(np.stack([of.mean(axis=0) for of in (*nll.values(), *gaps)]), targets)
    return [
        Measurement(
            scheme=s,
            protocol=first.protocol,
            split=str(first.header.get("split", "unknown")),
            length=first.length,
            seeds=tuple(seeds),
            losses=tuple(losses[s].tolist()),
            loss=t_interval(losses[s]),
            gap=t_interval(losses[s] - losses[base]) if base else NOTHING,
            loss_documents=float(error[n]),
            gap_documents=float(error[len(schemes) + n]) if base else math.nan,
            gap_joint=float(joint_error(gaps[n], targets)) if base else math.nan,
            bits_per_byte=float(np.mean([place[s, seed].bits_per_byte for seed in seeds])),
            targets=int(targets.sum()),
            windows=windows if isinstance(windows, int) else len(first.windows),
            documents=len(documents),
            results=tuple(place[s, seed] for seed in seeds),
        )
        for n, s in enumerate(schemes)
    ]


def by_document(result: Result, column: str, documents: list[int]) -> Floats:
    """The sum of a column over the windows of each document."""
    return np.asarray(_sums(result)[column].reindex(documents, fill_value=0), dtype=np.float64)


@lru_cache(maxsize=10_000)
def _sums(result: Result) -> pd.DataFrame:
    return result.sums(["document"])


@lru_cache(maxsize=10_000)
def task_of(result: Result) -> tuple[Any, ...]:
    """What was scored, and in which numbers. Two of one task can be set beside each other window by window."""
    places = ("document", "start", "gap", "bucket_start", "bucket_end", "targets")
    names = sorted(name for name in result.windows if name in places)
    how = tuple(str(result.header.get(key)) for key in ("data", "tokenizer", "dtype"))
    return how, tuple((name, result.windows[name].to_numpy().tobytes()) for name in names)
