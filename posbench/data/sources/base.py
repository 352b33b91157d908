"""What every source of text promises, and what several of them need."""

from __future__ import annotations

import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

from posbench.config import ConfigError, DataConfig, nearest

# A title line of WikiText, ` = Title = `. Sections have more signs: ` = = Plot = = `.
_ARTICLE = re.compile(r" = (?!= ).+(?<! =) = ")


class Source(ABC):
    """Text as lists of documents, read one at a time.

    `cut` names the splits that are taken out of the train stream by a hash of each document. A split that is neither in
    `cut` nor among the streams has no text.
    """

    cut: tuple[str, ...] = ()
    by_document = True  # False: the streams are whole splits, also of a text to tune by (`data.tuning_fraction`)
    is_trained_on = True  # False: there need be no text beyond the streams, and `train` is the whole of it

    def __init__(self, config: DataConfig) -> None:
        self.config = config

    @abstractmethod
    def identity(self) -> Any:
        """What the cache recognises the text by, as JSON: costs no reading of text and no network."""

    def remarks(self) -> list[str]:
        """What a person should know about the text before it is read, such as files that are skipped."""
        return []

    def check(self) -> None:  # noqa: B027 (most have nothing to check)
        """Refuse what would be refused after tokenizing, where that is cheap to know. Raises: ConfigError."""

    @abstractmethod
    def streams(self) -> dict[str, Iterable[str]]:
        """Documents by split, read when iterated. Raises: ConfigError where it cannot be had, or is no text."""

    def name(self, split: str, number: int, text: str) -> str:
        """What a person knows a document by, given its number in the split and how its text begins."""
        opening = " ".join(text.split(maxsplit=60)[:60])  # a first line alone may be quotation marks
        return f"document {number:,}, which begins {opening[:60]!r}"

    def describe(self, split: str) -> str:
        """Where the text of a split comes from, in the words of the command line."""
        return f"data={self.config.name}"


def quiet_datasets() -> ModuleType:
    """The `datasets` library without its progress bars and log lines. Raises: ConfigError where it is not installed.

    Text that was prepared before is read without it.
    """
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"text is read through the `datasets` library, and {error.name} is not installed: "
            "pip install datasets, or run posbench prepare where it is installed and copy the cache folder"
        ) from None

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)
    return datasets


def stream(read: Callable[[Path], Iterator[str]], paths: Iterable[Path]) -> Iterator[str]:
    """What `read` yields for each path, as the texts of a streamed `datasets` data set."""
    quiet_datasets()
    from datasets.io.generator import GeneratorDatasetInputStream

    def rows(paths: list[str]) -> Iterator[dict[str, str]]:
        for path in paths:
            for text in read(Path(path)):
                yield {"text": text}

    arguments = {"paths": [str(path) for path in paths]}
    with TemporaryDirectory(
        prefix="posbench-"
    ) as scratch:  # for a lock file; the library's own folder may be read-only
        # What IterableDataset.from_generator calls, which takes no folder.
        dataset = GeneratorDatasetInputStream(rows, gen_kwargs=arguments, streaming=True, cache_dir=scratch).read()
        for row in dataset:
            yield row["text"]


def no_column(where: str, column: str, known: Iterable[str]) -> ConfigError:
    """The error for a text column that is not among the `known` ones."""
    listed = ", ".join(map(str, known))[:500]
    hint = nearest(column, map(str, known))
    return ConfigError(f"{where} has no column {column!r}{hint} (columns: {listed}): set data.text_column")


def first_line(error: BaseException) -> str:
    """Of an error's message, or its kind where it has none: other libraries explain at length."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def joined_articles(rows: Iterable[str]) -> Iterator[str]:
    """Articles out of rows of WikiText, where a row is a line or many: one begins at each line ` = Title = `.

    A title stands between blank lines, which tells it from the same signs inside a paragraph.
    """
    article: list[str] = []
    for line in (line for row in rows for line in (row.splitlines() or [""])):
        if _ARTICLE.fullmatch(line) and not (article and article[-1].strip()):
            yield "\n".join(article)
            article = []
        article.append(line)
    yield "\n".join(article)
