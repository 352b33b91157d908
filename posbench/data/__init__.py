"""What a run learns from: text (documents -> tokenizer -> tokens on disk -> windows), or the problems of a task.

corpus = prepare(config)      # reads and tokenizes once; afterwards only maps files
corpus.train.tokens           # memory map, uint16 or uint32: [BOS] + tokens, document after document
batches = Batches(corpus.train, context_length=256, batch_size=8, seed=0)
batches.batch(0).tokens       # int64 [B, T + 1]

text/       documents -> tokenizer -> tokens on disk
tasks/      tasks with exact answers, one small class each, and their problems
batches.py  what training reads of a text
"""

from __future__ import annotations

from posbench.config import Config
from posbench.data.batches import Batch, Batches
from posbench.data.tasks.problems import ProblemBatches, Problems, ProblemSplit
from posbench.data.text.corpus import Corpus, Split
from posbench.data.text.preparation import prepare
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
