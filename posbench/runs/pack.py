"""A pack: finished runs of an experiment in one zip file, which every command reads in place.

    <experiment>.zip, <experiment>.2.zip, ...    each written once; together with run folders one experiment
        pack.json                  the text files of the runs (equal ones once), and the headers of their results
        metrics.parquet            one row a line of metrics.jsonl, with its run
        windows-<protocol>.parquet one row a window: the windows of all results, in the order of their headers
        <scheme>/seed=<n>/model.safetensors    the last weights in bfloat16, where they were asked for

Checkpoints are left out. Files that are alike in all runs stand together, so that they compress: as a zip of the run
folders themselves the reference runs would be twice as large.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import zipfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posbench.config import ConfigError, check_name
from posbench.machine.files import sync_folder
from posbench.runs import readings
from posbench.runs.manifest import Manifest
from posbench.runs.readings import Damaged, NotAResult, Reading, Result
from posbench.runs.run import Run

if TYPE_CHECKING:
    import pyarrow

    from posbench.model import Decoder

FORMAT = 1
INDEX, METRICS, MODEL = "pack.json", "metrics.parquet", "model.safetensors"
_UNREADABLE = (OSError, KeyError, TypeError, ValueError, AttributeError, zipfile.BadZipFile, zlib.error)
_RUN = re.compile(r"([^/]+)/seed=[0-9]{1,9}")
_SMALLEST = ("brotli", 11)  # compression of tables, and its level
_WRITTEN = (1980, 1, 1, 0, 0, 0)  # the date of every file in a zip: equal content gives equal bytes


@dataclass(frozen=True)
class Pack:
    """A zip of runs. Reading is lazy: nothing is opened until it is asked for, and then once."""

    file: Path

    @property
    def experiment(self) -> Path:
        """The folder that its runs would lie in, by the name of the file: `runs/demo`, of `runs/demo.2.zip` too."""
        return experiment_in(self.file)

    @cached_property
    def index(self) -> dict[str, Any]:
        """`pack.json`: format, experiment, texts, runs (name -> file -> number of its text), results, weights.

        Raises: ConfigError.
        """
        with self._explained():
            index = json.loads(self.read(INDEX))
            number = index["format"]
            if number != FORMAT:
                raise ConfigError(f"{self.file} is of format {number}; this posbench reads format {FORMAT}")
            check_name("experiment", index["experiment"])
            for name in index["runs"]:
                match = _RUN.fullmatch(name)
                if match is None:
                    raise ValueError(f"{name!r} is not a run")
                check_name("scheme", match[1])
            return dict(index)

    @property
    def runs(self) -> list[Run]:
        """All of them by name. Raises: ConfigError."""
        return [PackedRun(self.experiment / name, self) for name in sorted(self.index["runs"])]

    @cached_property
    def metrics(self) -> dict[str, list[dict[str, Any]]]:
        """Run -> the rows of its metrics.jsonl. Raises: ConfigError."""
        rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for row in self.table(METRICS).to_pylist():
            rows[row.pop("run")].append({name: value for name, value in row.items() if value is not None})
        return rows

    @cached_property
    def results(self) -> dict[str, list[tuple[dict[str, Any], pyarrow.Table]]]:
        """Run -> the headers of its results, with the windows. Raises: ConfigError."""
        results = defaultdict(list)
        ends: Counter[str] = Counter()
        with self._explained():
            for entry in self.index["results"]:
                header = entry["header"]
                table = self.table(f"windows-{header['protocol']}.parquet")
                start = ends[header["protocol"]]
                ends[header["protocol"]] = start + entry["rows"]
                results[entry["run"]].append((header, table.slice(start, entry["rows"])))
        return results

    def read(self, name: str) -> bytes:
        """One of the zip's files. Raises: ConfigError."""
        with self._explained(), zipfile.ZipFile(self.file) as archive:
            return archive.read(name)

    def table(self, name: str) -> pyarrow.Table:
        """One of its parquet files. Raises: ConfigError."""
        if name not in self._tables:
            with self._explained():
                self._tables[name] = readings.read_parquet(self.read(name))
        return self._tables[name]

    @cached_property
    def _tables(self) -> dict[str, pyarrow.Table]:
        return {}

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (*_UNREADABLE, NotAResult) as error:
            why = getattr(error, "strerror", None) or error
            raise ConfigError(f"{self.file} cannot be read ({why}): restore it from a copy") from error


@dataclass(frozen=True)
class PackedRun(Run):
    """A run in a pack. Its path is that of the folder it would be; what is evaluated later is stored there."""

    pack: Pack = field(compare=False, repr=False)

    @property
    def key(self) -> str:
        """Its name in the pack, `scheme/seed=n`."""
        return "/".join(self.path.parts[-2:])

    @property
    def remedy(self) -> str:
        return f"restore {self.pack.file} from a copy"

    def content(self, name: str) -> bytes:
        number = self.pack.index["runs"][self.key].get(name)
        if number is None:
            raise FileNotFoundError(2, "it was not packed", str(self.path / name))
        return str(self.pack.index["texts"][number]).encode()

    def write_manifest(self, manifest: Manifest) -> None:
        """Raises: ConfigError. What is packed does not change."""
        raise ConfigError(f"{self.name} is packed in {self.pack.file}, and packed runs cannot be changed")

    @property
    def logged(self) -> list[dict[str, Any]]:
        return self.pack.metrics.get(self.key, [])

    def results(self) -> tuple[list[Result], list[Damaged]]:
        results, damaged = super().results()
        manifest, weights = self.manifest, self.weights
        for header, table in self.pack.results.get(self.key, []):
            reading = _reading(header)
            try:
                readings.check_header(manifest, weights, reading, header)
                held = [name for name in table.column_names if table[name].null_count < len(table)]
                results.append(Result(reading, header, table.select(held)))
            except NotAResult as why:
                damaged.append(Damaged(reading, self.pack.file, str(why), self.remedy))
        return sorted({each.reading: each for each in reversed(results)}.values(), key=lambda r: r.reading), damaged

    def evaluated(self) -> list[Reading]:
        packed = (_reading(entry["header"]) for entry in self.pack.index["results"] if entry["run"] == self.key)
        return sorted({*super().evaluated(), *packed})

    @property
    def weights(self) -> str | None:
        return self.pack.index["weights"].get(self.key)

    @property
    def marks(self) -> tuple[str, ...]:
        return ("weights=bfloat16",)

    @property
    def has_weights(self) -> bool:
        return self.weights is not None

    def put_weights(self, model: Decoder, at_step: int | None = None) -> None:
        from safetensors.torch import load

        from posbench.runs.checkpoint import put_weights

        if not self.has_weights or at_step not in (None, self.manifest.num_steps):
            what = f"weights of step {at_step}" if self.has_weights else "weights"
            raise ConfigError(
                f"{self.pack.file} is a pack that has results but no {what}: use the run folders that it was packed "
                "from, or a pack that was written with --weights"
            )
        content = self.pack.read(f"{self.key}/{MODEL}")
        if hashlib.sha256(content).hexdigest() != self.weights:
            raise ConfigError(
                f"the weights of {self.name} in {self.pack.file} do not match their checksum: {self.remedy}"
            )
        put_weights(model, load(content))


def _reading(header: Mapping[str, Any]) -> Reading:
    return Reading(header["protocol"], header["length"], tuple(header["under"]))


def packs_of(experiment: Path) -> list[Pack]:
    """The zips beside an experiment's folder that hold runs of it, the one without a number first.

    Raises: ConfigError where one cannot be read.
    """
    zips = [place for place in experiment.parent.glob("*.zip") if place.name.startswith(f"{experiment.name}.")]
    packs = [opened(file) for file in sorted(zips, key=lambda file: (len(file.name), file.name))]
    return [pack for pack in packs if pack.experiment == experiment]


def experiment_in(output: Path) -> Path:
    """The folder whose runs a zip of this name is to hold: `demo.2.zip` beside `demo.zip` holds more of `demo`."""
    first, _, number = output.stem.rpartition(".")
    is_further = number.isdecimal() and output.with_name(f"{first}.zip").exists()
    return output.with_name(first if is_further else output.stem)


def opened(file: Path) -> Pack:
    """One object for one zip: what it has read is not read again for every run."""
    stat = file.stat()
    return _opened(file, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=32)
def _opened(file: Path, mtime_ns: int, size: int) -> Pack:
    return Pack(file)


def write_pack(output: Path, runs: list[Run], notice: Callable[[str], object], weights: bool) -> None:
    """Write finished runs of one experiment to a zip. Notice is told what of them is left out, and why."""
    output.parent.mkdir(parents=True, exist_ok=True)
    beside = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        with zipfile.ZipFile(beside, "w") as archive:
            digests = _write_weights(archive, runs) if weights else {}
            for name, content in _members(experiment_in(output).name, runs, digests, notice):
                method = zipfile.ZIP_DEFLATED if name == INDEX else zipfile.ZIP_STORED
                archive.writestr(zipfile.ZipInfo(name, _WRITTEN), content, method, compresslevel=9)
        with beside.open("rb") as file:
            os.fsync(file.fileno())
        beside.rename(output)
        sync_folder(output.parent)
    finally:
        beside.unlink(missing_ok=True)


def free_name(experiment: Path) -> Path:
    """The first of `<experiment>.zip`, `<experiment>.2.zip` and so on that does not exist."""
    number = 1
    while (file := experiment.with_name(f"{experiment.name}{f'.{number}' if number > 1 else ''}.zip")).exists():
        number += 1
    return file


def _members(
    experiment: str, runs: list[Run], digests: dict[str, str], notice: Callable[[str], object]
) -> Iterator[tuple[str, bytes]]:
    import pyarrow

    texts: dict[str, int] = {}
    files: dict[str, dict[str, int]] = {}
    logged: list[dict[str, Any]] = []
    results: list[tuple[Reading, str, Result]] = []
    for run in runs:
        key = "/".join(run.path.parts[-2:])
        names = ["run.json", "config.yaml", "tokenizer.json", *(Path(name).name for name in run.manifest.scheme_files)]
        held = {name: run.content(name).decode() for name in names if (run.path / name).is_file()}
        files[key] = {name: texts.setdefault(text, len(texts)) for name, text in held.items()}
        try:
            logged += [{"run": key, **row} for row in run.logged]
        except ConfigError as error:
            notice(f"{error}. The curve of {run.name} is left out")
        of_run, damaged = run.results()
        results += [(result.reading, key, result) for result in of_run]
        for each in damaged:
            notice(f"{each}. It is left out")
    tables: dict[str, list[pyarrow.Table]] = defaultdict(list)
    headers = []
    for reading, key, result in sorted(results, key=lambda each: each[:2]):
        tables[reading.protocol].append(result.table)
        headers.append({"run": key, "rows": len(result.table), "header": result.header})
    index: dict[str, Any] = {"format": FORMAT, "experiment": experiment, "runs": files, "weights": digests}
    index |= {"texts": list(texts), "results": headers}
    yield INDEX, json.dumps(index, separators=(",", ":")).encode()
    columns = list(dict.fromkeys(name for row in logged for name in row)) or ["run"]
    rows = pyarrow.table({name: pyarrow.array([row.get(name) for row in logged]) for name in columns})
    yield METRICS, readings.parquet(rows, *_SMALLEST)
    for protocol in sorted(tables):
        joined = pyarrow.concat_tables(tables[protocol], promote_options="permissive").combine_chunks()
        yield f"windows-{protocol}.parquet", readings.parquet(joined, *_SMALLEST)


def _write_weights(archive: zipfile.ZipFile, runs: list[Run]) -> dict[str, str]:
    """Write the last weights of each run in bfloat16. Returns their SHA-256 by run. Raises: ConfigError."""
    import torch
    from safetensors.torch import load_file, save

    from posbench.runs.checkpoint import last_weights

    digests = {}
    for run in runs:
        key = "/".join(run.path.parts[-2:])
        tensors = load_file(last_weights(run.path / "checkpoints", run.manifest))
        content = save({name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()})
        digests[key] = hashlib.sha256(content).hexdigest()
        archive.writestr(zipfile.ZipInfo(f"{key}/{MODEL}", _WRITTEN), content)
    return digests
