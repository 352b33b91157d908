"""Losses of n-gram models, stored beside the runs that they are compared with: one file for all schemes of a seed.

    <experiment>/ngrams/<key>.json     what was counted and scored, and the loss by order, under a seal

A record names the text, the tokenizer, the batches and the validation windows. It counts for every run of the
experiment that names the same, and for no other. A packed experiment holds its records in `ngrams.json`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from posbench.machine.files import has_its_seal, read_json, remove_leftovers, sealed, write_json
from posbench.runs.manifest import Manifest
from posbench.runs.readings import Result, make_writable

if TYPE_CHECKING:
    import pandas as pd

FORMAT = 1  # of the records, and of the model that they are of
FOLDER = "ngrams"
_COUNTS = ("tokens", "targets", "bytes")


@dataclass(frozen=True)
class Task:
    """What an n-gram model and a run must share to be compared."""

    data: str
    tokenizer: str
    batches: str
    windows: str  # digest of the validation windows

    @classmethod
    def of(cls, manifest: Manifest, windows: pd.DataFrame) -> Task:
        """Of a run's batches and these windows (document, start, targets, bytes)."""
        prints = manifest.fingerprints
        total = hashlib.sha256()
        for name in ("document", "start", "targets", "bytes"):
            total.update(windows[name].to_numpy("<i8").tobytes())
        return cls(prints.data, prints.tokenizer, str(prints.batches), total.hexdigest()[:16])

    @property
    def key(self) -> str:
        """The name of its record."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class NgramLosses:
    """What n-gram models lose on a task."""

    task: Task
    losses: Mapping[int, float]  # order -> nats/token
    tokens: int  # trained on: targets, each once
    targets: int  # scored
    bytes: int  # of text that the targets stand for
    seconds: float

    def bits_per_byte(self, order: int) -> float:
        return self.losses[order] * self.targets / math.log(2) / self.bytes


class Holder(Protocol):
    """The run that records lie beside."""

    @property
    def path(self) -> Path: ...

    @property
    def manifest(self) -> Manifest: ...

    @property
    def ngrams_remedy(self) -> str: ...

    def ngram_records(self) -> tuple[dict[str, Any], list[str]]: ...


def task_of(manifest: Manifest, validation: Result) -> Task:
    """What an n-gram model would have to be of, to be compared with this loss of a run."""
    return Task.of(manifest, validation.windows)


def ngrams_of(run: Holder) -> tuple[list[NgramLosses], list[str]]:
    """The records of the run's text, tokenizer and batches, and what lies there and is not a record."""
    prints = run.manifest.fingerprints
    contents, faults = run.ngram_records()
    records = []
    for name, content in sorted(contents.items()):
        try:
            record = _parsed(content)
        except ValueError as error:
            faults.append(f"{name} is not used ({error}). To make it again: {run.ngrams_remedy}")
            continue
        task = record.task
        if (task.data, task.tokenizer, task.batches) == (prints.data, prints.tokenizer, prints.batches):
            records.append(record)
    return records, faults


def read_folder(run: Holder) -> tuple[dict[str, Any], list[str]]:
    """File -> what it holds, of the files beside a run folder; and which cannot be read."""
    contents, faults = {}, []
    experiment = experiment_of(run)
    for file in sorted((experiment / FOLDER).glob("*.json")) if experiment else []:
        try:
            contents[str(file)] = read_json(file)
        except (OSError, ValueError) as error:
            faults.append(f"{file} is not used ({error}). To make it again: {run.ngrams_remedy}")
    return contents, faults


def store(run: Holder, losses: NgramLosses) -> Path:
    """Write the record beside a run that lies in its experiment. Raises: ConfigError where it cannot be written."""
    experiment = experiment_of(run)
    assert experiment is not None
    make_writable(experiment / FOLDER)
    remove_leftovers(experiment / FOLDER)
    file = experiment / FOLDER / f"{losses.task.key}.json"
    write_json(file, to_mapping(losses))
    return file


def to_mapping(losses: NgramLosses) -> dict[str, Any]:
    """Plain data under a seal."""
    return sealed({"format": FORMAT, **asdict(losses)})


def experiment_of(run: Holder) -> Path | None:
    """The folder of the run's experiment; None for a run that was copied elsewhere, and lies in no experiment."""
    path, manifest = run.path.absolute(), run.manifest
    is_in_place = path.parts[-2:] == (manifest.scheme, f"seed={manifest.seed}")
    return path.parents[1] if is_in_place else None


def _parsed(content: Any) -> NgramLosses:
    """Raises: ValueError."""
    if not isinstance(content, dict) or not has_its_seal(content):
        raise ValueError("it does not match its checksum")
    if content.get("format") != FORMAT:
        raise ValueError(f"it is of format {content.get('format')}, and this posbench reads format {FORMAT}")
    try:
        task = Task(**{name: str(value) for name, value in content["task"].items()})
        losses = {int(order): float(loss) for order, loss in content["losses"].items()}
        counts = {name: int(content[name]) for name in _COUNTS}
        seconds = float(content["seconds"])
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise ValueError(f"it has no losses: {error}") from None
    if min(counts.values()) < 1 or not all(0 <= number < math.inf for number in (*losses.values(), seconds)):
        raise ValueError("it has impossible losses or counts")
    return NgramLosses(task, losses, **counts, seconds=seconds)
