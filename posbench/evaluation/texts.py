"""Find the text to score a run on: the held-out part of its own text, or a text it was not trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from posbench.catalogue.choices import choices
from posbench.composition.compose import compose, names_task
from posbench.config import Config, ConfigError, DataConfig, TaskConfig, TokenizerConfig
from posbench.data import Corpus, Dataset, dataset_of, prepare
from posbench.data.text.overlap import WARN_ABOVE, find_overlap
from posbench.data.text.preparation import cache_folder, find_prepared, prepare_held_out
from posbench.runs import Run
from posbench.system.console import Say
from posbench.system.files import write_bytes


def text_named(words: Sequence[str]) -> DataConfig | None:
    """Return the configuration of the text that the words of `--data` name, or None without words.

    Arguments: words, a choice of conf/data and its settings (`["files", "data.path=~/notes", "data.name=notes"]`), and
    `--config-dir=FOLDER`. Raises: ConfigError for none or several choices, and for words that `posbench train` would
    refuse.
    """
    if not words:
        return None
    # Words with `=` are settings of the text.
    names = [word for word in words if "=" not in word]
    if len(names) != 1:
        raise ConfigError(
            f"--data names {len(names)} texts: give one of {_texts()}, and settings of it such as --data files --data "
            "data.path=~/notes"
        )
    data = compose([f"data={names[0]}", *(word for word in words if word not in names)]).data
    if isinstance(data, TaskConfig):
        raise ConfigError(f"--data {names[0]} is a task: give a text ({_texts()})")
    return data


def _texts() -> str:
    return ", ".join(name for name in choices("data") if not names_task(name))


def dataset_for(run: Run, data: DataConfig | None, notice: Say) -> Dataset:
    """Return the dataset to score a run on: its task, or text with the run's tokenizer.

    Raises: ConfigError for a task with `data`, or if the text or the tokenizer is missing.
    """
    if not run.config.is_task:
        return corpus_for(run, data, notice)
    if data is not None:
        raise ConfigError(f"{run.name} was trained on a task and cannot be scored on text: leave --data out")
    return dataset_of(run.config)


def corpus_for(run: Run, data: DataConfig | None, notice: Say) -> Corpus:
    """Return the text to score a run on, `data` or by default its own, tokenized by the run's tokenizer.

    Raises: ConfigError if the text or the tokenizer is missing.
    """
    config, cache = run.config, run.config.data.cache_dir
    # If the recorded folder is gone, use the default cache, which None means.
    if not cache_folder(cache).is_dir():
        config = replace(config, data=replace(config.data, cache_dir=None))
    is_subject = run.manifest.subject is not None
    if is_subject:
        if data is not None:
            config = replace(config, data=data)
        # A subject was not trained here, so splits that posbench itself makes are scored as one text.
        return prepare_held_out(config, notice, whole=True)
    if data is None:
        return prepare(config, notice=notice)
    _ = run.tokenizer  # raises an error if it is not the one that the run was trained with
    held_out = prepare_held_out(_with_text(config, data, run), notice)
    trained_on = find_prepared(config)
    # How much of each split is also in the training text; empty if that is not cached.
    shares = {}
    if trained_on is not None and trained_on.fingerprint == run.manifest.fingerprints.data:
        shares = find_overlap(trained_on, held_out)
    for split, share in shares.items():
        if share > WARN_ABOVE:
            notice(
                f"warning: data={data.name}: {share:.1%} of its {split} text also occurs in the text of "
                f"data={config.data.name} that the runs were trained on (more than {WARN_ABOVE:.0%}), so a low loss "
                "there is partly memory: choose other text"
            )
    overlap = {"splits": {split: {"share": share} for split, share in shares.items()}}
    return replace(held_out, overlap=overlap)


def _with_text(config: Config, data: DataConfig, run: Run) -> Config:
    # Return a run's configuration with another text, tokenized by the run's own tokenizer.
    text = replace(data, cache_dir=data.cache_dir or config.data.cache_dir)
    file = run.path / "tokenizer.json"
    # A packed run has no such file, and a tokenizer of the kind `file` needs a path.
    if not file.exists():
        write_bytes(file, run.content(file.name))
    return replace(config, data=text, tokenizer=TokenizerConfig(kind="file", path=str(file)))
