"""What the compared runs hold: the results that can be set beside each other, by text, by run and by place."""

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

OWN = ""  # stands for the text that the runs were trained on


class Gathered(NamedTuple):
    """The results of each run on one text."""

    as_trained: Found
    under: dict[Words, Found]  # ... by length, under other words of the scheme


def gather(runs: Mapping[Key, Run], notes: list[str]) -> dict[str, Gathered]:
    """The results of each run by the name of the text, `OWN` first; of another text its losses and those by length.

    What is in neither part of a text, such as results of older weights, is counted in `notes`.
    """
    texts = {OWN: Gathered({key: [] for key in runs}, {})}
    others: Counter[str] = Counter()
    for key, run in runs.items():
        for result in readable_results(run)[0]:
            reading, protocol = result.reading, PROTOCOLS[result.protocol]
            text = texts.setdefault(reading.data or OWN, Gathered({}, {}))
            has_place = protocol.is_by_length or (not reading.words and protocol.is_loss_table)
            if not reading.under or (not reading.words and has_place):
                text.as_trained.setdefault(key, []).append(result)
            elif has_place and reading.step is None:
                text.under.setdefault(reading.words, {}).setdefault(key, []).append(result)
            else:
                others[" ".join(reading.under)] += 1
    notes += [f"Not in these tables: {count} results under {words}." for words, count in others.items()]
    return texts


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
