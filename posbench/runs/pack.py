"""Store finished runs in one zip file, a pack, which every command reads in place.

    <experiment>.zip, <experiment>.2.zip, ...    one experiment, together with its run folders
        pack.json                  the folder's name, the runs' text files (equal ones once), and the headers of their
                                   results
        metrics.parquet            one row per line of metrics.jsonl, with its run
        windows-<protocol>.parquet one row per scored window of text, of all results, in the order of their headers
        <scheme>/seed=<n>/model.safetensors    the last weights in bfloat16, if they were packed

In the pack of a learning-rate search (`<experiment>-tune.zip`), runs are named `lr=<rate>/<scheme>/seed=<n>`.
Checkpoints are left out.
"""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
import zlib
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posbench.config import ConfigError
from posbench.runs.manifest import DamagedFile
from posbench.runs.results import InvalidResult, Result, ResultKey, key_of, parquet, read_parquet
from posbench.runs.run import Run
from posbench.system.console import Say
from posbench.system.files import sum_of, sync_folder

if TYPE_CHECKING:
    import pyarrow
    from torch import Tensor

FORMAT = 1
INDEX, METRICS, MODEL = "pack.json", "metrics.parquet", "model.safetensors"
_RUN = re.compile(r"(lr=[^/\\]+/)?(?!\.)[^/\\]+/seed=[0-9]+")  # no path that leaves the experiment's folder
_DATE = (1980, 1, 1, 0, 0, 0)  # of every file in a zip, so that equal content gives equal bytes


@dataclass(frozen=True)
class Pack:
    """A zip file of runs. Its parts are read when they are first used, and then cached."""

    file: Path

    @cached_property
    def experiment(self) -> Path:
        """Return the folder that the runs come from: `runs/demo` for `runs/demo.zip` and `runs/demo.2.zip`."""
        return experiment_in(self.file)

    @cached_property
    def index(self) -> dict[str, Any]:
        """Return the content of `pack.json`; `runs[run][file]` is the index in `texts` of that file's content.

        Raises: ConfigError if it has another format.
        """
        index: dict[str, Any] = json.loads(self.read(INDEX))
        if index.get("format") != FORMAT or not all(map(_RUN.fullmatch, index["runs"])):
            raise ConfigError(f"{self.file} is not a pack of format {FORMAT}: upgrade posbench")
        return index

    @property
    def runs(self) -> list[Run]:
        """Return all runs of the pack, sorted by name. Raises: ConfigError if the zip cannot be read."""
        return [PackedRun(self.experiment / name, self) for name in sorted(self.index["runs"])]

    @cached_property
    def metrics(self) -> dict[str, list[dict[str, Any]]]:
        """Return {run: lines of its metrics.jsonl}. Raises: ConfigError if the zip cannot be read."""
        rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for row in read_parquet(self.read(METRICS)).to_pylist():
            # A row lacks the columns that only other kinds of rows have.
            rows[row.pop("run")].append({name: value for name, value in row.items() if value is not None})
        return rows

    @cached_property
    def results(self) -> dict[str, list[Result]]:
        """Return {run: its evaluation results}. Raises: ConfigError if the zip cannot be read."""
        results: dict[str, list[Result]] = defaultdict(list)
        tables: dict[str, pyarrow.Table] = {}
        rows_read: Counter[str] = Counter()  # protocol -> rows of its table that belong to earlier entries
        # All runs share one table per protocol, in the order of the headers.
        for entry in self.index["results"]:
            key, first_row = key_of(entry["header"]), rows_read[entry["header"]["protocol"]]
            # The first result of a protocol.
            if not first_row:
                tables[key.protocol] = read_parquet(self.read(f"windows-{key.protocol}.parquet"))
            windows = tables[key.protocol].slice(first_row, entry["rows"])
            # Columns that are empty for a result belong to others.
            columns = [name for name in windows.column_names if windows[name].null_count < len(windows)]
            rows_read[key.protocol] += entry["rows"]
            results[entry["run"]].append(Result(key, entry["header"], windows.select(columns)))
        return results

    def read(self, name: str) -> bytes:
        """Return the content of file `name` in the zip. Raises: ConfigError if it is missing or damaged."""
        try:
            with zipfile.ZipFile(self.file) as archive:
                return archive.read(name)
        except (OSError, KeyError, ValueError, zipfile.BadZipFile, zlib.error) as error:
            raise ConfigError(f"{self.file} cannot be read ({error}): restore it from a copy") from error


@dataclass(frozen=True, repr=False)
class PackedRun(Run):
    """A run in a pack. `path` is the folder it would have unpacked; new results are stored there."""

    pack: Pack = field(compare=False)

    @cached_property
    def key(self) -> str:
        """Return the name of the run in its pack, such as `scheme/seed=n`."""
        return self.path.relative_to(self.pack.experiment).as_posix()

    def content(self, name: str) -> bytes:
        number = self.pack.index["runs"][self.key].get(name)
        if number is None:
            raise DamagedFile(f"{self.pack.file} does not hold {name} of {self.key}")
        return str(self.pack.index["texts"][number]).encode()

    @property
    def logged(self) -> list[dict[str, Any]]:
        return self.pack.metrics.get(self.key, [])

    def results(self) -> tuple[list[Result], list[InvalidResult]]:
        folder_results, invalid = super().results()
        # A newer result in the folder replaces the packed one, because a later entry of a dict replaces an earlier one.
        results = {result.key: result for result in (*self.pack.results.get(self.key, []), *folder_results)}
        return [results[key] for key in sorted(results)], invalid

    def evaluated(self) -> list[ResultKey]:
        packed = (key_of(entry["header"]) for entry in self.pack.index["results"] if entry["run"] == self.key)
        return sorted({*super().evaluated(), *packed})

    @property
    def weights_digest(self) -> str | None:
        return self.pack.index["weights"].get(self.key)

    @property
    def has_weights(self) -> bool:
        return self.weights_digest is not None

    @property
    def is_in_runs(self) -> bool:
        return False  # a pack may be somebody else's

    def load_weights(self, at_step: int | None = None) -> dict[str, Tensor]:
        from safetensors.torch import load

        if not self.has_weights or at_step not in (None, self.manifest.num_steps):
            step = "" if at_step is None else f" of step {at_step}"
            raise ConfigError(
                f"{self.pack.file} has results but no weights{step}: use the run folders that it was packed from, or a "
                "pack that was written with --weights"
            )
        return load(self.pack.read(f"{self.key}/{MODEL}"))


def packs_of(experiment: Path) -> list[Pack]:
    """Return the packs of the folder `experiment`: `demo.zip`, then `demo.2.zip` and so on."""
    files = experiment.parent.glob("*.zip")
    zips = [file for file in files if file.name.startswith(f"{experiment.name}.") and file.is_file()]
    # By length first, so that `demo.10.zip` comes after `demo.2.zip`.
    packs = [open_pack(file) for file in sorted(zips, key=lambda file: (len(file.name), file.name))]
    # `demo.2.zip` may be the pack of an experiment `demo.2`.
    return [pack for pack in packs if pack.experiment == experiment]


def experiment_in(output: Path) -> Path:
    """Return the folder of the experiment to which the pack `output` belongs."""
    stem, _, number = output.stem.rpartition(".")
    own = output.with_name(output.stem)
    # `demo.2.zip` belongs to `demo` if `demo.zip` exists, and to an experiment `demo.2` otherwise.
    if not number.isdecimal() or not output.with_name(f"{stem}.zip").exists():
        return own
    # It may also say that it comes from a folder `demo.2`; a damaged or older one says nothing.
    with suppress(ConfigError):
        if output.exists() and open_pack(output).index.get("folder") == own.name:
            return own
    return output.with_name(stem)


def open_pack(file: Path) -> Pack:
    """Return the pack in `file`, cached until the file changes."""
    stat = file.stat()  # also tells apart files of the same relative path after a change of directory
    return _cached_pack(file, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=32)
def _cached_pack(file: Path, mtime_ns: int, size: int) -> Pack:
    return Pack(file)


def write_pack(output: Path, experiment: Path, runs: dict[str, Run], notice: Say, weights: bool) -> None:
    """Write finished runs of the folder `experiment`, by their names in the pack, to the zip file `output`.

    Arguments: notice, called with a line for each result that is left out; weights, whether to include the last
    weights.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    # Written under another name first, so a kill leaves no half pack.
    temporary = output.with_name(f".{output.name}.tmp")
    try:
        with zipfile.ZipFile(temporary, "w") as archive:
            digests = _add_weights(archive, runs) if weights else {}
            index = {"format": FORMAT, "folder": experiment.name, "runs": {}, "weights": digests}
            _add_runs(archive, runs, index, notice)
        sum_of(temporary, sync=True)
        temporary.rename(output)
    except OSError as error:
        # Writing names no file, and reading a run does.
        raise OSError(error.errno, error.strerror or str(error), error.filename or str(output)) from error
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(output.parent)


def free_name(experiment: Path) -> Path:
    """Return the first of `<experiment>.zip`, `<experiment>.2.zip` and so on that does not exist."""
    number, file = 1, experiment.with_name(f"{experiment.name}.zip")
    while file.exists():
        number += 1
        file = experiment.with_name(f"{experiment.name}.{number}.zip")
    return file


def _add_runs(archive: zipfile.ZipFile, runs: dict[str, Run], index: dict[str, Any], notice: Say) -> None:
    # Write all of a pack but the weights: `index`, which gets the runs' files and headers, and the tables.
    import pyarrow

    texts: dict[str, int] = {}  # content of a file -> its number
    files: dict[str, dict[str, int]] = {}  # run -> file name -> number of its content
    logged: list[dict[str, Any]] = []
    results: list[tuple[ResultKey, str, Result]] = []
    for name, run in runs.items():
        # The user's own scheme is part of the run.
        scheme_files = [Path(file).name for file in run.manifest.scheme_files]
        files[name] = {}
        for file in ["run.json", "config.yaml", "tokenizer.json", *scheme_files]:
            if (run.path / file).is_file():
                text = run.content(file).decode()
                files[name][file] = texts.setdefault(text, len(texts))  # the text's number: equal texts are stored once
        logged += [{"run": name, **row} for row in run.logged]
        valid, invalid = run.results()
        results += [(result.key, name, result) for result in valid]
        for result_file in invalid:
            notice(f"{result_file}. It is left out")
    # In the order of their keys, so that one protocol's windows follow each other.
    results.sort(key=lambda entry: entry[:2])
    headers = [{"run": name, "rows": len(result.table), "header": result.header} for _, name, result in results]
    index |= {"runs": files, "texts": list(texts), "results": headers}
    content = json.dumps(index, separators=(",", ":")).encode()
    archive.writestr(zipfile.ZipInfo(INDEX, _DATE), content, zipfile.ZIP_DEFLATED, compresslevel=9)
    columns = list(dict.fromkeys(chain.from_iterable(logged))) or ["run"]  # an empty table has one column too
    arrays = {}
    for name in columns:
        # None in rows of a kind that has no such column.
        arrays[name] = pyarrow.array([row.get(name) for row in logged])
    # Similar files are stored together: a zip of the reference runs' folders would be twice as large.
    tables = {METRICS: pyarrow.table(arrays)}
    for protocol in sorted({key.protocol for key, _, _ in results}):
        windows = [result.table for key, _, result in results if key.protocol == protocol]
        joined = pyarrow.concat_tables(windows, promote_options="permissive").combine_chunks()
        tables[f"windows-{protocol}.parquet"] = joined
    for name, table in tables.items():
        archive.writestr(zipfile.ZipInfo(name, _DATE), parquet(table, "brotli", 11))


def _add_weights(archive: zipfile.ZipFile, runs: dict[str, Run]) -> dict[str, str]:
    # Write the last weights of each run in bfloat16, and return {run: SHA-256 of its file}.
    import torch
    from safetensors.torch import save

    digests = {}
    for name, run in runs.items():
        content = save({key: tensor.to(torch.bfloat16) for key, tensor in run.load_weights().items()})
        digests[name] = hashlib.sha256(content).hexdigest()
        archive.writestr(zipfile.ZipInfo(f"{name}/{MODEL}", _DATE), content)
    return digests
