"""What the compared runs hold: the results that can be set beside each other, and a note on each that cannot."""

from __future__ import annotations

from collections.abc import Mapping

from posbench.evaluation.protocols import PROTOCOLS
from posbench.runs import Run
from posbench.runs.readings import Result

Key = tuple[str, int]  # scheme, seed
Found = dict[Key, list[Result]]  # what each run holds, by protocol and length
Place = dict[Key, Result]  # one protocol at one length


def gather(runs: Mapping[Key, Run], notes: list[str]) -> Found:
    """The results of each run, as trained. Files that are damaged, foreign or of unknown protocols go to `notes`."""
    found: Found = {}
    apart: dict[str, int] = {}  # what is not in the tables of a report, although nothing is wrong with it -> results
    for key, run in runs.items():
        results, damaged = run.results()
        notes += [f"{each}." for each in damaged]
        for result in results:
            protocol = PROTOCOLS.get(result.protocol)
            lacking = protocol.lacking(result.windows.columns) if protocol else None
            if protocol is None:
                words = f"of the unknown protocol {result.protocol}"
                apart[words] = apart.get(words, 0) + 1
            elif lacking:
                notes.append(
                    f"{run.name}: {result.reading} is not used: it lacks the column {lacking!r}. To make it again: "
                    f"posbench eval {run.path} --protocol {result.protocol} --length {result.length} --again."
                )
            elif result.reading.under:
                words = f"under {' '.join(result.reading.under)}"
                apart[words] = apart.get(words, 0) + 1
            else:
                found.setdefault(key, []).append(result)
        found.setdefault(key, [])
    notes += [f"Not in these tables: {count} results {what}." for what, count in apart.items()]
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
