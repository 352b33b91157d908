"""A packed experiment: all its finished runs in a few files. `posbench.runs.pack` writes it.

    <experiment>/
        pack.json                  the runs, the size and SHA-256 of every other file, and a seal over all of that
        runs.parquet               one row a run: scheme, seed, manifest (JSON), config (YAML), tokenizer (a file)
        metrics.parquet            one row a line of metrics.jsonl: scheme, seed, and the line's values
        readings.parquet           one row a result: scheme, seed, protocol, length, under, its windows' place, header
        windows-<protocol>.parquet one row a window: scheme, seed, length, under, and the columns of the protocol
        tokenizer.json             where the runs kept theirs; tokenizer-2.json and so on where they are not all one
    ngrams.json                losses of n-gram models, by key; where there are any (`posbench.runs.ngrams`)

Nothing of it is believed before it was checked. A file that is not as it was written is named, and costs what it holds:
the windows of one protocol, say.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from posbench.config import ConfigError, check_name
from posbench.machine.files import check_format, has_its_seal, read_json
from posbench.runs.readings import NotAResult, Reading
from posbench.runs.run import PACK
from posbench.runs.windows import fault, read_table

if TYPE_CHECKING:
    import pyarrow


PACK_FORMAT = 1
RUNS, METRICS, READINGS = "runs.parquet", "metrics.parquet", "readings.parquet"
NGRAMS = "ngrams.json"
KEY = ("scheme", "seed")  # of a run, the first columns of every table
PLACE = (*KEY, "length", "under")  # the first columns of windows
_COLUMNS: dict[str, dict[str, Any]] = {
    RUNS: {"scheme": str, "seed": int, "manifest": str, "config": str, "tokenizer": str | None},
    READINGS: {
        **{"scheme": str, "seed": int, "protocol": str, "length": int, "under": str, "file": str},
        **{"columns": list, "windows": int, "sha256": str, "header": str},
    },
}
_FILE = re.compile(r"[a-z][a-z0-9_-]{0,80}\.(parquet|json)")
_RUN = re.compile(r"([^/]+)/seed=([0-9]{1,9})")

Key = tuple[str, int]  # scheme, seed


class DamagedPack(ConfigError):
    """A file of a packed experiment is missing, or is not what was written."""

    def __init__(self, file: Path, why: str, remedy: str) -> None:
        super().__init__(f"{file} {why}: {remedy}")
        self.why = f"{file.name} {why}"


@dataclass(frozen=True)
class Index:
    """`pack.json`."""

    runs: tuple[Key, ...]
    files: dict[str, tuple[int, str]]  # name -> bytes, SHA-256


@dataclass(frozen=True)
class Stored:
    """One row of `readings.parquet`: a result, and where its windows are."""

    reading: Reading
    file: str
    first: int  # row
    windows: int  # rows
    columns: tuple[str, ...]
    sha256: str  # of the windows' numbers: see `digest`
    header: str  # JSON


@dataclass(frozen=True)
class Pack:
    """The folder of a packed experiment. Reading is lazy: nothing is opened until it is asked for, and then once."""

    folder: Path
    _tables: dict[str, pyarrow.Table] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def index(self) -> Index:
        """Which runs and files there are. Raises: ConfigError."""
        file = self.folder / PACK
        try:
            content = read_json(file)
        except (OSError, ValueError) as error:
            self.refuse(PACK, f"cannot be read ({error})")
        if not isinstance(content, dict) or not isinstance(content.get("format"), int):
            self.refuse(PACK, "names no format")
        check_format(file, content["format"], PACK_FORMAT)
        if not has_its_seal(content):
            self.refuse(PACK, "does not match its checksum")
        try:
            runs = tuple(map(key_of, content["runs"]))
            files = {
                file_name(name): (int(each["bytes"]), str(each["sha256"])) for name, each in content["files"].items()
            }
        except (ConfigError, KeyError, TypeError, ValueError, AttributeError) as error:
            self.refuse(PACK, f"has no list of runs and files ({error})")
        return Index(runs, files)

    def content(self, name: str) -> bytes:
        """One of the files, as it was written. Raises: DamagedPack."""
        if name not in self.index.files:
            self.refuse(PACK, f"names no {name}")
        try:
            content = (self.folder / name).read_bytes()
        except FileNotFoundError:
            self.refuse(name, "is missing")
        except OSError as error:
            self.refuse(name, f"cannot be read ({error.strerror or error})")
        if (len(content), hashlib.sha256(content).hexdigest()) != self.index.files[name]:
            self.refuse(name, f"does not match its checksum in {PACK}")
        return content

    def table(self, name: str) -> pyarrow.Table:
        """One of the parquet files. Raises: DamagedPack."""
        if name not in self._tables:
            content = self.content(name)
            try:
                self._tables[name] = read_table(content)
            except ValueError as error:
                self.refuse(name, f"cannot be read ({error})")
        return self._tables[name]

    @cached_property
    def files_of_runs(self) -> dict[Key, dict[str, str | None]]:
        """Run -> manifest, config, and the name of its tokenizer. Raises: DamagedPack."""
        return {(row["scheme"], row["seed"]): row for row in self._rows(RUNS)}

    @cached_property
    def metrics(self) -> dict[Key, list[dict[str, Any]]]:
        """Run -> the rows of its metrics.jsonl. Raises: DamagedPack."""
        table = self.table(METRICS)
        if table.column_names[: len(KEY)] != list(KEY):
            self.refuse(METRICS, f"lacks the columns {', '.join(KEY)}")
        rows: dict[Key, list[dict[str, Any]]] = {}
        for row in table.to_pylist():
            key = row.pop("scheme"), row.pop("seed")
            rows.setdefault(key, []).append({name: value for name, value in row.items() if value is not None})
        return rows

    @cached_property
    def readings(self) -> dict[Key, list[Stored]]:
        """Run -> its results. Raises: DamagedPack."""
        results: dict[Key, list[Stored]] = {}
        ends: dict[str, int] = {}  # windows file -> where the windows of the next result begin
        for row in self._rows(READINGS):
            try:
                reading = Reading(row["protocol"], row["length"], tuple(row["under"].split()))
                file = file_name(row["file"])
                if row["windows"] < 1:
                    raise ConfigError(f"{row['windows']} windows")
            except ConfigError as error:
                self.refuse(READINGS, f"has a row that is not a result ({error})")
            first = ends.get(file, 0)
            ends[file] = first + row["windows"]
            columns = tuple(map(str, row["columns"]))
            stored = Stored(reading, file, first, row["windows"], columns, row["sha256"], row["header"])
            results.setdefault((row["scheme"], row["seed"]), []).append(stored)
        return results

    @cached_property
    def ngrams(self) -> dict[str, Any]:
        """Key -> a record of n-gram losses, as written. Raises: DamagedPack."""
        if NGRAMS not in self.index.files:
            return {}
        try:
            records = json.loads(self.content(NGRAMS))
        except ValueError as error:
            self.refuse(NGRAMS, f"cannot be read ({error})")
        if not isinstance(records, dict):
            self.refuse(NGRAMS, "has no records")
        return records

    def windows(self, stored: Stored) -> pyarrow.Table:
        """The windows of one result, as the run folder held them. Raises: NotAResult."""
        try:
            table = self.table(stored.file)
        except DamagedPack as damaged:
            raise NotAResult(damaged.why) from None
        for lacking in set(stored.columns) - set(table.column_names):
            raise NotAResult(f"{stored.file} lacks the column {lacking!r}")
        windows = table.slice(stored.first, stored.windows).select(list(stored.columns))
        why = fault(windows)
        if why:
            raise NotAResult(why)
        if digest(windows) != stored.sha256:
            raise NotAResult(f"its windows do not match their checksum in {READINGS}")
        return windows

    def remedy(self, name: str) -> str:
        """What brings a file back."""
        return (
            f"restore {self.folder / name} from a copy (in a Git repository: git checkout {self.folder}), or "
            "pack the run folders again with posbench pack"
        )

    def refuse(self, name: str, why: str) -> NoReturn:
        """Raises: DamagedPack naming the file, the cause and the remedy."""
        raise DamagedPack(self.folder / name, why, self.remedy(name))

    def _rows(self, name: str) -> list[dict[str, Any]]:
        """The rows of a table whose columns are known, each of its type. Raises: DamagedPack."""
        rows: list[dict[str, Any]] = self.table(name).to_pylist()
        for row in rows:
            for column, kind in _COLUMNS[name].items():
                if column not in row or not isinstance(row[column], kind):
                    self.refuse(name, f"has impossible values in the column {column!r}")
        return rows


def digest(windows: pyarrow.Table) -> str:
    """SHA-256 of the names, types and numbers of windows, whatever the order of their columns."""
    total = hashlib.sha256()
    for name in sorted(windows.column_names):
        values = windows[name].to_numpy()
        content = values.tobytes() if values.dtype != object else json.dumps(values.tolist(), default=str).encode()
        total.update(f"{name} {values.dtype.str} {values.size}\n".encode() + content)
    return total.hexdigest()


def key_of(name: str) -> Key:
    """`scheme/seed=n` as a key. Raises: ConfigError."""
    match = _RUN.fullmatch(name)
    if match is None:
        raise ConfigError(f"{name!r} is not a run")
    check_name("scheme", match[1])
    return match[1], int(match[2])


def file_name(name: str) -> str:
    """The name of a file beside `pack.json`. Raises: ConfigError for one that could lie elsewhere."""
    if not _FILE.fullmatch(name):
        raise ConfigError(f"{name!r} is not the name of a file of a packed experiment")
    return name
