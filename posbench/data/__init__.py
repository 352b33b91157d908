"""Text to batches: documents -> tokenizer -> token shards on disk -> windows.

    corpus = prepare(config)                       # reads and tokenizes once; afterwards only maps files
    corpus.train.tokens                            # memory map, uint16 or uint32: [BOS] + tokens, document after document
    batches = Batches(corpus.train, context_length=256, batch_size=8, seed=0)
    batches.batch(0)                               # int64 [B, T + 1]

Where to look: `sources` (where text comes from), `splitting` (which split a document goes to), `tokenization` (text to
numbers), `shards` (files of numbers), `preparation` (all of it, and the cache), `batches` (what training reads).
"""

from __future__ import annotations

from posbench.data.batches import Batches
from posbench.data.preparation import prepare
from posbench.data.shards import Corpus, Split
from posbench.data.tokenization import load_tokenizer

__all__ = ["Batches", "Corpus", "Split", "load_tokenizer", "prepare"]
