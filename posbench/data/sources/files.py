"""Your own files: rows of parquet, JSON lines, Arrow and CSV, and text files, each of which is a document."""

from __future__ import annotations

import glob
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from posbench.config import ConfigError, DataConfig, nearest
from posbench.data.sources.base import Source, first_line, joined_articles
from posbench.data.sources.formats import READERS, TEXTS, check_head, kind_of, read_texts


class Files(Source):
    """`data.path`, split by a hash of each document, or a path a split, `data.train_path` and so on."""

    def __init__(self, config: DataConfig) -> None:
        super().__init__(config)
        if config.path is not None:
            self.cut = ("test", "validation")
        named = {"train": config.path if config.path is not None else config.train_path}
        named |= {"validation": config.validation_path, "test": config.test_path}
        self._words = {split: words for split, words in named.items() if words is not None}
        self._skipped: Counter[str] = Counter()  # by suffix: files of folders that are not read
        self.paths = {split: self._found(self.describe(split), words) for split, words in self._words.items()}
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

    def remarks(self) -> list[str]:
        """How many files of each suffix are read, and which files of a folder are not."""
        read = Counter(kind_of(path) or "no suffix" for path in chain.from_iterable(self.paths.values()))
        if sum(read.values()) == 1 and not self._skipped:
            return []
        said = f"reading {_counted(read)}"
        if self._skipped:
            said += f"; skipped {_counted(self._skipped)} (to read them as text: data.path='FOLDER/**/*.SUFFIX')"
        return [said]

    def streams(self) -> dict[str, Iterable[str]]:
        for path in chain.from_iterable(self.paths.values()):
            check_head(path, self.config.text_column)
        return {split: self._stream(paths) for split, paths in self.paths.items()}

    def _stream(self, paths: list[Path]) -> Iterable[str]:
        groups = groupby(paths, key=lambda path: READERS.get(kind_of(path), read_texts))
        texts = chain.from_iterable(read(list(group), self.config) for read, group in groups)
        return joined_articles(texts) if self.config.articles else texts

    def check(self) -> None:
        """Whole documents cannot be dealt to more splits than there are."""
        paths = self.paths["train"]
        fractions = {name: getattr(self.config, f"{name}_fraction") for name in self.cut}
        splits = ["train", *(name for name in ("validation", "test") if fractions.get(name))]
        are_documents = all(kind_of(path) not in READERS for path in paths) and not self.config.articles
        if not are_documents or self.config.cut_bytes or self.config.tuning_fraction or len(paths) >= len(splits):
            return
        count = sum(not text.isspace() and text != "" for text in self._stream(paths))
        if count == 0:
            return  # said in its turn
        raise ConfigError(
            f"{self.describe('train')} has {count} document{'s' * (count > 1)} (a text file is one), and splits are "
            f"made of whole documents, so there would be no {splits[count]} text: set data.cut_bytes=100000 to have "
            "text files cut at blank lines into documents of about that many bytes, or name the files of each split "
            "(data=files data.train_path=... data.validation_path=... data.test_path=...)"
        )

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

    def _found(self, named: str, words: Any) -> list[Path]:
        """The files that the words of one field mean, each once: files, globs and folders, in the order given."""
        listed = [words] if isinstance(words, (str, Path)) else words
        if not isinstance(listed, list) or not listed or not all(isinstance(w, (str, Path)) and str(w) for w in listed):
            raise ConfigError(
                f"{named} is not a path: give a file, a glob such as 'books/*.parquet', a folder, or a list of them"
            )
        try:
            return list(dict.fromkeys(chain.from_iterable(self._files_of(named, str(word)) for word in listed)))
        except (OSError, RuntimeError, ValueError) as error:  # no permission, no such user, a NUL or 5,000 characters
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{named} cannot be looked up ({first_line(error)}): give the path of a file") from error

    def _files_of(self, named: str, word: str) -> list[Path]:
        path = Path(word).expanduser()
        if path.is_file():
            return [path.resolve()]
        if path.is_dir():
            found = self._of_folder(named, path)
            missing = f"{named} is a folder without text files ({_counted(self._skipped)}): name the files themselves"
        else:
            found = [file for file in map(Path, glob.glob(str(path), recursive=True)) if file.is_file()]  # noqa: PTH207
            beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
            missing = (
                f"{named} does not exist{nearest(path.name, beside)}: give a file, a glob or a folder (from "
                f"{Path.cwd()})"
            )
        if not found:
            raise ConfigError(missing)
        return sorted(file.resolve() for file in found)

    def _of_folder(self, named: str, folder: Path) -> list[Path]:
        """The files below it that hold text by their suffix; hidden ones, and those in hidden folders, are left out."""
        if (folder / "dataset_dict.json").is_file():
            raise ConfigError(
                f"{named} is a data set of several splits ({', '.join(_folders(folder))}): name one for each split, as "
                f"in data.train_path={folder}/train data.validation_path={folder}/validation"
            )
        is_data_set = (folder / "state.json").is_file()  # of datasets.save_to_disk: its JSON files hold no text
        found = []
        for file in folder.rglob("*"):
            if any(part.startswith(".") for part in file.relative_to(folder).parts) or not file.is_file():
                continue
            kind = kind_of(file)
            if kind == ".arrow" if is_data_set else kind in READERS or kind in TEXTS:
                found.append(file)
            elif not is_data_set:
                self._skipped[kind or "no suffix"] += 1
        return found


def _folders(folder: Path) -> Iterator[str]:
    return (path.name for path in sorted(folder.iterdir()) if path.is_dir())


def _counted(files: Counter[str]) -> str:
    """`33 files (30 .md, 3 .txt)`."""
    total = sum(files.values())
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in files.most_common(8))
    more = f" and {len(files) - 8} more kinds" if len(files) > 8 else ""
    return f"{total:,} file{'s' * (total != 1)}" + (f" ({kinds}{more})" if total else "")
