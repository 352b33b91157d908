"""What the compared runs hold: the results that can be set beside each other, by run and by place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from posbench.reporting.frame import readable_results
from posbench.runs import Run
from posbench.runs.readings import Result

Key = tuple[str, int]  # scheme, seed
Found = dict[Key, list[Result]]  # what each run holds, by protocol and length
Place = dict[Key, Result]  # one protocol at one length


def gather(runs: Mapping[Key, Run], notes: list[str]) -> Found:
    """The results of each run, as trained. What was read under other words of the scheme is counted in `notes`."""
    found: Found = {}
    under: Counter[str] = Counter()
    for key, run in runs.items():
        results, _ = readable_results(run)
        found[key] = [result for result in results if not result.reading.under]
        under.update(" ".join(result.reading.under) for result in results if result.reading.under)
    notes += [f"Not in these tables: {count} results under {words}." for words, count in under.items()]
    return found


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
