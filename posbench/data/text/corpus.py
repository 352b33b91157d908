"""Store a tokenized text on disk, once, map it into memory, and draw training batches from it.

    corpus.json            fingerprints, vocabulary, overlap, counts of the splits, and the size and SHA-256 of every
                           other file (sizes are compared when it is opened, SHA-256 by `posbench prepare --check`)
    tokenizer.json
    vocabulary.bytes       int32 [V]: bytes of text that each token represents (byte-level vocabularies only)
    <split>.tokens         uint16 (uint32 for more than 65,536 entries): [BOS] + tokens, document after document
    <split>.starts         int64 [documents + 1]: the index of each document's first token, and the end
    <split>.bytes          int64 [documents]: bytes of UTF-8 text of each document

All numbers are little-endian.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from posbench.config import ConfigError, TrainConfig
from posbench.data.dataset import Batch, Dataset
from posbench.data.text.tokenizer import tokenizer_in
from posbench.system.files import read_json, sum_of, write_json

SPLITS = ("train", "validation", "test")


class DamagedCorpusError(Exception):
    """The files of a corpus are missing, or do not match its `corpus.json`."""


@dataclass(frozen=True)
class Split:
    """The tokens of one split of a corpus, document after document, mapped from disk."""

    name: str
    tokens: NDArray[Any]  # uint16 or uint32 [num_tokens], memory-mapped
    starts: NDArray[np.int64]  # [documents + 1], index of each document's first token, and the end
    document_bytes: NDArray[np.int64]  # [documents], bytes of UTF-8 text
    byte_lengths: NDArray[np.int32] | None  # [V], bytes of each token; None if the vocabulary is not byte-level

    @property
    def num_documents(self) -> int:
        return len(self.document_bytes)

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens, including one BOS per document."""
        return len(self.tokens)

    @cached_property
    def num_bytes(self) -> int:
        """Return the size of the text in bytes of UTF-8."""
        return int(self.document_bytes.sum())

    def document(self, number: int) -> NDArray[Any]:
        """Return the token ids of document `number`, BOS first."""
        return self.tokens[self.starts[number] : self.starts[number + 1]]

    def document_of(self, tokens: Any) -> Any:
        """Return the number of the document that holds each token; `tokens` are indices in the split."""
        return np.searchsorted(self.starts, tokens, side="right") - 1

    def token_bytes(self, lo: int, hi: int) -> int:
        """Return the bytes of text in tokens `lo` to `hi` (exclusive), without BOS.

        It is exact for byte-level vocabularies, and otherwise for whole documents.
        """
        if self.byte_lengths is not None:
            return int(self.byte_lengths[self.tokens[lo:hi]].sum(dtype=np.int64))
        # Otherwise each document's bytes are shared out evenly over its tokens.
        first, last = self.document_of([lo, hi])
        numbers = np.arange(first, min(last, self.num_documents - 1) + 1)
        texts_from = self.starts[numbers] + 1  # after the BOS
        # The tokens of each document between `lo` and `hi`, without its BOS; negative if there are none.
        counted = np.minimum(self.starts[numbers + 1], hi) - np.maximum(texts_from, lo)
        shares = np.maximum(counted, 0) / np.maximum(self.starts[numbers + 1] - texts_from, 1)
        return round(float((shares * self.document_bytes[numbers]).sum()))


class TextBatches:
    """Training batches that read all of a split once per epoch, in windows of `context_length + 1` tokens.

    An epoch cuts the stream into W windows of T + 1 tokens that begin T = `context_length` tokens apart. Sequence b of
    batch n, with s = n * batch_size + b, is window `order[s % W]` of epoch `s // W`; the seed and the epoch determine
    the order.

    Raises: ConfigError with the counts if the split is shorter than one window.
    """

    def __init__(self, split: Split, context_length: int, batch_size: int, seed: int) -> None:
        if split.num_tokens < context_length + 1:
            raise ConfigError(
                f"the {split.name} split has {split.num_tokens:,} tokens in {split.num_documents:,} documents, too few "
                f"for one window of {context_length + 1:,} (train.context_length={context_length} and one more): "
                f"shorten the context or give more text"
            )
        self.tokens = split.tokens
        self.context_length = context_length
        self.batch_size = batch_size
        self.seed = seed
        spare = split.num_tokens - 1  # tokens that can be a target
        # As many as fit after any offset below `context_length`.
        self.windows_per_epoch = max(1, (spare - context_length + 1) // context_length)
        # The first window begins at an offset drawn for each epoch, so that the cuts move.
        self._num_phases = min(context_length, spare - self.windows_per_epoch * context_length + 1)
        self._epoch = lru_cache(maxsize=2)(self._draw_epoch)

    def batch(self, n: int) -> Batch:
        """Return batch `n` of the run, tokens [B, T + 1]."""
        # A pure function of the seed, n and the tokens: a loader without state has nothing to save, so resuming is
        # exact.
        windows = [self.tokens[start : start + self.context_length + 1] for start in self.starts(n)]
        return Batch(np.stack(windows).astype(np.int64))

    def starts(self, n: int) -> list[int]:
        """Return the index in the split at which each window of batch `n` begins, [B]."""
        first = n * self.batch_size
        return [self._start(number) for number in range(first, first + self.batch_size)]

    def _start(self, number: int) -> int:
        epoch, place = divmod(number, self.windows_per_epoch)
        phase, order = self._epoch(epoch)
        return phase + int(order[place]) * self.context_length

    def _draw_epoch(self, epoch: int) -> tuple[int, NDArray[np.int64]]:
        """Return the offset of an epoch's first window, in tokens, and the order of its windows."""
        # NumPy promises that raw draws of a bit generator never change (NEP 19), but not that shuffles do not.
        draws = np.random.Philox(np.random.SeedSequence([self.seed, epoch])).random_raw(self.windows_per_epoch + 1)
        return int(draws[-1] % self._num_phases), np.argsort(draws[:-1], kind="stable")


@dataclass(frozen=True)
class CutBatches:
    """Batches whose windows are cut into shorter ones, with the same targets in the same order."""

    whole: TextBatches
    context_length: int  # tokens of a piece

    def batch(self, n: int) -> Batch:
        """Return batch `n` of the run, tokens [B, T + 1]."""
        tokens = self.whole.tokens
        # A piece begins with the last target of the piece before.
        pieces = [tokens[start : start + self.context_length + 1] for start in self.starts(n)]
        return Batch(np.stack(pieces).astype(np.int64))

    def starts(self, n: int) -> list[int]:
        """Return the index in the split at which each piece of batch `n` begins, [B]."""
        offsets = range(0, self.whole.context_length, self.context_length)
        return [start + offset for start in self.whole.starts(n) for offset in offsets]


@dataclass(eq=False)
class Corpus(Dataset):
    """Tokenized text with its tokenizer and its three splits, memory-mapped from `folder`."""

    unit: ClassVar[str] = "token"

    folder: Path
    bos_id: int
    has_exact_bytes: bool  # whether `Split.token_bytes` is exact within documents

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return tokenizer_in((self.folder / "tokenizer.json").read_bytes(), str(self.folder / "tokenizer.json"))

    def batches(self, train: TrainConfig, seed: int) -> TextBatches | CutBatches:
        drawn = train.drawn_length or train.context_length
        pieces = drawn // train.context_length
        batches = TextBatches(self.train, drawn, train.batch_size // pieces, seed)
        if pieces == 1:
            return batches
        return CutBatches(batches, train.context_length)

    @property
    def train(self) -> Split:
        return self.splits["train"]

    @property
    def validation(self) -> Split:
        return self.splits["validation"]

    @property
    def test(self) -> Split:
        return self.splits["test"]


class SplitWriter:
    """A writer that appends documents to the files of one split, in bounded memory."""

    def __init__(self, folder: Path, name: str, dtype: str, files: ExitStack) -> None:
        self.num_tokens = self.num_bytes = 0
        self._dtype = dtype
        self._text_hash = sha256()
        self._tokens, self._starts, self._bytes = (
            files.enter_context((folder / f"{name}.{kind}").open("wb")) for kind in ("tokens", "starts", "bytes")
        )
        self._starts.write(bytes(8))  # the first document begins at token 0

    def add(self, document: bytes, tokens: NDArray[Any]) -> None:
        """Append a document: its UTF-8 text, and its token ids, BOS first."""
        length = len(document).to_bytes(8, "little")
        # The length is hashed too, so that two documents do not hash like their concatenation.
        self._text_hash.update(length)
        self._text_hash.update(document)
        self.num_tokens += len(tokens)
        self.num_bytes += len(document)
        self._tokens.write(tokens.astype(self._dtype).tobytes())
        self._starts.write(self.num_tokens.to_bytes(8, "little"))
        self._bytes.write(length)

    @property
    def fingerprint(self) -> str:
        """Return the SHA-256, in hex, of the text added so far."""
        return self._text_hash.hexdigest()


def write_contents(corpus: Corpus, dtype: str) -> None:
    """Write `corpus.json`, after syncing the other files. Arguments: dtype, the token ids' type (`<u2`)."""
    facts = {name: value for name, value in vars(corpus).items() if name not in ("folder", "splits")}
    files = {path.name: [path.stat().st_size, sum_of(path, sync=True)] for path in sorted(corpus.folder.iterdir())}
    # Last, because a folder without it is no corpus.
    write_json(corpus.folder / "corpus.json", {"dtype": dtype, "corpus": facts, "files": files})


def open_corpus(folder: Path, check: bool = False) -> Corpus:
    """Return the corpus in `folder`, after comparing its files' sizes (with `check` their SHA-256 too).

    Raises: DamagedCorpusError, with the reason, if a file is missing or has changed.
    """
    try:
        contents = read_json(folder / "corpus.json")
        for name, (size, checksum) in contents["files"].items():
            if (folder / name).stat().st_size != size or (check and sum_of(folder / name) != checksum):
                raise DamagedCorpusError(f"{name} has changed")
        return Corpus(folder=folder, splits=open_splits(folder, contents["dtype"]), **contents["corpus"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedCorpusError(f"corpus.json: {error}") from error


def open_splits(folder: Path, dtype: str) -> dict[str, Split]:
    """Return the memory-mapped splits of the files in `folder`. Arguments: dtype, the token ids' type."""
    lengths, file = None, folder / "vocabulary.bytes"
    if file.exists():
        lengths = _map(file, "<i4")
    splits = {}
    for name in SPLITS:
        tokens = _map(folder / f"{name}.tokens", dtype)
        starts = _map(folder / f"{name}.starts", "<i8")
        num_bytes = _map(folder / f"{name}.bytes", "<i8")
        splits[name] = Split(name, tokens, starts, num_bytes, lengths)
    return splits


def _map(path: Path, dtype: str) -> NDArray[Any]:
    if path.stat().st_size == 0:
        return np.empty(0, dtype)  # an empty file cannot be mapped
    return np.memmap(path, dtype, mode="r")
