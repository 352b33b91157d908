"""Your own files: parquet and JSONL (a row is a document) and plain text (a file is a document), gzipped or not."""

from __future__ import annotations

import glob
import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import IO, Any, cast

from posbench.config import ConfigError, DataConfig, nearest
from posbench.data.sources.base import Source, first_line, joined_articles, no_column, stream
from posbench.machine.files import open_regular

MAX_DOCUMENT_BYTES = 1 << 27  # a document is held in memory as a whole; the longest books are a tenth of this
_ROWS = 64  # of parquet, read at a time
# In which text takes no more room than it has letters, or stands in the dictionary of its row group.
_PLAIN_ENCODINGS = {"PLAIN", "RLE", "BIT_PACKED", "PLAIN_DICTIONARY", "RLE_DICTIONARY"}
_SUFFIXES = (".parquet", ".jsonl", ".ndjson", ".json", ".txt", ".text", ".tokens")  # taken from a folder


class Files(Source):
    """`data.path`, split by a hash of each document, or a path a split, `data.train_path` and so on."""

    def __init__(self, config: DataConfig) -> None:
        super().__init__(config)
        if config.path is not None:
            self.cut = ("test", "validation")
        named = {"train": config.path if config.path is not None else config.train_path}
        named |= {"validation": config.validation_path, "test": config.test_path}
        self._words = {split: words for split, words in named.items() if words is not None}
        self.paths = {split: _found(self.describe(split), words) for split, words in self._words.items()}
        self._refuse_shared_files()

    def describe(self, split: str) -> str:
        field = "data.path" if self.cut else f"data.{split}_path"
        words = self._words.get("train" if self.cut else split)
        return f"{field}={words!r}" if words is not None else f"{field} (not given)"

    def identity(self) -> Any:
        stats = {split: [(str(path), path.stat()) for path in paths] for split, paths in self.paths.items()}
        return {
            split: [[name, stat.st_size, stat.st_mtime_ns, stat.st_ino] for name, stat in files]
            for split, files in stats.items()
        }

    def streams(self) -> dict[str, Iterable[str]]:
        for path in chain.from_iterable(self.paths.values()):
            _check_head(path, self.config.text_column)
        return {split: self._stream(paths) for split, paths in self.paths.items()}

    def _stream(self, paths: list[Path]) -> Iterable[str]:
        groups = groupby(paths, key=lambda path: READERS.get(_kind(path), read_texts))
        texts = chain.from_iterable(read(list(group), self.config.text_column) for read, group in groups)
        return joined_articles(texts) if self.config.articles else texts

    def _refuse_shared_files(self) -> None:
        seen: dict[Path, str] = {}
        for split, paths in self.paths.items():
            for path in paths:
                if path in seen:
                    raise ConfigError(
                        f"{path} is in both {self.describe(seen[path])} and {self.describe(split)}: held-out text must "
                        "not be trained on, so name other files, or give data.path alone to have the documents split"
                    )
                seen[path] = split


def _found(named: str, words: Any) -> list[Path]:
    """The files that the words of one field mean, each once: files, globs and folders, in the order given."""
    listed = [words] if isinstance(words, (str, Path)) else words
    if not isinstance(listed, list) or not listed or not all(isinstance(w, (str, Path)) and str(w) for w in listed):
        raise ConfigError(
            f"{named} is no path: give a file, a glob such as 'books/*.parquet', a folder, or a list of them"
        )
    try:
        return list(dict.fromkeys(chain.from_iterable(_files_of(named, str(word)) for word in listed)))
    except (OSError, RuntimeError, ValueError) as error:  # no permission, no such user, a NUL or 5,000 characters
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{named} cannot be looked up ({first_line(error)}): give the path of a file") from error


def _files_of(named: str, word: str) -> list[Path]:
    path = Path(word).expanduser()
    if path.is_file():
        return [path.resolve()]
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{named} is a pipe or a device, which has no end that could be found: give ordinary files")
    if path.is_dir():
        found = [file for file in path.rglob("[!.]*") if file.is_file() and _kind(file) in _SUFFIXES]
        missing = f"{named} is a folder without text files ({', '.join(_SUFFIXES)}): name the files themselves"
    else:
        found = [file for file in map(Path, glob.glob(str(path), recursive=True)) if file.is_file()]  # noqa: PTH207
        beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        missing = (
            f"{named} does not exist{nearest(path.name, beside)}: give a file, a glob or a folder (from {Path.cwd()})"
        )
    if not found:
        raise ConfigError(missing)
    return sorted(file.resolve() for file in found)


def _kind(path: Path) -> str:
    """The suffix that tells the format, without `.gz`."""
    return (path.with_suffix("") if path.suffix == ".gz" else path).suffix.lower()


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    try:
        with (
            os.fdopen(open_regular(path, os.O_RDONLY), "rb") as raw,
            gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else nullcontext(raw) as file,
        ):
            yield cast(IO[bytes], file)
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path} cannot be read ({first_line(error)}): check the file, or leave it out") from error


def _check_head(path: Path, column: str) -> None:
    """Refuse at once what can be refused without reading it all, so that no long preparation fails at its last file."""
    with _opened(path) as file:
        if _kind(path) == ".parquet":
            _check_parquet(path, column)
            return
        head = file.read(1 << 16)
    _refuse_binary(path, head)
    line, broken, _ = head.partition(b"\n")
    if broken and line.strip() and READERS.get(_kind(path)) is read_json_lines:
        _text_of(f"line 1 of {path}", _decoded(path, line), column)


def _refuse_binary(path: Path, block: bytes) -> None:
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


def read_texts(paths: list[Path], column: str) -> Iterable[str]:
    """Each file as one document."""
    return stream(_read_text, paths)


def read_json_lines(paths: list[Path], column: str) -> Iterable[str]:
    """The text column of each line's JSON object; lines where it is null are left out."""
    return stream(partial(_read_json_lines, column=column), paths)


def read_parquet(paths: list[Path], column: str) -> Iterator[str]:
    """The text column, some rows at a time; rows where it is null are left out.

    A few bytes of a file can stand for more text than there is memory: a text that many rows share is held once, and no
    more rows are unpacked at a time than fit.
    """
    import pyarrow.parquet as pq

    for path in paths:
        try:
            with os.fdopen(open_regular(path, os.O_RDONLY), "rb") as opened:
                metadata = pq.read_metadata(opened)
                chunks = [_chunk(metadata.row_group(number), column) for number in range(metadata.num_row_groups)]
                is_plain = all(set(chunk.encodings) <= _PLAIN_ENCODINGS for chunk in chunks)
                file = pq.ParquetFile(opened, metadata=metadata, read_dictionary=[column] if is_plain else None)
                for number, chunk in enumerate(chunks):
                    size = chunk.total_uncompressed_size
                    if size > max(1, chunk.num_values) * MAX_DOCUMENT_BYTES:
                        raise _too_long(path, column)
                    rows = _ROWS if is_plain and size <= MAX_DOCUMENT_BYTES else 1
                    for batch in file.iter_batches(rows, row_groups=[number], columns=[column]):
                        yield from _texts_of(batch.column(0), path, column)
        except ConfigError:
            raise
        except Exception as error:  # Arrow's own kinds
            raise ConfigError(
                f"{path} breaks off or is damaged ({first_line(error)}): write the file again, or leave it out"
            ) from error


def _chunk(group: Any, column: str) -> Any:
    """The metadata of a column in a row group of parquet."""
    (chunk,) = [
        group.column(number) for number in range(group.num_columns) if group.column(number).path_in_schema == column
    ]
    return chunk


def _texts_of(rows: Any, path: Path, column: str) -> Iterator[str]:
    """The texts of an array of Arrow's, one at a time: many rows may share one in its dictionary."""
    import pyarrow as pa
    import pyarrow.compute as pc

    held = rows.dictionary if pa.types.is_dictionary(rows.type) else rows
    if (pc.max(pc.binary_length(held)).as_py() or 0) > MAX_DOCUMENT_BYTES:
        raise _too_long(path, column)
    yield from (text.as_py() for text in rows if text.is_valid)


def _too_long(path: Path, column: str) -> ConfigError:
    return ConfigError(
        f"{path}: a row of {column!r} is longer than {MAX_DOCUMENT_BYTES >> 20} MiB, and a row is one document: cut it "
        "into documents"
    )


READERS: dict[str, Callable[[list[Path], str], Iterable[str]]] = {
    ".parquet": read_parquet,
    ".jsonl": read_json_lines,
    ".ndjson": read_json_lines,
    ".json": read_json_lines,
}


def _read_text(path: Path) -> Iterator[str]:
    with _opened(path) as file:
        data = file.read(MAX_DOCUMENT_BYTES + 1)
    if len(data) > MAX_DOCUMENT_BYTES:
        raise ConfigError(
            f"{path} is longer than {MAX_DOCUMENT_BYTES >> 20} MiB, and a text file is one document: "
            "cut it into documents, a file each, or a line each of a JSONL file"
        )
    _refuse_binary(path, data)
    yield _decoded(path, data)


def _read_json_lines(path: Path, column: str) -> Iterator[str]:
    offset = 0
    with _opened(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_DOCUMENT_BYTES + 1), b""), start=1):
            where = f"line {number:,} of {path}"
            if len(line) > MAX_DOCUMENT_BYTES:
                raise ConfigError(
                    f"{where} is longer than {MAX_DOCUMENT_BYTES >> 20} MiB, and a line is one document: "
                    "cut it into documents"
                )
            if line.strip():
                text = _text_of(where, _decoded(path, line, offset), column)
                if text is not None:
                    yield text
            offset += len(line)


def _text_of(where: str, line: str, column: str) -> str | None:
    try:
        row = json.loads(line.removeprefix("\ufeff"))  # Windows marks UTF-8 so
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{where} is no JSON ({first_line(error)}): a JSONL file holds one JSON object a line"
        ) from error
    if not isinstance(row, dict):
        raise ConfigError(
            f'{where} is no JSON object but {type(row).__name__}: a JSONL file holds lines like {{"{column}": "..."}}'
        )
    if column not in row:
        raise no_column(where, column, row)
    text = row[column]
    if text is not None and not isinstance(text, str):
        raise ConfigError(
            f"{where}: {column!r} holds {type(text).__name__}, not text; set data.text_column to the one that does"
        )
    try:
        (text or "").encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{where} holds half a surrogate pair ({error.object[error.start]!a}), which is no text: mend the line"
        ) from error
    return text


def _check_parquet(path: Path, column: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        schema = pq.read_schema(path)
    except pa.ArrowException as error:
        raise ConfigError(
            f"{path} is no parquet file, or a damaged one ({first_line(error)}): write it again, or leave it out"
        ) from error
    if column not in schema.names:
        raise no_column(str(path), column, schema.names)
    kind = schema.field(column).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        raise ConfigError(f"{path}: column {column!r} holds {kind}, not text; set data.text_column to one that does")
