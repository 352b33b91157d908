"""Schemes under other words than they were trained with, such as `rescale=yarn`: rows of their own beside the others.

They stand in the tables and pictures by length alone. What they are compared with is as trained: the baseline, and for
the change the same runs at the training length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from posbench.reporting.changes import with_change
from posbench.reporting.gathering import Found, Words
from posbench.reporting.joining import Joined
from posbench.reporting.measure import Measurement, measure
from posbench.runs.readings import row_name


@dataclass(frozen=True)
class Variant:
    """A scheme under words; `row` names it."""

    scheme: str
    under: Words

    @property
    def row(self) -> str:
        return row_name(self.scheme, self.under)

    @property
    def rescaling(self) -> str | None:
        """The name of its rescaling, where it has one."""
        return self._value_of("rescale")

    @property
    def factor(self) -> float | None:
        """The factor that its words give."""
        value = self._value_of("factor")
        return None if value is None else float(value)

    def _value_of(self, key: str) -> str | None:
        return next((word.partition("=")[2] for word in self.under if word.startswith(f"{key}=")), None)


def measure_variants(
    under: Mapping[Words, Found],
    found: Found,
    joined: Joined,
    measurements: list[Measurement],
    training_length: int,
    notes: list[str],
) -> tuple[list[Variant], list[Measurement]]:
    """What was read under each set of words, measured as the rest is; `scheme` of each measurement is the row's name.

    Arguments: found and measurements, as trained.
    """
    variants: list[Variant] = []
    rows: list[Measurement] = []
    at = {(m.scheme, m.protocol): m for m in measurements if m.length == training_length}
    for words, of_words in sorted(under.items()):
        by_row = {row_name(scheme, words): scheme for scheme, _ in of_words}
        read = {(row_name(scheme, words), seed): results for (scheme, seed), results in of_words.items()}
        places = {(result.protocol, result.length) for results in read.values() for result in results}
        base = {
            key: [result for result in results if (result.protocol, result.length) in places]
            for key, results in found.items()
            if key[0] == joined.baseline
        }
        schemes = [*by_row, *([joined.baseline] if joined.baseline else [])]
        measured = measure({**base, **read}, replace(joined, schemes=schemes), training_length, notes)
        rows += [with_change(m, at.get((by_row[m.scheme], m.protocol))) for m in measured if m.scheme in by_row]
        variants += [Variant(scheme, words) for scheme in by_row.values()]
    return [variant for variant in variants if any(m.scheme == variant.row for m in rows)], rows
