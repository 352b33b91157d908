"""Prepare text once (documents -> splits -> tokenizer -> tokens on disk) and find it again in a cache.

sources.py       your files and the hub, and which split a document goes to
formats.py       text, JSON, CSV, parquet and Arrow files as texts, and what is refused
sotu.py          English with the same bytes everywhere; stdlib.py: the running Python's source
tokenizer.py     text to numbers
corpus.py        the tokens of a text on disk, written once and memory-mapped, and the batches of training
overlap.py       how much of the held-out text also occurs in train; copying.py: how much a copier gets right
preparation.py   documents in, a corpus out, and the cache that finds it again
"""
