"""Public data sets on the Hugging Face hub, streamed: parquet repositories without scripts, at a pinned revision."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from posbench.config import ConfigError
from posbench.data.sources.base import Source, first_line, joined_articles, no_column, quiet_datasets
from posbench.data.tokenization import HUB_SECONDS


class Hub(Source):
    """A repository's splits; those that it lacks are cut from its train split by a hash of each document."""

    @property
    def names(self) -> dict[str, str]:
        """Our splits -> the repository's."""
        config = self.config
        named = {"train": config.train_split, "validation": config.validation_split, "test": config.test_split}
        return {split: name for split, name in named.items() if name}

    @property
    def cut(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(split for split in ("test", "validation") if split not in self.names)

    def identity(self) -> Any:
        return []  # repository, subset, revision and splits are in the configuration

    def describe(self, split: str) -> str:
        name = self.names.get(split, self.config.train_split)
        return f"data={self.config.name} ({self.config.repository}, split {name!r})"

    def streams(self) -> dict[str, Iterable[str]]:
        self._probe()
        streams = {split: self._texts(name) for split, name in self.names.items()}
        if self.config.articles:
            streams = {split: joined_articles(texts) for split, texts in streams.items()}
        return dict(streams)

    def _texts(self, split: str) -> Iterator[str]:
        load_dataset = quiet_datasets().load_dataset
        config = self.config
        assert config.repository is not None
        count = 0
        try:
            rows = load_dataset(config.repository, config.subset, split=split, revision=config.revision, streaming=True)
            if rows.column_names is not None and config.text_column not in rows.column_names:
                raise no_column(f"{config.repository} ({split})", config.text_column, rows.column_names)
            for row in rows.select_columns([config.text_column]):
                count += 1
                if row[config.text_column] is not None:
                    yield row[config.text_column]
        except ConfigError:
            raise
        except Exception as error:  # datasets, huggingface_hub, fsspec, httpx and Arrow each have their own kinds
            raise ConfigError(
                f"reading {config.repository} (split {split!r}) from the hub failed after {count:,} rows "
                f"({type(error).__name__}: {first_line(error)}): try again, or work offline: {_OFFLINE}"
            ) from error

    def _probe(self) -> None:
        """Ask the hub for this revision, once.

        Raises: ConfigError within seconds where there is no answer, or no such repository or revision.
        """
        from huggingface_hub import HfApi, constants
        from huggingface_hub import errors as hub_errors

        config, endpoint = self.config, constants.ENDPOINT
        assert config.repository is not None
        repository = config.repository
        if Path(repository).exists():
            raise ConfigError(
                f"the folder {Path(repository).absolute()} would be read instead of the hub's {repository}: "
                "rename it, run in another folder, or read your own files with data=files data.path=..."
            )
        if constants.HF_HUB_OFFLINE:
            raise ConfigError(
                f"data={config.name} is on the Hugging Face hub, not in the token cache, and HF_HUB_OFFLINE is set: "
                f"unset it, or work offline: {_OFFLINE}"
            )
        try:
            HfApi().dataset_info(repository, revision=config.revision, timeout=HUB_SECONDS)
        except (hub_errors.RepositoryNotFoundError, hub_errors.RevisionNotFoundError) as error:
            raise ConfigError(
                f"{endpoint} has no data set {config.repository!r} at revision {config.revision!r} (or it asks for "
                "a login: hf auth login): check data.repository and data.revision"
            ) from error
        except Exception as error:  # the HTTP client's own kinds
            raise ConfigError(
                f"the Hugging Face hub cannot be reached ({endpoint}: {type(error).__name__}: {first_line(error)}), "
                f"and data={config.name} is not in the token cache yet: connect, set HF_ENDPOINT to a mirror, "
                f"or work offline: {_OFFLINE}"
            ) from error


_OFFLINE = "data=stdlib (text of this Python) or data=files data.path=... (your own)"
