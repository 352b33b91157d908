"""Provide the data of a run: text (documents -> tokenizer -> tokens on disk -> windows), or the problems of a task.

corpus = prepare(config)      # reads and tokenizes once; afterwards only maps files
corpus.train.tokens           # memory map, uint16 or uint32: [BOS] + tokens, document after document
batches = corpus.batches(config.train, seed=0)
batches.batch(0).tokens       # int64 [B, T + 1]
"""

from __future__ import annotations

from posbench.config import Config
from posbench.data.dataset import Batch, Batches, Dataset
from posbench.data.tasks import build_task
from posbench.data.tasks.problems import Problems, ProblemSplit
from posbench.data.text import tokenizer
from posbench.data.text.corpus import Corpus, Split
from posbench.data.text.preparation import prepare
from posbench.system.console import Say, say

__all__ = [
    "Batch",
    "Batches",
    "Corpus",
    "Dataset",
    "ProblemSplit",
    "Problems",
    "Split",
    "dataset_of",
    "prepare",
    "vocab_size",
]


def dataset_of(config: Config, notice: Say = say) -> Dataset:
    """Return the dataset of a configuration: its tokenized text, or its task's problems.

    Raises: ConfigError if the text cannot be prepared, or if the task refuses its options.
    """
    if config.is_task:
        return Problems(config.data)
    return prepare(config, notice=notice)


def vocab_size(config: Config) -> int:
    """Return the vocabulary size V (rows of the model's embedding table) without reading any text.

    Raises: ConfigError if the tokenizer is in a file or on the hub and cannot be read.
    """
    if config.model.vocab_size is not None:
        return config.model.vocab_size
    if config.is_task:
        return len(build_task(config.data).tokens)
    # These tokenizers are not trained, so they need no texts.
    if config.tokenizer.kind in ("file", "hub"):
        return tokenizer.vocab_size(tokenizer.TOKENIZERS[config.tokenizer.kind](config.tokenizer, ()))
    return config.tokenizer.num_entries
