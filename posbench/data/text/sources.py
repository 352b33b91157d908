"""Read text from your own files and from public data sets of the Hugging Face hub, and split documents.

To add a source, write a class, name it in `posbench.data.text.preparation.SOURCES`, and add a file to `conf/data/`.
"""

from __future__ import annotations

import glob
import json
import logging
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from posbench.config import ConfigError, DataConfig, nearest
from posbench.data.text.formats import ROW_SUFFIXES, TEXT_SUFFIXES, read_texts, suffix_of
from posbench.data.text.tokenizer import check_hub
from posbench.system.files import sum_of

Document = TypeVar("Document")
# Files that describe a data set, as `datasets` and its hub name them
_METADATA = {"state.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json"}
_LEAST_TRAIN = 0.6  # cut long files if train gets less than this part of the share that was asked for
_SHORT = 1 << 26  # bytes of text that are hashed whole when a run begins; 64 MB take a tenth of a second
_BLOCK, _BLOCKS = 1 << 12, 1 << 12  # bytes of a block, and blocks of all files together, in the sample of a longer text
_LINKED_FOLDER, _BROKEN_LINK = "linked folder", "broken link"
_OFFLINE = "work offline with data=stdlib (text of this Python) or data=files data.path=... (your own)"
# A title line of WikiText, ` = Title = `. Sections have more signs: ` = = Plot = = `.
_ARTICLE = re.compile(r" = (?!= ).+(?<! =) = ")


def split_of(document: bytes, fractions: dict[str, float]) -> str:
    """Return the split that a document belongs to: train, or one of the names in `fractions`.

    Each split gets about its fraction of all documents, as in `split_of(text.encode(), {"validation": 0.05, "test":
    0.1})`.
    """
    # A hash of the text decides: the split is the same on every machine and in any order of reading, and copies of a
    # document fall into one split.
    draw = int.from_bytes(sha256(document).digest()[:8], "big") / 2**64  # from 0 to 1
    for name, fraction in fractions.items():
        if draw < fraction:
            return name
        draw -= fraction
    return "train"


def split_groups(config: DataConfig, documents: Iterable[tuple[bytes, Document]]) -> dict[str, list[Document]]:
    """Assign groups of documents to splits, and return {split: documents}.

    Arguments: documents, pairs (name of the group, document) in text order.
    """
    fractions = {name: getattr(config, f"{name}_fraction") for name in ("test", "validation")}
    splits: dict[str, list[Document]] = {name: [] for name in ("train", *fractions) if fractions.get(name, 1)}
    for group, document in documents:
        splits[split_of(group, fractions)].append(document)
    return splits


class Source(ABC):
    """Base class of text sources, which yield documents one at a time.

    `cut` names the splits that are taken out of the train documents.
    """

    cut: tuple[str, ...] = ()
    by_document = True  # False: the source itself cuts its documents into splits

    def __init__(self, config: DataConfig) -> None:
        self.config = config
        self.skipped: Counter[str] = (
            Counter()
        )  # suffix, or kind of link -> number of files in folders that are not read
        self.repaired = 0  # documents in which half a surrogate pair became U+FFFD

    def kinds_skipped(self) -> str:
        """Return the commonest suffixes of `skipped` with their counts: `30 .pdf, 1 .tar`."""
        kinds = []
        for kind, count in self.skipped.most_common(8):
            plural = "s" if kind in (_LINKED_FOLDER, _BROKEN_LINK) and count > 1 else ""
            kinds.append(f"{count:,} {kind}{plural}")
        return ", ".join(kinds)

    def _explained(self, texts: Iterator[Any], origin: str, remedy: str) -> Iterator[str]:
        """Yield the texts that are not null, with half surrogate pairs repaired.

        Arguments: origin and remedy, for error messages. Raises: ConfigError for any error in `texts`.
        """
        count = 0
        try:
            for text in texts:
                count += 1
                if text is None:
                    continue
                if not isinstance(text, str):
                    raise ConfigError(
                        f"{origin}: data.text_column={self.config.text_column} holds {type(text).__name__}, not text"
                    )
                try:
                    # JSON can hold half a surrogate pair, which has no UTF-8.
                    text.encode()
                except UnicodeEncodeError:
                    self.repaired += 1
                    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
                yield text
        except ConfigError:  # already explained
            raise
        except Exception as error:  # Python, datasets, huggingface_hub, fsspec, httpx and Arrow raise their own classes
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            raise ConfigError(f"{origin} cannot be read ({reason}, after {count:,} documents): {remedy}") from error

    def _as_articles(self, streams: Mapping[str, Iterable[str]]) -> dict[str, Iterable[str]]:
        if not self.config.articles:
            return dict(streams)
        return {split: joined_articles(texts) for split, texts in streams.items()}

    def cut_files(self) -> str:
        """Cut text files into documents if whole files give a split too little; return a line to print, or ""."""
        return ""

    def files(self) -> list[Path]:
        """Return the files that the text is read from; none if it is not read from files."""
        return []

    def digest(self, whole: bool) -> str:
        """Return the SHA-256 of the content of `files`: of all of it if it is short or `whole`, else of a sample."""
        paths = self.files()
        is_short = sum(path.stat().st_size for path in paths) <= _SHORT
        digest = sha256()
        for path in paths:
            digest.update((sum_of(path) if whole or is_short else _sum_of_blocks(path, len(paths))).encode())
        return digest.hexdigest()

    @abstractmethod
    def identity(self) -> Any:
        """Return a JSON value that identifies the text, without reading text or using a network."""

    @abstractmethod
    def streams(self) -> dict[str, Iterable[str]]:
        """Return {split: iterator over its documents}. Raises: ConfigError if the text cannot be read."""


class Files(Source):
    """Files at `data.path`, split by a hash of each document, or at a path per split (`data.train_path` and so on).

    A row of a table or of JSON lines is a document; a text file is one, or is cut at blank lines (`data.cut_bytes`).
    """

    def __init__(self, config: DataConfig) -> None:
        super().__init__(config)
        # Splits that are taken out of the train documents.
        self.cut = ("test", "validation") if config.path is not None else ()
        self.cut_bytes = config.cut_bytes
        train_path = config.train_path if config.path is None else config.path
        patterns = {"train": train_path, "validation": config.validation_path, "test": config.test_path}
        self.paths = {split: self._files_of(pattern) for split, pattern in patterns.items() if pattern is not None}
        uses = Counter(path.resolve() for path in self.files())
        if twice := [path for path in self.files() if uses[path.resolve()] > 1]:
            raise ConfigError(
                f"{twice[0]} is named for two splits: held-out text must not be trained on, so name other files, or "
                "give only data.path to have the documents split"
            )

    def cut_files(self) -> str:
        is_text = not any(suffix_of(path) in ROW_SUFFIXES for path in self.paths.get("train", ()))
        # Only if posbench splits the text, and the user has not said how to cut it.
        if not self.cut or not is_text or self.cut_bytes is not None or self.config.articles:
            return ""
        files = self.paths["train"]
        fractions = {name: getattr(self.config, f"{name}_fraction") for name in self.cut}
        reason = ""
        num_splits = 1 + sum(fraction > 0 for fraction in fractions.values())
        if len(files) < num_splits:
            reason = f"there are too few text files for {num_splits} splits ({len(files)}), so text is cut"
        # With a budget, how much text is read depends on the tokenizer.
        elif self.config.token_budget is None:
            num_bytes: Counter[str] = Counter()  # of the documents of each split
            for text in map(str.encode, self.streams()["train"]):
                num_bytes[split_of(text, fractions)] += len(text)
            self.repaired = 0  # counted again when the text is read
            for name, asked in {**fractions, "train": 1 - sum(fractions.values())}.items():
                share = num_bytes[name] / max(num_bytes.total(), 1)
                least = _LEAST_TRAIN * asked if name == "train" else 0
                if asked > 0 and (share == 0 or share < least):
                    reason = f"by whole files, {name} would get {share:.0%} of the text, so long files are cut"
        if not reason:
            return ""
        size = sum(path.stat().st_size for path in files)
        # About a hundred documents in all.
        self.cut_bytes = min(max(size // 100, 1000), 100_000)
        return (
            f"data={self.config.name}: {reason} at blank lines into documents of about {self.cut_bytes:,} bytes "
            "(data.cut_bytes sets the size)"
        )

    def files(self) -> list[Path]:
        return [*chain.from_iterable(self.paths.values())]

    def identity(self) -> Any:
        files: dict[str, list[list[Any]]] = {}
        for split, paths in self.paths.items():
            files[split] = []
            for path in paths:
                # Sizes and times identify the files; `digest` is compared when the text is found in the cache.
                stat, target = path.stat(), path.resolve()
                facts = [str(target), stat.st_size, stat.st_mtime_ns]
                # The name of a link tells the format, such as `train.jsonl` for a blob in the hub's cache.
                if suffix_of(path) != suffix_of(target):
                    facts.append(path.name)
                files[split].append(facts)
        return files

    def streams(self) -> dict[str, Iterable[str]]:
        streams = {split: chain.from_iterable(map(self._documents, paths)) for split, paths in self.paths.items()}
        return self._as_articles(streams)

    def _files_of(self, pattern: str | list[str]) -> list[Path]:
        """Return the files that `pattern` names (files, globs, folders), in its order and without repetition.

        A link keeps the name that was given or found, because its suffix tells the format. Raises: ConfigError if a
        part of it names no files.
        """
        files: dict[Path, Path] = {}  # what a name leads to -> the first such name
        words = pattern if isinstance(pattern, list) else [pattern]
        for word in map(str, words):
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
                neighbours = [neighbour.name for neighbour in path.parent.glob("*")]
                near = nearest(path.name, neighbours)
                raise ConfigError(
                    f"data={self.config.name}: there are no text files at {word} (from {Path.cwd()}){near}: give a "
                    "file, a glob such as 'books/*.parquet', a folder, or a list of them"
                )
            for file in sorted(file.absolute() for file in matches):
                files.setdefault(file.resolve(), file)
        return list(files.values())

    def _in_folder(self, folder: Path) -> list[Path]:
        files = []
        for file in folder.rglob("*"):
            is_hidden = "/." in f"/{file.relative_to(folder).as_posix()}"
            if is_hidden or file.name in _METADATA:
                continue
            if file.is_file():
                files.append(file)
            elif file.is_symlink():
                # Links to folders are not followed: they may lead back up. A glob with `**` follows them.
                self.skipped[_LINKED_FOLDER if file.is_dir() else _BROKEN_LINK] += 1
        own_files = _without_caches(files)
        if len(own_files) < len(files):
            self.skipped["cached .arrow"] += len(files) - len(own_files)
        files = own_files
        suffixes = {suffix_of(file) for file in files}
        # Text files next to files of rows, such as .parquet, describe them, like the README of a data set.
        readable = suffixes.intersection(ROW_SUFFIXES) or suffixes.intersection(TEXT_SUFFIXES)
        self.skipped.update(suffix_of(file) or "no suffix" for file in files if suffix_of(file) not in readable)
        return [file for file in files if suffix_of(file) in readable]

    def _documents(self, path: Path) -> Iterator[str]:
        remedy = "check the file, its suffix and its encoding (`iconv -f LATIN1 -t UTF-8` converts)"
        return self._explained(self._read(path), str(path), remedy)

    def _read(self, path: Path) -> Iterator[Any]:
        return read_texts(path, self.config.text_column, self.cut_bytes)


class Hub(Source):
    """A public data set of the Hugging Face hub, streamed; a split it lacks is cut from its train split."""

    def __init__(self, config: DataConfig) -> None:
        super().__init__(config)
        names = {"train": config.train_split, "validation": config.validation_split, "test": config.test_split}
        self._names = {split: name for split, name in names.items() if name}  # our splits -> the repository's
        self.cut = tuple(split for split in ("test", "validation") if split not in self._names)

    def identity(self) -> Any:
        return []  # repository, subset, revision and splits are in the configuration

    def streams(self) -> dict[str, Iterable[str]]:
        # One request first: the library would retry for minutes.
        repository = str(self.config.repository)
        check_hub(
            "dataset", repository, self.config.revision, f"check data.repository and data.revision, or {_OFFLINE}"
        )
        streams = {}
        for split, name in self._names.items():
            origin = f"{repository} (split {name!r})"
            streams[split] = self._explained(self._read(name), origin, f"try again, or {_OFFLINE}")
        return self._as_articles(streams)

    def _read(self, split: str) -> Iterator[Any]:
        config = self.config
        load = partial(_datasets().load_dataset, streaming=True, revision=config.revision)
        rows = load(config.repository, config.subset, split=split).select_columns([config.text_column])
        yield from (row[config.text_column] for row in rows)


def _without_caches(files: list[Path]) -> list[Path]:
    """Return the files that are not caches: the `datasets` library keeps Arrow files in the folder of a data set."""
    # `state.json` of `save_to_disk` names the files of the data set. `map` and `shuffle` write `cache-*.arrow`.
    shards: dict[Path, set[str]] = {}
    for folder in {file.parent for file in files if file.suffix == ".arrow"}:
        with suppress(FileNotFoundError, KeyError):
            state = json.loads((folder / "state.json").read_bytes())
            shards[folder] = {entry["filename"] for entry in state["_data_files"]}
    without = []
    for file in files:
        is_part = file.suffix != ".arrow" or not file.name.startswith("cache-")
        if file.suffix == ".arrow" and file.parent in shards:
            is_part = file.name in shards[file.parent]
        if is_part:
            without.append(file)
    return without


def joined_articles(texts: Iterable[str]) -> Iterator[str]:
    """Yield the articles of WikiText from its lines or files. An article begins at a line ` = Title = `."""
    article: list[str] = []
    for line in chain.from_iterable(text.splitlines() or [""] for text in texts):
        # A title has blank lines around it, unlike the same signs inside a paragraph.
        if _ARTICLE.fullmatch(line) and not (article and article[-1].strip()):
            yield "\n".join(article)
            article = []
        article.append(line)
    yield "\n".join(article)


def _sum_of_blocks(path: Path, num_files: int) -> str:
    """Return the SHA-256 of blocks of a file, from its first to its last bytes."""
    size, count = path.stat().st_size, max(2, _BLOCKS // num_files)
    digest = sha256()
    with path.open("rb") as file:
        for number in range(count):
            file.seek(max(0, size - _BLOCK) * number // (count - 1))
            digest.update(file.read(_BLOCK))
    return digest.hexdigest()


def _datasets() -> Any:
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)
    return datasets
