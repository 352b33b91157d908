"""Text to batches: documents -> tokenizer -> token shards on disk -> windows.

corpus = prepare(config)      # reads and tokenizes once; afterwards only maps files
corpus.train.tokens           # memory map, uint16 or uint32: [BOS] + tokens, document after document
batches = Batches(corpus.train, context_length=256, batch_size=8, seed=0)
batches.batch(0)              # int64 [B, T + 1]

sources/         where text comes from: the standard library, your files, the hub
splitting.py     which split a document goes to
tokenization.py  text to numbers
grams.py         text as hashes of its 13-grams, and near-duplicates by them
overlap.py       how much of the held-out text also occurs in train
shards.py        files of numbers: written once, checked, memory-mapped
build.py         documents in, files of numbers out, one pass
preparation.py   the cache: make a corpus once, find it again at once
batches.py       what training reads
"""

from __future__ import annotations

from posbench.data.batches import Batches
from posbench.data.preparation import prepare
from posbench.data.shards import Corpus, Split
from posbench.data.tokenization import load_tokenizer

__all__ = ["Batches", "Corpus", "Split", "load_tokenizer", "prepare"]
