"""`posbench pack`: one experiment's finished runs written as a few files (`posbench.runs.packed` says which).

Every number stays as the run folders hold it: the pack is read back and compared with them before it is published.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posbench.config import ConfigError, check_name
from posbench.machine.files import folder_beside, publish_folder, sealed, write_bytes, write_json
from posbench.runs.finding import UNREADABLE, find_runs, state_of
from posbench.runs.manifest import FINISHED
from posbench.runs.ngrams import NgramLosses, ngrams_of, to_mapping
from posbench.runs.packed import KEY, METRICS, NGRAMS, PACK_FORMAT, PLACE, READINGS, RUNS, Key, Pack, digest
from posbench.runs.packed_run import PackedRun
from posbench.runs.readings import Result
from posbench.runs.run import PACK, Run

if TYPE_CHECKING:
    import pyarrow

Notice = Callable[[str], object]
Rows = list[dict[str, Any]]
_LEVEL = 19  # of zstd: as small as it gets in a second


@dataclass
class _Windows:
    """The windows file of a protocol, while it is put together."""

    name: str
    types: dict[str, Any] = field(default_factory=dict)
    tables: list[pyarrow.Table] = field(default_factory=list)

    def fits(self, table: pyarrow.Table) -> bool:
        """Whether the columns that it shares with `table` are of the same types."""
        return all(self.types.get(each.name, each.type) == each.type for each in table.schema)


def pack(experiment: str | Path, output: str | Path, notice: Notice, without: Collection[str] = ()) -> list[Path]:
    """Write the finished runs of the experiment's folder to the folder `output`, and return the files.

    Arguments: notice, is told which runs and results are left out, and why; without, protocols to leave out.
    Raises: ConfigError where `output` holds anything, or there is no finished run, or runs lie elsewhere than in
    `experiment/<scheme>/seed=<n>`, or none has results of a protocol in `without`.
    """
    folder, final = Path(experiment), Path(output)
    _check_output(folder, final)
    runs, found = _packable(folder, notice)
    if not runs:
        raise ConfigError(f"{folder} contains no finished run: train one first (posbench train scheme=vo_rope)")
    _check_without(without, found)
    results = {key: [each for each in of_run if each.reading.protocol not in without] for key, of_run in found.items()}
    with folder_beside(final) as beside:
        logged = {key: _logged(run, notice) for key, run in runs.items()}
        _write_runs(beside, runs)
        _write_metrics(beside, logged)
        _write_results(beside, results)
        _write_ngrams(beside, runs, notice)
        content = {"format": PACK_FORMAT, "experiment": folder.resolve().name, "runs": [_name(key) for key in runs]}
        files = {file.name: _size_and_sum(file) for file in sorted(beside.iterdir())}
        write_json(beside / PACK, sealed({**content, "files": files}))
        _check(Pack(beside), runs, results, logged)
        publish_folder(beside, final)
    return sorted(final.iterdir())


def _check_output(folder: Path, final: Path) -> None:
    if not final.name:
        raise ConfigError(f"{final} cannot be replaced as a whole: give a folder in it, such as {final / 'packed'}")
    try:
        is_free = not final.exists() or (final.is_dir() and not any(final.iterdir()))
    except OSError as error:
        raise ConfigError(f"{final} cannot be read ({error.strerror or error}): give another folder") from error
    if not is_free:
        raise ConfigError(f"{final} is not an empty folder: give one that is empty or does not exist yet")
    if final.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(f"{final} is inside the experiment that it would contain: give a folder outside {folder}")


def _check_without(without: Collection[str], results: Mapping[Key, Sequence[Result]]) -> None:
    """Raises: ConfigError for a protocol without results, and for the one that every report needs."""
    if "validation" in without:
        raise ConfigError("--without validation: every report needs these results, so they stay")
    there = {each.reading.protocol for of_run in results.values() for each in of_run}
    if unknown := sorted(set(without) - there):
        raise ConfigError(
            f"--without {','.join(unknown)}: the runs have no such results; they have {', '.join(sorted(there))}"
        )


def _packable(folder: Path, notice: Notice) -> tuple[dict[Key, Run], dict[Key, list[Result]]]:
    """The finished runs by scheme and seed, sorted, and their results.

    Raises: ConfigError for one that lies in another place.
    """
    runs, results = {}, {}
    for run in find_runs(folder):
        state, why = state_of(run), ""
        try:
            manifest = run.manifest
            _ = run.config
            of_run = _results(run, notice) if state == FINISHED else []
        except ConfigError as error:
            state, why = UNREADABLE, f" ({error})"
        if state != FINISHED:
            notice(f"{run.name} is {state}: skipped{why}")
            continue
        key = manifest.scheme, manifest.seed
        if run.path != folder / _name(key):
            raise ConfigError(
                f"{run.path} is not {folder / _name(key)}: give the folder of one experiment, with its runs in folders "
                "<scheme>/seed=<n> of their own names"
            )
        check_name("scheme", manifest.scheme)
        runs[key], results[key] = run, of_run
    return dict(sorted(runs.items())), results


def _results(run: Run, notice: Notice) -> list[Result]:
    results, damaged = run.results()
    for each in damaged:
        notice(f"{each}. It is left out")
    return results


def _logged(run: Run, notice: Notice) -> Rows:
    try:
        return run.logged
    except ConfigError as error:
        notice(f"{error}. The curve of {run.name} is left out")
        return []


def _write_runs(folder: Path, runs: Mapping[Key, Run]) -> None:
    rows = []
    names: dict[bytes, str] = {}  # tokenizer -> its file
    for (scheme, seed), run in runs.items():
        manifest, config = (run.content(name).decode() for name in ("run.json", "config.yaml"))
        tokenizer = _tokenizer(run)
        name = None
        if tokenizer is not None:
            name = names.setdefault(tokenizer, f"tokenizer-{len(names) + 1}.json" if names else "tokenizer.json")
            write_bytes(folder / name, tokenizer)
        rows.append({"scheme": scheme, "seed": seed, "manifest": manifest, "config": config, "tokenizer": name})
    _write(folder / RUNS, _table(rows))


def _tokenizer(run: Run) -> bytes | None:
    try:
        return run.content("tokenizer.json")
    except FileNotFoundError:
        return None


def _write_metrics(folder: Path, logged: Mapping[Key, Rows]) -> None:
    rows = [{"scheme": scheme, "seed": seed, **row} for (scheme, seed), of_run in logged.items() for row in of_run]
    _write(folder / METRICS, _table(rows or [dict.fromkeys(KEY)]))


def _write_results(folder: Path, results: Mapping[Key, Sequence[Result]]) -> None:
    """All windows by protocol, and a row for each result that says where they are."""
    files: dict[str, list[_Windows]] = {}
    rows = []
    ordered = sorted((result.reading, key, result) for key, of_run in results.items() for result in of_run)
    for reading, (scheme, seed), result in ordered:
        table = result.table.replace_schema_metadata(None)
        file = _file_for(table, reading.protocol, files)
        under = " ".join(reading.under)
        place = {"scheme": scheme, "seed": seed, "length": reading.length, "under": under}
        file.tables.append(_placed(table, place))
        stored = {"file": file.name, "columns": table.column_names, "windows": len(table), "sha256": digest(table)}
        header = json.dumps(result.header)
        rows.append({**dict.fromkeys(KEY), **place, "protocol": reading.protocol, **stored, "header": header})
    _write(folder / READINGS, _table(rows))
    for file in (file for of_protocol in files.values() for file in of_protocol):
        _write(folder / file.name, _joined(file.tables))


def _write_ngrams(folder: Path, runs: Mapping[Key, Run], notice: Notice) -> None:
    """The losses of n-gram models that lie beside any of the runs, each once."""
    records: dict[str, NgramLosses] = {}
    faults: dict[str, None] = {}
    for run in runs.values():
        of_run, damaged = ngrams_of(run)
        records.update({each.task.key: each for each in of_run})
        faults.update(dict.fromkeys(damaged))
    for fault in faults:
        notice(f"{fault}. It is left out")
    if records:
        write_json(folder / NGRAMS, {key: to_mapping(records[key]) for key in sorted(records)})


def _file_for(table: pyarrow.Table, protocol: str, files: dict[str, list[_Windows]]) -> _Windows:
    """The file of the protocol that these windows go to: a further one where a column is of another type."""
    of_protocol = files.setdefault(protocol, [])
    fitting = [file for file in of_protocol if file.fits(table)]
    if not fitting:
        number = f"-{len(of_protocol) + 1}" if of_protocol else ""
        fitting = [_Windows(f"windows-{protocol}{number}.parquet")]
        of_protocol += fitting
    fitting[0].types.update({each.name: each.type for each in table.schema})
    return fitting[0]


def _placed(table: pyarrow.Table, place: Mapping[str, Any]) -> pyarrow.Table:
    """Windows with the columns that say whose they are, before their own."""
    import pyarrow as pa

    for name in {*PLACE} & {*table.column_names}:
        raise ConfigError(f"windows with a column {name!r} cannot be packed: the pack has one of that name")
    types = {"scheme": pa.string(), "seed": pa.int64(), "length": pa.int64(), "under": pa.string()}
    columns = {name: pa.repeat(pa.scalar(place[name], types[name]), len(table)) for name in PLACE}
    return pa.table({**columns, **{name: table[name] for name in table.column_names}})


def _joined(tables: Sequence[pyarrow.Table]) -> pyarrow.Table:
    import pyarrow as pa

    return pa.concat_tables(tables, promote_options="default").combine_chunks()


def _table(rows: Sequence[Mapping[str, Any]]) -> pyarrow.Table:
    """Rows as a table with every column that any of them has. Raises: ConfigError for values of several types."""
    import pyarrow as pa

    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {}
    for name in names:
        try:
            columns[name] = pa.array([row.get(name) for row in rows])
        except (pa.ArrowException, OverflowError) as error:
            raise ConfigError(f"the values of {name!r} cannot be packed in one column: {error}") from error
    return pa.table(columns)


def _write(file: Path, table: pyarrow.Table) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    floats = [each.name for each in table.schema if pa.types.is_floating(each.type)]
    buffer = io.BytesIO()
    pa.parquet.write_table(
        table,
        buffer,
        compression="zstd",
        compression_level=_LEVEL,
        use_dictionary=[name for name in table.column_names if name not in floats],
        use_byte_stream_split=floats,
        row_group_size=1 << 20,
    )
    write_bytes(file, buffer.getvalue())


def _check(
    packed: Pack, runs: Mapping[Key, Run], results: Mapping[Key, Sequence[Result]], logged: Mapping[Key, Rows]
) -> None:
    """Raises: ConfigError where what was written does not say what the run folders say."""
    for key, run in runs.items():
        again = PackedRun(packed.folder / _name(key), packed)
        packed_results, damaged = again.results()
        same = (
            again.manifest == run.manifest
            and again.config == run.config
            and json.dumps(again.logged, sort_keys=True) == json.dumps(logged[key], sort_keys=True)
            and not damaged
            and list(map(_facts, packed_results)) == list(map(_facts, results[key]))
            and ngrams_of(again)[0] == ngrams_of(run)[0]
        )
        if not same:
            raise ConfigError(
                f"{run.name} is different when read back from the pack: please report it, with this run folder"
            )


def _facts(result: Result) -> tuple[Any, ...]:
    """All that a result says."""
    return result.reading, json.dumps(result.header), result.is_bound, digest(result.table)


def _name(key: Key) -> str:
    return f"{key[0]}/seed={key[1]}"


def _size_and_sum(file: Path) -> dict[str, Any]:
    content = file.read_bytes()
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
