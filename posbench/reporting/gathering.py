"""What the compared runs hold: the results that can be set beside each other, by run and by place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from posbench.evaluation.protocols import PROTOCOLS
from posbench.reporting.frame import readable_results
from posbench.runs import Run
from posbench.runs.readings import Result

Key = tuple[str, int]  # scheme, seed
Found = dict[Key, list[Result]]  # what each run holds, by protocol and length
Place = dict[Key, Result]  # one protocol at one length
Words = tuple[str, ...]  # of a scheme that hold at evaluation alone


class Gathered(NamedTuple):
    """The results of each run."""

    as_trained: Found
    under: dict[Words, Found]  # ... by length, under other words of the scheme


def gather(runs: Mapping[Key, Run], notes: list[str]) -> Gathered:
    """The results of each run. What is in neither part, such as those of older weights, is counted in `notes`."""
    found: Found = {}
    under: dict[Words, Found] = {}
    others: Counter[str] = Counter()
    for key, run in runs.items():
        results, _ = readable_results(run)
        found[key] = [result for result in results if not result.reading.under]
        for result in (result for result in results if result.reading.under):
            words = result.reading.under
            if PROTOCOLS[result.protocol].is_by_length and result.reading.step is None:
                under.setdefault(words, {}).setdefault(key, []).append(result)
            else:
                others[" ".join(words)] += 1
    notes += [f"Not in these tables: {count} results under {words}." for words, count in others.items()]
    return Gathered(found, under)


def lengths_of(found: Found, protocol: str) -> list[int]:
    """The lengths at which any run was evaluated by `protocol`."""
    return sorted({result.length for results in found.values() for result in results if result.protocol == protocol})


def at_place(found: Found, protocol: str, length: int) -> Place:
    """The results by one protocol at one length."""
    return {
        key: result
        for key, results in found.items()
        for result in results
        if (result.protocol, result.length) == (protocol, length)
    }
