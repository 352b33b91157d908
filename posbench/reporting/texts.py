"""Losses on other text than the runs were trained on: measured as the rest is, and never ranked or mixed with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from posbench.reporting.changes import with_changes
from posbench.reporting.gathering import OWN, Found, Gathered
from posbench.reporting.joining import Joined
from posbench.reporting.measure import Measurement, measure
from posbench.reporting.variants import Variant, measure_variants
from posbench.runs.readings import Result


@dataclass(frozen=True)
class OtherText:
    """What the compared runs lose on one text."""

    name: str
    measurements: list[Measurement]
    variants: list[Variant]  # schemes under other words on this text

    @property
    def overlaps(self) -> dict[str, float | None]:
        """Split -> the share of its 13-grams that also occur in the text trained on; None where that was not known."""
        headers = [result.header for m in self.measurements for result in m.results]
        shares = {str(header.get("split")): header.get("overlap") for header in headers}
        return {split: share if isinstance(share, float) else None for split, share in shares.items()}


def measure_texts(
    texts: Mapping[str, Gathered], joined: Joined, training_length: int, notes: list[str]
) -> list[OtherText]:
    """Every text but the runs' own, by name. What had to be left out goes to `notes`."""
    measured = []
    for name in sorted(name for name, gathered in texts.items() if name != OWN and any(gathered)):
        said: list[str] = []
        as_trained, under = _of_one_text(texts[name], said)
        plain = with_changes(measure(as_trained, joined, training_length, said), training_length)
        variants, rows = measure_variants(under, as_trained, joined, plain, training_length, said)
        measured.append(OtherText(name, [*plain, *rows], variants))
        notes += [f"On other text, {name}: {note}" for note in said]
    return [text for text in measured if text.measurements]


def _of_one_text(gathered: Gathered, notes: list[str]) -> Gathered:
    """The results of the text that most of them are of: a folder of that name may have changed in between."""
    all_found = [gathered.as_trained, *gathered.under.values()]
    texts = Counter(_fingerprint(result) for found in all_found for results in found.values() for result in results)
    [(usual, count), *others] = texts.most_common()
    if others:
        notes.append(
            f"left out {texts.total() - count} results of another text of this name; run `posbench eval --data` again."
        )

    def only(found: Found) -> Found:
        kept = {key: [result for result in results if _fingerprint(result) == usual] for key, results in found.items()}
        return {key: results for key, results in kept.items() if results}

    under = {words: only(found) for words, found in gathered.under.items()}
    return Gathered(only(gathered.as_trained), {words: found for words, found in under.items() if found})


def _fingerprint(result: Result) -> str:
    return str(result.header.get("data"))
