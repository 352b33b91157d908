"""A pack: finished runs of an experiment in one zip file, which every command reads in place.

    <experiment>.zip, <experiment>.2.zip, ...    together with run folders one experiment
        pack.json                  the text files of the runs (equal ones once), and the headers of their results;
                                   the table of `posbench tune`, where the experiment has one
        metrics.parquet            one row a line of metrics.jsonl, with its run
        windows-<protocol>.parquet one row a window: the windows of all results, in the order of their headers
        <scheme>/seed=<n>/model.safetensors    the last weights in bfloat16, where they were asked for

In the pack of a search for learning rates (`<experiment>-tune.zip`) a run is `lr=<rate>/<scheme>/seed=<n>`.

Checkpoints are left out. Files that are alike in all runs stand together, so that they compress: as a zip of the run
folders themselves the reference runs would be twice as large.
"""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
import zlib
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posbench.config import ConfigError
from posbench.runs.manifest import DamagedFile
from posbench.runs.results import Damaged, Result, ResultKey, parquet, read_parquet
from posbench.runs.run import Run
from posbench.system.console import Say
from posbench.system.files import sum_of, sync_folder

if TYPE_CHECKING:
    import pyarrow
    from torch import Tensor

FORMAT = 1
RATES = "rates.csv"  # beside an experiment's runs: the learning rates that were tried (posbench/tools/tune.py)
INDEX, METRICS, MODEL = "pack.json", "metrics.parquet", "model.safetensors"
_RUN = re.compile(
    r"(lr=[^/\\]+/)?(?!\.)[^/\\]+/seed=[0-9]+"
)  # nothing that leads elsewhere than into the experiment's folder
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
        """`pack.json`: format, experiment, texts, runs (name -> file -> number of its text), results, weights, rates.

        Raises: ConfigError.
        """
        index: dict[str, Any] = json.loads(self.read(INDEX))
        if index.get("format") != FORMAT or not all(map(_RUN.fullmatch, index["runs"])):
            raise ConfigError(f"{self.file} is not a pack of format {FORMAT}: upgrade posbench")
        return index

    @property
    def runs(self) -> list[Run]:
        """All of them by name. Raises: ConfigError."""
        return [PackedRun(self.experiment / name, self) for name in sorted(self.index["runs"])]

    @cached_property
    def metrics(self) -> dict[str, list[dict[str, Any]]]:
        """Run -> the rows of its metrics.jsonl. Raises: ConfigError."""
        rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for row in read_parquet(self.read(METRICS)).to_pylist():
            rows[row.pop("run")].append({name: value for name, value in row.items() if value is not None})
        return rows

    @cached_property
    def results(self) -> dict[str, list[Result]]:
        """Run -> its results; a column that only those of others have is left out. Raises: ConfigError."""
        results: dict[str, list[Result]] = defaultdict(list)
        tables: dict[str, pyarrow.Table] = {}
        ends: Counter[str] = Counter()
        for entry in self.index["results"]:
            key, start = _key(entry["header"]), ends[entry["header"]["protocol"]]
            if not start:
                tables[key.protocol] = read_parquet(self.read(f"windows-{key.protocol}.parquet"))
            windows = tables[key.protocol].slice(start, entry["rows"])
            own = [name for name in windows.column_names if windows[name].null_count < len(windows)]
            ends[key.protocol] += entry["rows"]
            results[entry["run"]].append(Result(key, entry["header"], windows.select(own)))
        return results

    def read(self, name: str) -> bytes:
        """One of the zip's files, whose checksum is compared. Raises: ConfigError."""
        try:
            with zipfile.ZipFile(self.file) as archive:
                return archive.read(name)
        except (OSError, KeyError, ValueError, zipfile.BadZipFile, zlib.error) as error:
            raise ConfigError(f"{self.file} cannot be read ({error}): restore it from a copy") from error


@dataclass(frozen=True)
class PackedRun(Run):
    """A run in a pack. Its path is that of the folder it would be; what is evaluated later is stored there."""

    pack: Pack = field(compare=False, repr=False)

    @property
    def key(self) -> str:
        """The name of the run in the pack, such as `scheme/seed=n`."""
        return self.path.relative_to(self.pack.experiment).as_posix()

    def content(self, name: str) -> bytes:
        number = self.pack.index["runs"][self.key].get(name)
        if number is None:
            raise DamagedFile(f"{self.pack.file} does not hold {name} of {self.key}")
        return str(self.pack.index["texts"][number]).encode()

    @property
    def logged(self) -> list[dict[str, Any]]:
        return self.pack.metrics.get(self.key, [])

    def results(self) -> tuple[list[Result], list[Damaged]]:
        of_folder, damaged = super().results()
        results = {result.key: result for result in (*self.pack.results.get(self.key, []), *of_folder)}
        return [results[key] for key in sorted(results)], damaged

    def evaluated(self) -> list[ResultKey]:
        packed = (_key(entry["header"]) for entry in self.pack.index["results"] if entry["run"] == self.key)
        return sorted({*super().evaluated(), *packed})

    @property
    def weights_digest(self) -> str | None:
        return self.pack.index["weights"].get(self.key)

    @property
    def has_weights(self) -> bool:
        return self.weights_digest is not None

    def load_weights(self, at_step: int | None = None) -> dict[str, Tensor]:
        from safetensors.torch import load

        if not self.has_weights or at_step not in (None, self.manifest.num_steps):
            raise ConfigError(
                f"{self.pack.file} is a pack that has results but no weights of step {at_step or 'last'}: use the run "
                "folders that it was packed from, or a pack that was written with --weights"
            )
        return load(self.pack.read(f"{self.key}/{MODEL}"))


def _key(header: dict[str, Any]) -> ResultKey:
    return ResultKey(header["protocol"], header["length"], tuple(header["under"]))


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
    """Cache packs, so that each zip is parsed once."""
    stat = file.stat()
    return _opened(file, stat.st_mtime_ns, stat.st_size)  # a relative path is another file in another folder


@lru_cache(maxsize=32)
def _opened(file: Path, mtime_ns: int, size: int) -> Pack:
    return Pack(file)


def write_pack(output: Path, runs: dict[str, Run], notice: Say, weights: bool) -> None:
    """Write the finished runs of one experiment, by their names in the pack, to a zip.

    `notice` gets a line for each result that is left out.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    beside = output.with_name(f".{output.name}.tmp")
    experiment = next(iter(runs.values())).path.parents[1]
    with zipfile.ZipFile(beside, "w") as archive:
        digests = _add_weights(archive, runs) if weights else {}
        index = {"format": FORMAT, "experiment": experiment_in(output).name, "runs": {}, "weights": digests}
        if (rates := experiment / RATES).is_file():
            index["rates"] = rates.read_text(encoding="utf-8")
        _add_runs(archive, runs, index, notice)
    sum_of(beside, sync=True)
    beside.rename(output)
    sync_folder(output.parent)


def free_name(experiment: Path) -> Path:
    """The first of `<experiment>.zip`, `<experiment>.2.zip` and so on that does not exist."""
    number = 1
    while (file := experiment.with_name(f"{experiment.name}{f'.{number}' if number > 1 else ''}.zip")).exists():
        number += 1
    return file


def _add_runs(archive: zipfile.ZipFile, runs: dict[str, Run], index: dict[str, Any], notice: Say) -> None:
    """Write the index, completed, and all tables."""
    import pyarrow

    texts: dict[str, int] = {}
    files: dict[str, dict[str, int]] = {}
    logged: list[dict[str, Any]] = []
    results: list[tuple[ResultKey, str, Result]] = []
    for name, run in runs.items():
        of_run = ["run.json", "config.yaml", "tokenizer.json", *(Path(file).name for file in run.manifest.scheme_files)]
        files[name] = {}
        for file in of_run:
            if (run.path / file).is_file():
                text = run.content(file).decode()
                files[name][file] = texts.setdefault(text, len(texts))  # its number: runs share texts
        logged += [{"run": name, **row} for row in run.logged]
        stored, damaged = run.results()
        results += [(result.key, name, result) for result in stored]
        for each in damaged:
            notice(f"{each}. It is left out")
    results.sort(key=lambda each: each[:2])
    headers = [{"run": name, "rows": len(result.table), "header": result.header} for _, name, result in results]
    index |= {"runs": files, "texts": list(texts), "results": headers}
    content = json.dumps(index, separators=(",", ":")).encode()
    archive.writestr(zipfile.ZipInfo(INDEX, _WRITTEN), content, zipfile.ZIP_DEFLATED, compresslevel=9)
    columns = list(dict.fromkeys(name for row in logged for name in row)) or ["run"]
    tables = {METRICS: pyarrow.table({name: pyarrow.array([row.get(name) for row in logged]) for name in columns})}
    for protocol in sorted({key.protocol for key, _, _ in results}):
        windows = [result.table for key, _, result in results if key.protocol == protocol]
        joined = pyarrow.concat_tables(windows, promote_options="permissive").combine_chunks()
        tables[f"windows-{protocol}.parquet"] = joined
    for name, table in tables.items():
        archive.writestr(zipfile.ZipInfo(name, _WRITTEN), parquet(table, "brotli", 11))


def _add_weights(archive: zipfile.ZipFile, runs: dict[str, Run]) -> dict[str, str]:
    """Write the last weights of each run in bfloat16. Returns their SHA-256 by run. Raises: ConfigError."""
    import torch
    from safetensors.torch import save

    digests = {}
    for name, run in runs.items():
        content = save({each: tensor.to(torch.bfloat16) for each, tensor in run.load_weights().items()})
        digests[name] = hashlib.sha256(content).hexdigest()
        archive.writestr(zipfile.ZipInfo(f"{name}/{MODEL}", _WRITTEN), content)
    return digests
