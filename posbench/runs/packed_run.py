"""A run of a packed experiment, in the words of a run folder.

It has no folder and no weights. Its path is that of the folder it would be, `<experiment>/<scheme>/seed=<n>`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from posbench.config import ConfigError
from posbench.runs.manifest import FINISHED, FORMAT, Manifest
from posbench.runs.packed import NGRAMS, READINGS, RUNS, DamagedPack, Key, Pack, Stored
from posbench.runs.readings import Damaged, NotAResult, Reading, Result, check_header
from posbench.runs.run import PACK, Run

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from posbench.model import Decoder

_UNKNOWN = "unknown"  # stands for the runs of a pack that cannot say which it holds


@dataclass(frozen=True)
class PackedRun(Run):
    """A run of a packed experiment: what a run folder says, without one."""

    pack: Pack = field(compare=False, repr=False)

    @property
    def remedy(self) -> str:
        """What brings back what is damaged in it."""
        return self.pack.remedy(RUNS)

    def content(self, name: str) -> bytes:
        """`run.json`, `config.yaml` or `tokenizer.json`, as it was.

        Raises: ConfigError where the pack is damaged, or does not hold this run; FileNotFoundError for a tokenizer that
        was not packed.
        """
        text = self._files[{"run.json": "manifest", "config.yaml": "config", "tokenizer.json": "tokenizer"}[name]]
        if text is None:
            raise FileNotFoundError(self.path / name)
        return self.pack.content(text) if name == "tokenizer.json" else text.encode()

    @property
    def manifest(self) -> Manifest:
        """What `run.json` said. Raises: ConfigError."""
        _ = self.pack.readings  # without them nothing of a run can be trusted
        return super().manifest

    def write_manifest(self, manifest: Manifest) -> None:
        """Raises: ConfigError. What is packed does not change."""
        raise ConfigError(f"{self.name} is packed in {self.pack.folder}, and packed runs cannot be changed")

    @property
    def is_finished(self) -> bool:
        return self.manifest.status == FINISHED

    @property
    def logged(self) -> list[dict[str, Any]]:
        return self.pack.metrics.get(self._key, [])

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer the run was trained with. Raises: ConfigError where it was not packed."""
        from posbench.data.tokenization import load_tokenizer

        name = self._files["tokenizer"]
        if name is None:
            raise ConfigError(f"{self.name} was packed without its tokenizer: posbench prepare makes it from the text")
        self.pack.content(name)  # whole, or an error
        return load_tokenizer(self.pack.folder / name, self.manifest.fingerprints.tokenizer)

    def results(self) -> tuple[list[Result], list[Damaged]]:
        """The packed results, checked, and those that are damaged; both sorted by reading."""
        manifest = self.manifest
        results, not_results = [], []
        for stored in self._stored():
            try:
                header = _header(stored)
                check_header(manifest, stored.reading, header, "its header")
                windows = self.pack.windows(stored)
                results.append(Result(stored.reading, header, manifest.format == FORMAT, windows))
            except NotAResult as why:
                not_results.append(self.damaged(stored.reading, str(why)))
        return sorted(results, key=lambda result: result.reading), sorted(not_results)

    def evaluated(self) -> list[Reading]:
        return sorted(stored.reading for stored in self._stored())

    def damaged(self, reading: Reading, why: str) -> Damaged:
        """A result that is not one, in the file that holds its windows."""
        names = [stored.file for stored in self._stored() if stored.reading == reading] or [READINGS]
        return Damaged(reading, self.pack.folder / names[0], why, self.pack.remedy(names[0]))

    def ngram_records(self) -> tuple[dict[str, Any], list[str]]:
        """What was packed, not yet checked; and why it cannot be read."""
        try:
            return {f"{self.pack.folder / NGRAMS}, {key}": record for key, record in self.pack.ngrams.items()}, []
        except DamagedPack as damaged:
            return {}, [str(damaged)]

    @property
    def ngrams_remedy(self) -> str:
        return self.pack.remedy(NGRAMS)

    @property
    def has_weights(self) -> bool:
        return False

    def check_can_be_evaluated(self) -> None:
        """Raises: ConfigError. Nothing new can be measured without weights."""
        raise ConfigError(
            f"{self.pack.folder} is a packed experiment, which has results but no weights: evaluate the run folders "
            "that it was packed from, or train the runs again under another experiment_name=..."
        )

    def load_model(
        self, under: Sequence[str] = (), at_step: int | None = None, scheme_changed: bool = False
    ) -> Decoder:
        """Raises: ConfigError. There are no weights."""
        self.check_can_be_evaluated()
        raise AssertionError("a packed run is never evaluated")

    @cached_property
    def _key(self) -> Key:
        """Raises: ConfigError where the pack cannot be read, or does not hold this run."""
        index = self.pack.index
        name = "/".join(self.path.parts[-2:])
        key = next((key for key in index.runs if name == f"{key[0]}/seed={key[1]}"), None)
        if key is None:
            raise ConfigError(f"{self.pack.folder} is a packed experiment and contains no run {name}")
        return key

    @property
    def _files(self) -> dict[str, str | None]:
        if self._key not in self.pack.files_of_runs:
            self.pack.refuse(RUNS, f"lacks {self._key[0]}/seed={self._key[1]}")
        return self.pack.files_of_runs[self._key]

    def _stored(self) -> list[Stored]:
        return self.pack.readings.get(self._key, [])


def runs_of(pack: Pack) -> list[Run]:
    """All of them by name; where `pack.json` cannot be read, one that says so when it is asked for anything."""
    try:
        keys = sorted(pack.index.runs)
    except ConfigError:
        return [PackedRun(pack.folder / _UNKNOWN / PACK, pack)]
    return [PackedRun(pack.folder / scheme / f"seed={seed}", pack) for scheme, seed in keys]


def _header(stored: Stored) -> dict[str, Any]:
    try:
        header = json.loads(stored.header)
    except ValueError as error:
        raise NotAResult(f"its header cannot be read ({error})") from None
    if not isinstance(header, dict):
        raise NotAResult("its header has no settings")
    return header
