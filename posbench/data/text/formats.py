"""Read the texts in a file one at a time: text, JSON, CSV, TSV, parquet and Arrow by suffix, also compressed."""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Any, TextIO, cast

from posbench.config import ConfigError

# Text files to read from a folder, each a document. A file that the user names is read whatever its suffix.
_PROSE = ".txt .text .tokens .md .markdown .rst .tex .org .adoc .html .htm"
_CODE = (
    ".py .pyi .c .h .cc .cpp .hpp .cu .rs .go .java .kt .scala .cs .swift .js .jsx .ts .tsx .rb .php .pl .lua .jl "
    ".r .hs .ml .sh .sql"
)
TEXT_SUFFIXES = f"{_PROSE} {_CODE}".split()
_JSON_LINES = (".jsonl", ".jsonlines", ".ndjson", ".json")
_CSV = (".csv", ".tsv")
_PARQUET = (".parquet", ".pq")
_TABLES = (*_PARQUET, ".arrow", ".feather")
ROW_SUFFIXES = (*_JSON_LINES, *_CSV, *_TABLES)
# First bytes of archives (zip, 7z, rar), office documents (zip, OLE, RTF), PDFs and compressed files of another suffix
# (gz, xz, zst, bz2, lz4, compress)
_NOT_TEXT = (
    *(b"PK\3\4", b"7z\xbc\xaf", b"Rar!", b"\xd0\xcf\x11\xe0", b"{\\rtf", b"%PDF-"),
    *(b"\x1f\x8b", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"BZh91AY&SY", b"\x04\x22\x4d\x18", b"\x1f\x9d"),
)
# Byte order marks, which Windows adds, and the encodings that they tell. UTF-32's begins with UTF-16's.
_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
    codecs.BOM_UTF8: "utf-8-sig",
}
_ROWS = 256  # rows of parquet to read at a time, since a row may be a book


def read_texts(path: Path, column: str, cut_bytes: int | None) -> Iterator[Any]:
    """Yield the texts of a file: the field `column` of each of its rows, or all of it if it is a text file.

    Arguments: cut_bytes, the size in bytes that a text file is cut into, or None to yield it whole.
    Raises: ConfigError, or the errors of Python and Arrow for damaged files.
    """
    suffix = suffix_of(path)
    _check_start(path)
    # Arrow maps a file into memory, and cannot map a compressed one.
    if suffix in _TABLES and path.suffix.lower() in _COMPRESSED:
        raise ConfigError(f"{path} is a compressed table: decompress it (its columns are compressed already)")
    if suffix in _TABLES:
        yield from _table_texts(path, column)
        return
    with io.TextIOWrapper(_opened(path), _encoding(path), newline="") as file:  # line ends stay as they are
        lines = (line.removeprefix("\ufeff") for line in file)  # concatenated files have marks inside, too
        if suffix in _JSON_LINES:
            yield from _json_texts(path, column, lines)
        elif suffix in _CSV:
            yield from _csv_texts(path, column, lines)
        else:
            texts = [file.read()] if cut_bytes is None else _cut(file, cut_bytes)
            for text in texts:
                if "\0" in text:
                    raise ConfigError(f"{path} has NUL bytes, so it is not UTF-8 text: leave it out, or convert it")
                yield text


def _value(row: Any, column: str, origin: str) -> Any:
    """Return `row[column]`. Raises: ConfigError if there is no such field; its message begins with `origin`."""
    if not isinstance(row, dict):
        raise ConfigError(f"{origin} holds {type(row).__name__}, not an object with a field {column!r}")
    if column not in row:
        raise ConfigError(
            f"{origin} has no field {column!r}: set data.text_column to one of {', '.join(row) or 'none'}"
        )
    return row[column]


def _json_texts(path: Path, column: str, lines: Iterator[str]) -> Iterator[Any]:
    # One object per line, or one array, which is held in memory.
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            is_array = line.lstrip()[0] == "["  # which is the rest of the file
            rows = json.loads("".join([line, *lines])) if is_array else [json.loads(line)]
        except ValueError as error:
            raise ConfigError(
                f"{path}, line {number}, is not JSON ({error}): write one object a line, or one array of objects"
            ) from error
        for row in rows:
            yield _value(row, column, f"{path}, line {number},")


def _csv_texts(path: Path, column: str, lines: Iterator[str]) -> Iterator[str]:
    # The default limit of a field, 128 kB, is less than some documents.
    csv.field_size_limit(2**31 - 1)
    first = next(lines, "")
    is_csv = suffix_of(path) == ".csv"
    delimiter = "," if is_csv else "\t"
    # In TSV, quotes are plain text if the header has none.
    has_quotes = is_csv or first.startswith('"')
    rows = csv.reader(
        chain([first], lines), delimiter=delimiter, quoting=csv.QUOTE_MINIMAL if has_quotes else csv.QUOTE_NONE
    )
    header = next(rows, [])
    # Called for its error if the column is missing.
    _value(dict.fromkeys(header), column, str(path))
    for row in filter(None, rows):
        if len(row) != len(header):
            raise ConfigError(
                f"{path}, line {rows.line_num}, has {len(row)} fields, but the first line has {len(header)}: put text "
                "with commas or line breaks in quotes (.csv), or write JSON lines (.tsv has no quotes)"
            )
        yield row[header.index(column)]


def _table_texts(path: Path, column: str) -> Iterator[Any]:
    # A part of the file is in memory at a time.
    import pyarrow
    from pyarrow import ipc, parquet

    with pyarrow.memory_map(str(path)) as file:
        batches: Any
        if suffix_of(path) in _PARQUET:
            table = parquet.ParquetFile(file)
            names, batches = table.schema_arrow.names, table.iter_batches(_ROWS, columns=[column])
        elif file.read(6) == b"ARROW1":
            table = ipc.open_file(file)
            names, batches = table.schema.names, map(table.get_batch, range(table.num_record_batches))
        else:
            file.seek(0)
            batches = ipc.open_stream(file)
            names = batches.schema.names
        # Called for its error if the column is missing.
        _value(dict.fromkeys(names), column, str(path))
        for batch in batches:
            yield from (value.as_py() for value in batch.column(column))


def _zstandard(path: Path) -> Any:
    import pyarrow

    return pyarrow.input_stream(path, compression="zstd")


_COMPRESSED: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _zstandard}


def _opened(path: Path) -> IO[bytes]:
    return cast(IO[bytes], _COMPRESSED.get(path.suffix.lower(), partial(open, mode="rb"))(path))


def _encoding(path: Path) -> str:
    with _opened(path) as file:
        start = file.read(4)
    for mark, encoding in _MARKS.items():
        if start.startswith(mark):
            return encoding
    return "utf-8"


def _check_start(path: Path) -> None:
    # All of these can look like text.
    with _opened(path) as file:
        start = file.read(512)
    # A tar file has its mark at byte 257.
    if start.startswith(_NOT_TEXT) or start[257:262] == b"ustar":
        raise ConfigError(
            f"{path} is an archive, an office document or a PDF, not text: unpack it, or convert it to text"
        )
    if start.startswith(b"version https://git-lfs"):
        raise ConfigError(f"{path} is only a Git LFS pointer: fetch the file with `git lfs pull`")


def suffix_of(path: Path) -> str:
    """Return the lower-case suffix that tells a file's format, such as `.jsonl` for `a.jsonl.gz`."""
    if path.suffix.lower() in _COMPRESSED:
        path = path.with_suffix("")
    return path.suffix.lower()


def _cut(file: TextIO, size: int) -> Iterator[str]:
    # Cut at the first blank line after `size` bytes, or at any line after twice the size.
    lines: list[str] = []
    length = 0
    # A line longer than `size` is cut too, between characters.
    for line in iter(partial(file.readline, size), ""):
        lines.append(line)
        length += len(line.encode())
        if length >= size and (not line.strip() or length >= 2 * size):
            yield "".join(lines)
            lines, length = [], 0
    yield "".join(lines)
