"""What a run learns from: text (documents -> tokenizer -> tokens on disk -> windows), or the problems of a task.

corpus = prepare(config)      # reads and tokenizes once; afterwards only maps files
corpus.train.tokens           # memory map, uint16 or uint32: [BOS] + tokens, document after document
batches = Batches(corpus.train, context_length=256, batch_size=8, seed=0)
batches.batch(0).tokens       # int64 [B, T + 1]

sources.py       where text comes from (your files, the hub), and which split a document goes to
formats.py       text, JSON, CSV, parquet and Arrow files as texts, and what is refused
stdlib.py        text that every machine has: the standard library's source
tokenizer.py     text to numbers
corpus.py        the tokens of a text on disk: written once, memory-mapped
overlap.py       how much of the held-out text also occurs in train
preparation.py   documents in, a corpus out, and the cache that finds it again
batches.py       what training reads
tasks/           tasks with exact answers: one small class each
problems.py      the problems of a task, in place of all of the above
"""

from __future__ import annotations

from posbench.config import Config
from posbench.data.batches import Batch, Batches
from posbench.data.corpus import Corpus, Split
from posbench.data.preparation import prepare
from posbench.data.problems import ProblemBatches, Problems, ProblemSplit
from posbench.system.console import Say, say

__all__ = [
    "Batch",
    "Batches",
    "Corpus",
    "Dataset",
    "ProblemBatches",
    "ProblemSplit",
    "Problems",
    "Split",
    "dataset_of",
    "prepare",
]

Dataset = Corpus | Problems


def dataset_of(config: Config, notice: Say = say) -> Dataset:
    """The text of a configuration, prepared, or its problems. Raises: ConfigError."""
    return Problems(config.data) if config.is_task else prepare(config, notice=notice)
