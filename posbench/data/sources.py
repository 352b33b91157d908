"""Where text comes from: your own files and public data sets of the Hugging Face hub, and how documents are split.

A source yields whole documents, split by split. Files are read one document at a time; `docs/your-text.md` lists which
kinds are read and which are refused. To add a source, write a class, name it in `posbench.data.preparation.SOURCES`,
and add a YAML file to `conf/data/`.
"""

from __future__ import annotations

import bz2
import csv
import glob
import gzip
import io
import json
import logging
import lzma
import re
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import IO, Any, TextIO, TypeVar, cast

from posbench.config import ConfigError, DataConfig, nearest
from posbench.data.tokenizer import check_hub

Document = TypeVar("Document")
# Text files that are taken from a folder, each a document. A file that is named is read whatever its suffix.
_PROSE = ".txt .text .tokens .md .markdown .rst .tex .org .adoc .html .htm"
_CODE = (
    ".py .pyi .c .h .cc .cpp .hpp .cu .rs .go .java .kt .scala .cs .swift .js .jsx .ts .tsx .rb .php .pl .lua .jl "
    ".r .hs .ml .sh .sql"
)
_TEXT = f"{_PROSE} {_CODE}".split()
_JSON_LINES = (".jsonl", ".ndjson", ".json")
_CSV = (".csv", ".tsv")
_TABLES = (".parquet", ".arrow")
_ROW_SUFFIXES = (*_JSON_LINES, *_CSV, *_TABLES)
# Descriptions of a data set, by the names that `datasets` and its hub give them
_METADATA = {"state.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json"}
# How archives (zip, 7z, rar), office documents (zip), PDFs and compressed files of another suffix (gz, xz, zst) begin
_NOT_TEXT = (b"PK\3\4", b"7z\xbc\xaf", b"Rar!", b"%PDF-", b"\x1f\x8b", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")
_ROWS = 256  # of parquet, read at a time: a row may be a book
_OFFLINE = "work offline with data=stdlib (text of this Python) or data=files data.path=... (your own)"
# A title line of WikiText, ` = Title = `. Sections have more signs: ` = = Plot = = `.
_ARTICLE = re.compile(r" = (?!= ).+(?<! =) = ")


def draw_of(document: bytes) -> float:
    """Return the number from 0 to 1 that decides the split of a document: a hash of its text."""
    return int.from_bytes(sha256(document).digest()[:8], "big") / 2**64


def split_of(document: bytes, fractions: dict[str, float]) -> str:
    """The split of a document (UTF-8): each of `fractions` gets about its part of all documents, train the rest.

    A hash of the text decides, so the split is the same on every machine and in any order of reading, and copies of a
    document fall into one split. Example: `split_of(text.encode(), {"validation": 0.05, "test": 0.1})`.
    """
    draw = draw_of(document)
    for name, fraction in fractions.items():
        if draw < fraction:
            return name
        draw -= fraction
    return "train"


class Splitter:
    """Assign documents to splits by `split_of`, and move the borders if a split stays empty.

    For a text for tuning, `tuning_fraction` of the train documents become validation, and no others are used. Draws are
    held only until every split has a document, so long texts need no more memory than short ones.
    """

    def __init__(self, fractions: dict[str, float], tuning_fraction: float = 0.0) -> None:
        self.fractions = {name: fraction for name, fraction in fractions.items() if fraction}
        self.tuning = Splitter({"validation": tuning_fraction}) if tuning_fraction else None
        self._restart()

    def _restart(self) -> None:
        self._empty = {"train", *self.fractions}
        self._draws: set[float] = set()
        if self.tuning:
            self.tuning._restart()

    def split(self, document: bytes) -> str | None:
        """Return the split of a document (UTF-8), or None if a text for tuning leaves it out."""
        split = split_of(document, self.fractions)
        if self._empty:
            self._empty.discard(split)
            self._draws.add(draw_of(document))
        if self.tuning is None:
            return split
        return self.tuning.split(b"tuning\0" + document) if split == "train" else None

    def fill(self) -> set[str]:
        """Change the fractions so that the documents with the nearest draws fall into the splits that are empty.

        Call this after all documents were split, and if it changed anything, split all of them again.
        Returns: the splits that were empty and will not be; a split needs a document that no other split has.
        """
        empty, draws = self._empty, sorted(self._draws)
        if not empty or len(draws) <= len(self.fractions):
            return self.tuning.fill() if self.tuning else set()
        start, border, nominal = 0, 0.0, 0.0  # the last border, as a number of draws, as moved and as configured
        for later, (name, fraction) in zip(range(-len(self.fractions), 0), [*self.fractions.items()], strict=True):
            nominal += fraction
            end = bisect_left(draws, nominal)
            if end <= start:
                end = start + max(1, round(fraction * len(draws)))
            start = min(end, len(draws) + later)  # each later split needs a document too
            middle = (draws[start - 1] + draws[start]) / 2
            self.fractions[name], border = middle - border, middle
        self._restart()
        return empty


def split_groups(config: DataConfig, documents: Iterable[tuple[bytes, Document]]) -> dict[str, list[Document]]:
    """Sort documents into splits so that all documents of a group go to one split.

    Arguments: documents, pairs of the group's name, whose hash decides the split, and the document, in text order.
    Returns: split -> its documents; a text for tuning (`data.tuning_fraction`) has no splits without documents.
    """
    fractions = {name: getattr(config, f"{name}_fraction") for name in ("test", "validation")}
    splits: dict[str, list[Document]] = {name: [] for name in ("train", *fractions) if fractions.get(name, 1)}
    splitter = Splitter(fractions, config.tuning_fraction)
    for group, document in documents:
        split = splitter.split(group)
        if split is not None:
            splits[split].append(document)
    return {split: members for split, members in splits.items() if members or not config.tuning_fraction}


class Source(ABC):
    """Text as documents, read one at a time.

    `cut` names the splits that are taken out of the train stream by a hash of each document. A split that is neither in
    `cut` nor among the streams has no text.
    """

    cut: tuple[str, ...] = ()
    by_document = True  # False: the streams are whole splits, also of a text for tuning (`data.tuning_fraction`)

    def __init__(self, config: DataConfig) -> None:
        self.config = config
        self.skipped: Counter[str] = Counter()  # suffix -> files of folders that are not read
        self.repaired = 0  # documents in which half a surrogate pair became U+FFFD

    def kinds_skipped(self) -> str:
        """Return the commonest suffixes of `skipped` with their counts, such as `30 .pdf, 1 .tar`."""
        return ", ".join(f"{count:,} {suffix}" for suffix, count in self.skipped.most_common(8))

    def _explained(self, texts: Iterator[Any], where: str, remedy: str) -> Iterator[str]:
        """The texts that are not null. Raises: ConfigError, with `where` and `remedy`, for whatever goes wrong."""
        count = 0
        try:
            for text in texts:
                count += 1
                if text is None:
                    continue
                if not isinstance(text, str):
                    raise ConfigError(
                        f"{where}: data.text_column={self.config.text_column} holds {type(text).__name__}, not text"
                    )
                try:
                    text.encode()
                except UnicodeEncodeError:
                    self.repaired += 1
                    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
                yield text
        except ConfigError:  # it says all
            raise
        except Exception as error:  # Python, datasets, huggingface_hub, fsspec, httpx and Arrow have their own kinds
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            raise ConfigError(f"{where} cannot be read ({reason}, after {count:,} documents): {remedy}") from error

    def cut_few_files(self) -> str:
        """Have text files cut if there are fewer than splits. Returns: a sentence that says so, or an empty one."""
        return ""

    @abstractmethod
    def identity(self) -> Any:
        """What the cache recognises the text by, as JSON. Computed without reading text and without a network."""

    @abstractmethod
    def streams(self) -> dict[str, Iterable[str]]:
        """Documents by split, read when iterated. Raises: ConfigError where the text cannot be read."""


class Files(Source):
    """`data.path`, split by a hash of each document; or a path for each split, `data.train_path` and so on.

    A row of parquet, Arrow, CSV or JSON lines is a document; a text file is one, or is cut at blank lines
    (`data.cut_bytes`).
    """

    def __init__(self, config: DataConfig) -> None:
        super().__init__(config)
        self.cut = ("test", "validation") if config.path is not None else ()
        self.cut_bytes = config.cut_bytes
        named = {"train": config.path if config.path is not None else config.train_path}
        named |= {"validation": config.validation_path, "test": config.test_path}
        self.paths = {split: self._files_of(pattern) for split, pattern in named.items() if pattern is not None}
        uses = Counter(chain.from_iterable(self.paths.values()))
        if twice := [path for path, count in uses.items() if count > 1]:
            raise ConfigError(
                f"{twice[0]} is named for two splits: held-out text must not be trained on, so name other files, or "
                "give data.path alone to have the documents split"
            )

    def cut_few_files(self) -> str:
        files, config = self.paths["train"], self.config
        num_splits = 1 + sum(getattr(config, f"{name}_fraction") > 0 for name in self.cut)
        is_text = not any(_suffix(path) in _ROW_SUFFIXES for path in files)
        if len(files) >= num_splits or not is_text or self.cut_bytes is not None or config.articles:
            return ""
        self.cut_bytes = min(max(sum(path.stat().st_size for path in files) // 100, 1000), 100_000)
        return (
            f"data={config.name}: there are too few text files for {num_splits} splits ({len(files)}), so text is cut "
            f"at blank lines into documents of about {self.cut_bytes:,} bytes (data.cut_bytes sets the size)"
        )

    def identity(self) -> Any:
        stats = {split: [(str(path), path.stat()) for path in paths] for split, paths in self.paths.items()}
        return {split: [[name, s.st_size, s.st_mtime_ns] for name, s in files] for split, files in stats.items()}

    def streams(self) -> dict[str, Iterable[str]]:
        streams = {split: chain.from_iterable(map(self._documents, paths)) for split, paths in self.paths.items()}
        return {split: joined_articles(texts) if self.config.articles else texts for split, texts in streams.items()}

    def _files_of(self, pattern: str | list[str]) -> list[Path]:
        """The files that one field names, each once: files, globs and folders, in the order given."""
        files: list[Path] = []
        for word in map(str, pattern if isinstance(pattern, list) else [pattern]):
            path = Path(word)
            if path.is_dir():
                matches = self._in_folder(path)
            elif path.is_file():
                matches = [path]
            else:
                paths = map(Path, glob.glob(word, recursive=True))  # noqa: PTH207 (absolute ones)
                matches = _without_caches([file for file in paths if file.is_file()])
            if not matches:
                if path.is_dir():
                    raise ConfigError(
                        f"data={self.config.name}: the folder {word} has no text and no rows (skipped: "
                        f"{self.kinds_skipped() or 'nothing'}): unpack archives, convert documents to text, or name "
                        "text files of another suffix by a glob such as 'FOLDER/**/*.log'"
                    )
                near = nearest(path.name, [each.name for each in path.parent.glob("*")])
                raise ConfigError(
                    f"data={self.config.name}: there are no text files at {word} (from {Path.cwd()}){near}: give a "
                    "file, a glob such as 'books/*.parquet', a folder, or a list of them"
                )
            files += sorted(file.resolve() for file in matches)
        return list(dict.fromkeys(files))

    def _in_folder(self, folder: Path) -> list[Path]:
        """Return the files below `folder` that hold rows by their suffix, or the text files if none does.

        Text beside rows describes them, as the README of a data set does. Hidden files and folders are left out.
        """
        files = [
            file
            for file in folder.rglob("*")
            if file.is_file()
            and file.name not in _METADATA
            and not any(part.startswith(".") for part in file.relative_to(folder).parts)
        ]
        files = _without_caches(files)
        suffixes = {_suffix(file) for file in files}
        readable = suffixes.intersection(_ROW_SUFFIXES) or suffixes.intersection(_TEXT)
        self.skipped.update(_suffix(file) or "no suffix" for file in files if _suffix(file) not in readable)
        return [file for file in files if _suffix(file) in readable]

    def _documents(self, path: Path) -> Iterator[str]:
        remedy = "check the file, its suffix and its encoding (`iconv -f LATIN1 -t UTF-8` converts)"
        return self._explained(self._read(path), str(path), remedy)

    def _read(self, path: Path) -> Iterator[Any]:
        suffix, column = _suffix(path), self.config.text_column
        _check_start(path)
        if suffix in _TABLES:
            yield from _table_texts(path, column)
            return
        with io.TextIOWrapper(_opened(path), "utf-8", newline="") as file:  # line ends stay as they are
            lines = (line.removeprefix("\ufeff") for line in file)  # Windows marks UTF-8 so
            if suffix in _JSON_LINES:
                yield from _json_texts(path, column, lines)
            elif suffix in _CSV:
                yield from _csv_texts(path, column, lines)
            else:
                for text in [file.read()] if self.cut_bytes is None else _cut(file, self.cut_bytes):
                    if "\0" in text:
                        raise ConfigError(
                            f"{path} has NUL bytes, so it is no text in UTF-8: leave it out, or convert it"
                        )
                    yield text


class Hub(Source):
    """A public data set of the Hugging Face hub, streamed; a split that it lacks is cut from its train split."""

    def __init__(self, config: DataConfig) -> None:
        super().__init__(config)
        named = {"train": config.train_split, "validation": config.validation_split, "test": config.test_split}
        self._names = {split: name for split, name in named.items() if name}  # our splits -> the repository's
        self.cut = tuple(split for split in ("test", "validation") if split not in self._names)

    def identity(self) -> Any:
        return []  # repository, subset, revision and splits are in the configuration

    def streams(self) -> dict[str, Iterable[str]]:
        repository = str(self.config.repository)
        check_hub(
            "dataset", repository, self.config.revision, f"check data.repository and data.revision, or {_OFFLINE}"
        )
        streams = {
            split: self._explained(self._read(name), f"{repository} (split {name!r})", f"try again, or {_OFFLINE}")
            for split, name in self._names.items()
        }
        return {split: joined_articles(texts) if self.config.articles else texts for split, texts in streams.items()}

    def _read(self, split: str) -> Iterator[Any]:
        config = self.config
        load = partial(_datasets().load_dataset, streaming=True, revision=config.revision)
        rows = load(config.repository, config.subset, split=split).select_columns([config.text_column])
        yield from (row[config.text_column] for row in rows)


def _without_caches(files: list[Path]) -> list[Path]:
    """Return `files` without the Arrow files that the `datasets` library left beside the data set of a folder.

    `state.json` of `save_to_disk` names the files of the data set. `map` and `shuffle` write `cache-*.arrow`.
    """
    shards: dict[Path, set[str]] = {}
    for folder in {file.parent for file in files if file.suffix == ".arrow"}:
        with suppress(FileNotFoundError, KeyError):
            state = json.loads((folder / "state.json").read_bytes())
            shards[folder] = {entry["filename"] for entry in state["_data_files"]}
    return [
        file
        for file in files
        if file.suffix != ".arrow"
        or (file.name in shards[file.parent] if file.parent in shards else not file.name.startswith("cache-"))
    ]


def joined_articles(texts: Iterable[str]) -> Iterator[str]:
    """Articles out of WikiText, whose rows are lines or whole files: an article begins at each line ` = Title = `.

    A title stands between blank lines, which tells it from the same signs inside a paragraph.
    """
    article: list[str] = []
    for line in (line for text in texts for line in (text.splitlines() or [""])):
        if _ARTICLE.fullmatch(line) and not (article and article[-1].strip()):
            yield "\n".join(article)
            article = []
        article.append(line)
    yield "\n".join(article)


def _value(row: Any, column: str, where: str) -> Any:
    """Return the field `column` of a row. Raises: ConfigError that lists the fields if there is none."""
    if not isinstance(row, dict):
        raise ConfigError(f"{where} holds {type(row).__name__}, not an object with a field {column!r}")
    if column not in row:
        raise ConfigError(f"{where} has no field {column!r}: set data.text_column to one of {', '.join(row) or 'none'}")
    return row[column]


def _json_texts(path: Path, column: str, lines: Iterator[str]) -> Iterator[Any]:
    """Yield `column` of each object: one a line, or all in one array, which is held in memory."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            rows = json.loads("".join([line, *lines])) if line.lstrip()[0] == "[" else [json.loads(line)]
        except ValueError as error:
            raise ConfigError(
                f"{path}, line {number}, is not JSON ({error}): write one object a line, or one array of objects"
            ) from error
        for row in rows:
            yield _value(row, column, f"{path}, line {number},")


def _csv_texts(path: Path, column: str, lines: Iterator[str]) -> Iterator[str]:
    """Yield `column` of each row of CSV or TSV. In TSV a quote is an ordinary character if the header has none."""
    csv.field_size_limit(2**31 - 1)
    first = next(lines, "")
    has_quotes = _suffix(path) == ".csv" or first.startswith('"')
    rows = csv.reader(
        chain([first], lines),
        delimiter="," if _suffix(path) == ".csv" else "\t",
        quoting=csv.QUOTE_MINIMAL if has_quotes else csv.QUOTE_NONE,
    )
    header = next(rows, [])
    _value(dict.fromkeys(header), column, str(path))
    for row in filter(None, rows):
        if len(row) != len(header):
            raise ConfigError(
                f"{path}, line {rows.line_num}, has {len(row)} fields, but the first line has {len(header)}: put text "
                "with commas or line breaks in quotes (.csv), or write JSON lines (.tsv has no quotes)"
            )
        yield row[header.index(column)]


def _table_texts(path: Path, column: str) -> Iterator[Any]:
    """Yield `column` of each row of a parquet or Arrow file, streamed."""
    import pyarrow
    from pyarrow import ipc, parquet

    with pyarrow.memory_map(str(path)) as file:
        batches: Any
        if _suffix(path) == ".parquet":
            table = parquet.ParquetFile(file)
            names, batches = table.schema_arrow.names, table.iter_batches(_ROWS, columns=[column])
        elif file.read(6) == b"ARROW1":
            table = ipc.open_file(file)
            names, batches = table.schema.names, map(table.get_batch, range(table.num_record_batches))
        else:
            file.seek(0)
            batches = ipc.open_stream(file)
            names = batches.schema.names
        _value(dict.fromkeys(names), column, str(path))
        for batch in batches:
            yield from (value.as_py() for value in batch.column(column))


def _datasets() -> Any:
    """The `datasets` library without its progress bars and log lines."""
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)
    return datasets


def _zstandard(path: Path) -> Any:
    import pyarrow

    return pyarrow.input_stream(path, compression="zstd")


_COMPRESSED: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _zstandard}


def _opened(path: Path) -> IO[bytes]:
    """Open a file to read its bytes, decompressed."""
    return cast(IO[bytes], _COMPRESSED.get(path.suffix.lower(), partial(open, mode="rb"))(path))


def _check_start(path: Path) -> None:
    """Raise ConfigError for an archive, a PDF or a Git LFS pointer, all of which can look like text."""
    with _opened(path) as file:
        start = file.read(512)
    if start.startswith(_NOT_TEXT) or start[257:262] == b"ustar":
        raise ConfigError(f"{path} is an archive or a PDF, not text: unpack it, or convert it to text")
    if start.startswith(b"version https://git-lfs"):
        raise ConfigError(f"{path} is only a Git LFS pointer: fetch the file with `git lfs pull`")


def _suffix(path: Path) -> str:
    """The suffix that tells the format, without that of a compression."""
    return (path.with_suffix("") if path.suffix.lower() in _COMPRESSED else path).suffix.lower()


def _cut(file: TextIO, size: int) -> Iterator[str]:
    """Documents of `size` bytes or a little more, which end behind a blank line; at twice the size behind any line.

    A line longer than that is cut too, between characters.
    """
    lines: list[str] = []
    length = 0
    for line in iter(partial(file.readline, size), ""):
        lines.append(line)
        length += len(line.encode())
        if length >= size and (not line.strip() or length >= 2 * size):
            yield "".join(lines)
            lines, length = [], 0
    yield "".join(lines)
