"""The formats of your own files: text, JSON lines, parquet, Arrow and CSV, each of them compressed or not."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

from posbench.config import ConfigError, DataConfig
from posbench.data.sources.base import first_line, no_column, stream

_ROWS = 1024  # of parquet, read at a time
_LONGEST_FIELD = 1 << 30  # characters of CSV: a field is a document, and the module's own limit is 128 KiB
# Text files that are taken from a folder, each a document. A file that is named is read whatever its suffix.
_PROSE = ".txt .text .tokens .md .markdown .rst .tex .org .adoc .html .htm"
_SOURCE = (
    ".py .pyi .c .h .cc .cpp .hpp .cu .rs .go .java .kt .scala .cs .swift .js .jsx .ts .tsx .rb .php .pl .lua .jl "
    ".r .hs .ml .sh .sql"
)
TEXTS = tuple(f"{_PROSE} {_SOURCE}".split())


def _zstandard(raw: IO[bytes]) -> IO[bytes]:
    import pyarrow as pa

    return cast(IO[bytes], io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), "zstd")))


COMPRESSIONS: dict[str, Callable[[IO[bytes]], Any]] = {
    ".gz": lambda raw: gzip.GzipFile(fileobj=raw),
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
    ".zst": _zstandard,
}


def kind_of(path: Path) -> str:
    """The suffix that tells the format, without that of a compression."""
    return (path.with_suffix("") if path.suffix.lower() in COMPRESSIONS else path).suffix.lower()


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    try:
        with path.open("rb") as raw:
            decompress = COMPRESSIONS.get(path.suffix.lower())
            if decompress is None:
                yield raw
            else:
                with decompress(raw) as file:
                    yield cast(IO[bytes], file)
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise ConfigError(f"{path} cannot be read ({first_line(error)}): check the file, or leave it out") from error


def check_head(path: Path, column: str) -> None:
    """Refuse at once what can be refused without reading it all, so that no long preparation fails at its last file."""
    if kind_of(path) == ".parquet":
        with _opened(path):
            _check_parquet(path, column)
        return
    if kind_of(path) == ".arrow":
        with _arrow(path, column):
            return
    with _opened(path) as file:
        head = file.read(1 << 16)
    refuse_binary(path, head)
    line, broken, _ = head.partition(b"\n")
    if broken and line.strip() and READERS.get(kind_of(path)) is read_json_lines:
        _text_of(f"line 1 of {path}", _decoded(path, line), column)


def refuse_binary(path: Path, block: bytes) -> None:
    """Raises: ConfigError for what is UTF-16, or no text at all."""
    if block[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise ConfigError(
            f"{path} begins like UTF-16 (byte 0 is 0x{block[0]:02x}): convert it, as in iconv -f UTF-16 -t UTF-8"
        )
    if (place := block.find(b"\0")) >= 0:
        raise ConfigError(
            f"{path} is binary, not text (byte {place:,} is zero): give UTF-8 text, JSONL or parquet, "
            "with the suffix .txt, .jsonl or .parquet"
        )


def _decoded(path: Path, data: bytes, offset: int = 0) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8: byte {offset + error.start:,} is 0x{data[error.start]:02x} ({error.reason}); "
            "convert it, as in iconv -f LATIN1 -t UTF-8"
        ) from error


def read_texts(paths: list[Path], config: DataConfig) -> Iterable[str]:
    """Each file as one document, or cut into documents of about `config.cut_bytes`."""
    return stream(_read_text if config.cut_bytes is None else partial(_read_cut, size=config.cut_bytes), paths)


def read_json_lines(paths: list[Path], config: DataConfig) -> Iterable[str]:
    """The text column of each line's JSON object; lines where it is null are skipped."""
    return stream(partial(_read_json_lines, column=config.text_column), paths)


def read_rows(paths: list[Path], config: DataConfig) -> Iterable[str]:
    """The text column of CSV and TSV files with a line of names."""
    return stream(partial(_read_rows, column=config.text_column), paths)


def read_arrow(paths: list[Path], config: DataConfig) -> Iterator[str]:
    """The text column of Arrow files, such as those of `datasets.save_to_disk`; rows where it is null are skipped."""
    for path in paths:
        with _arrow(path, config.text_column) as batches:
            for batch in batches:
                texts = batch.column(config.text_column)
                texts.validate(full=True)  # Arrow itself follows the offsets of a file wherever they lead
                yield from (text.as_py() for text in texts if text.is_valid)


def read_parquet(paths: list[Path], config: DataConfig) -> Iterator[str]:
    """The text column, some rows at a time; rows where it is null are skipped."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for path in paths:
        try:
            for batch in pq.ParquetFile(path).iter_batches(_ROWS, columns=[config.text_column]):
                yield from (text.as_py() for text in batch.column(0) if text.is_valid)
        except (OSError, pa.ArrowException) as error:
            raise _damaged(path, error) from error


READERS: dict[str, Callable[[list[Path], DataConfig], Iterable[str]]] = {
    ".parquet": read_parquet,
    ".jsonl": read_json_lines,
    ".ndjson": read_json_lines,
    ".json": read_json_lines,
    ".arrow": read_arrow,
    ".csv": read_rows,
    ".tsv": read_rows,
}


def _damaged(path: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{path} is cut off or damaged ({first_line(error)}): write the file again, or leave it out")


@contextmanager
def _arrow(path: Path, column: str) -> Iterator[Iterator[Any]]:
    """The record batches of an Arrow file of either form, mapped and not read. Raises: ConfigError."""
    import pyarrow as pa

    try:
        with pa.memory_map(str(path)) as mapped:
            is_file = mapped.read(6) == b"ARROW1"
            mapped.seek(0)
            reader = pa.ipc.open_file(mapped) if is_file else pa.ipc.open_stream(mapped)
            _check_column(path, column, reader.schema)
            yield (reader.get_batch(n) for n in range(reader.num_record_batches)) if is_file else iter(reader)
    except (OSError, pa.ArrowException) as error:
        raise _damaged(path, error) from error


def _read_text(path: Path) -> Iterator[str]:
    with _opened(path) as file:
        data = file.read()
    refuse_binary(path, data)
    yield _decoded(path, data)


def _read_cut(path: Path, size: int) -> Iterator[str]:
    """Documents of `size` bytes or a little more, which end behind a blank line; at twice the size behind any line.

    A line longer than that is cut too, between characters.
    """
    lines: list[str] = []
    length = 0
    with _opened(path) as file:
        try:
            for line in iter(partial(io.TextIOWrapper(file, "utf-8", newline="").readline, size), ""):
                lines.append(line)
                length += len(line.encode())
                if length >= size and (not line.strip() or length >= 2 * size):
                    yield "".join(lines)
                    lines, length = [], 0
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{path} is not UTF-8 ({error.reason}): convert it, as in iconv -f LATIN1 -t UTF-8"
            ) from error
    yield "".join(lines)


def _read_rows(path: Path, column: str) -> Iterator[str]:
    csv.field_size_limit(_LONGEST_FIELD)
    try:
        with _opened(path) as file:
            lines = io.TextIOWrapper(file, "utf-8-sig", newline="")
            rows = csv.DictReader(lines, delimiter="\t" if kind_of(path) == ".tsv" else ",")
            if column not in (rows.fieldnames or ()):
                raise no_column(str(path), column, rows.fieldnames or ())
            yield from (row[column] for row in rows if row[column])
    except (csv.Error, UnicodeDecodeError) as error:
        raise _damaged(path, error) from error


def _read_json_lines(path: Path, column: str) -> Iterator[str]:
    offset = 0
    with _opened(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                text = _text_of(f"line {number:,} of {path}", _decoded(path, line, offset), column)
                if text is not None:
                    yield text
            offset += len(line)


def _text_of(where: str, line: str, column: str) -> str | None:
    try:
        row = json.loads(line.removeprefix("\ufeff"))  # Windows marks UTF-8 so
    except ValueError as error:
        raise ConfigError(
            f"{where} is not JSON ({first_line(error)}): a JSONL file has one JSON object per line"
        ) from error
    if not isinstance(row, dict):
        raise ConfigError(
            f'{where} is not a JSON object but {type(row).__name__}: a JSONL file has lines like {{"{column}": "..."}}'
        )
    if column not in row:
        raise no_column(where, column, row)
    text = row[column]
    if text is not None and not isinstance(text, str):
        raise ConfigError(
            f"{where}: {column!r} holds {type(text).__name__}, not text; set data.text_column to the column of text"
        )
    try:
        (text or "").encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{where} contains half a surrogate pair ({error.object[error.start]!a}), which is not text: fix the line"
        ) from error
    return text


def _check_parquet(path: Path, column: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        schema = pq.read_schema(path)
    except pa.ArrowException as error:
        raise ConfigError(
            f"{path} is not a parquet file, or is damaged ({first_line(error)}): write it again, or leave it out"
        ) from error
    _check_column(path, column, schema)


def _check_column(path: Path, column: str, schema: Any) -> None:
    import pyarrow as pa

    if column not in schema.names:
        raise no_column(str(path), column, schema.names)
    kind = schema.field(column).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        raise ConfigError(f"{path}: column {column!r} holds {kind}, not text; set data.text_column to a column of text")
