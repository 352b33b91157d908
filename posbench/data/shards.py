"""Files of numbers: the token shards of a corpus, written once, and memory-mapped ever after.

<cache>/corpora/<text>-<tokenizer>/    both fingerprints, shortened
    manifest.json          counts, fingerprints, overlap of the splits, and the size and SHA-256 of every file beside it
                           (sizes are compared when it is opened, the SHA-256 by `posbench prepare --check`)
    tokenizer.json
    vocabulary.bytes       int32 [V]: bytes of text each token stands for (byte-level vocabularies only)
    <split>.tokens         uint16 (uint32 for more than 65,536 entries): [BOS] + tokens, document after document
    <split>.starts         int64 [documents + 1]: where each document begins, and the end
    <split>.bytes          int64 [documents]: bytes of UTF-8 text of each document

All numbers are little-endian.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from posbench.data.splitting import SPLITS
from posbench.data.tokenization import load_tokenizer
from posbench.machine.files import read_json, sum_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FORMAT = 2


class DamagedCorpusError(Exception):
    """The folder does not hold what its manifest says."""


@dataclass(frozen=True)
class Split:
    """The documents of one split as one row of tokens."""

    name: str
    tokens: NDArray[Any]  # uint16 or uint32 [num_tokens], memory-mapped
    starts: NDArray[np.int64]  # [documents + 1]
    document_bytes: NDArray[np.int64]  # [documents]
    byte_lengths: NDArray[np.int32] | None  # [V]; None: the vocabulary does not tell

    @property
    def num_documents(self) -> int:
        return len(self.document_bytes)

    @property
    def num_tokens(self) -> int:
        """With one BOS a document."""
        return len(self.tokens)

    @cached_property
    def num_bytes(self) -> int:
        """Of text (UTF-8)."""
        return int(self.document_bytes.sum())

    def document(self, number: int) -> NDArray[Any]:
        """The tokens of one document, its BOS first."""
        return self.tokens[self.starts[number] : self.starts[number + 1]]

    def token_bytes(self, lo: int, hi: int) -> int:
        """Bytes of text that tokens `lo` to `hi` (exclusive) stand for; BOS counts 0.

        Exact for byte-level vocabularies. Otherwise each document's bytes are shared out evenly over its tokens, and
        the sum is rounded: exact for whole documents, an estimate within one.
        """
        if self.byte_lengths is not None:
            return int(self.byte_lengths[self.tokens[lo:hi]].sum(dtype=np.int64))
        first, last = np.searchsorted(self.starts, [lo, hi], side="right") - 1
        numbers = np.arange(first, min(last, self.num_documents - 1) + 1)
        texts_from = self.starts[numbers] + 1  # behind the BOS
        counted = np.minimum(self.starts[numbers + 1], hi) - np.maximum(texts_from, lo)
        shares = np.maximum(counted, 0) / np.maximum(self.starts[numbers + 1] - texts_from, 1)
        return round(float((shares * self.document_bytes[numbers]).sum()))


@dataclass(frozen=True)
class Corpus:
    """Tokenized text: the tokenizer and three splits, mapped from `folder`."""

    folder: Path
    manifest: Mapping[str, Any]
    splits: Mapping[str, Split]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.folder / "tokenizer.json")

    @property
    def vocab_size(self) -> int:
        return self.manifest["vocab_size"]

    @property
    def bos_id(self) -> int:
        return self.manifest["bos_id"]

    @property
    def fingerprint(self) -> str:
        """Of the text of every split, in order."""
        return self.manifest["fingerprint"]

    @property
    def tokenizer_fingerprint(self) -> str:
        return self.manifest["tokenizer_fingerprint"]

    @property
    def has_exact_bytes(self) -> bool:
        """Whether `Split.token_bytes` is exact within documents."""
        return self.manifest["exact_bytes"]

    @property
    def overlap(self) -> Mapping[str, Any]:
        """How much of the held-out text also occurs in train (`posbench.data.overlap`)."""
        return self.manifest["overlap"]

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
    """Appends documents to the files of one split, in bounded memory."""

    def __init__(self, folder: Path, name: str, dtype: str) -> None:
        self.name = name
        self.num_documents = self.num_tokens = self.num_bytes = 0
        self._dtype = dtype
        self._text_hash = sha256()
        self._files = {kind: _HashedFile(folder / f"{name}.{kind}") for kind in ("tokens", "starts", "bytes")}

    def add(self, document: bytes, tokens: NDArray[Any]) -> None:
        """One document: its UTF-8 text and its tokens, BOS first."""
        self._text_hash.update(len(document).to_bytes(8, "little"))
        self._text_hash.update(document)
        self._files["tokens"].write(tokens.astype(self._dtype).tobytes())
        self._files["starts"].write(self.num_tokens.to_bytes(8, "little"))
        self._files["bytes"].write(len(document).to_bytes(8, "little"))
        self.num_documents += 1
        self.num_tokens += len(tokens)
        self.num_bytes += len(document)

    def close(self) -> dict[str, Any]:
        """Sync the files and describe them for the manifest."""
        self._files["starts"].write(self.num_tokens.to_bytes(8, "little"))
        return {
            "documents": self.num_documents,
            "tokens": self.num_tokens,
            "bytes": self.num_bytes,
            "fingerprint": self._text_hash.hexdigest(),
            "dtype": self._dtype,
            "files": {file.path.name: file.close() for file in self._files.values()},
        }


class _HashedFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._hash = sha256()
        self._file = path.open("wb")

    def write(self, data: bytes) -> None:
        self._hash.update(data)
        self._file.write(data)

    def close(self) -> dict[str, Any]:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return {"size": self.path.stat().st_size, "sha256": self._hash.hexdigest()}


def write_file(path: Path, data: bytes) -> dict[str, Any]:
    """Write a small file of a corpus and describe it for the manifest."""
    file = _HashedFile(path)
    file.write(data)
    return file.close()


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """The last file written."""
    write_file(folder / "manifest.json", json.dumps(manifest, indent=2).encode())


def open_corpus(folder: Path, check: bool = False) -> Corpus:
    """Map the corpus in `folder` after comparing the sizes of its files; with `check`, their SHA-256 too.

    Raises: DamagedCorpusError with the reason.
    """
    manifest = read_manifest(folder)
    try:
        entries = [*manifest["files"].items(), *(f for s in manifest["splits"].values() for f in s["files"].items())]
        for name, expected in entries:
            size = (folder / name).stat().st_size
            if size != expected["size"]:
                raise DamagedCorpusError(f"{name} has {size:,} bytes instead of {expected['size']:,}")
            if check and sum_of(folder / name) != expected["sha256"]:
                raise DamagedCorpusError(f"the bytes of {name} have changed")
        lengths = _map(folder / "vocabulary.bytes", "<i4") if manifest["exact_bytes"] else None
        splits = {name: open_split(folder, name, manifest["splits"][name], lengths) for name in SPLITS}
    except OSError as error:
        raise DamagedCorpusError(f"{error.filename}: {error.strerror}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise DamagedCorpusError(f"manifest.json cannot be read: {error}") from error
    return Corpus(folder, manifest, splits)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The counts and checksums of a corpus. Raises: DamagedCorpusError with the reason."""
    try:
        manifest: dict[str, Any] = read_json(folder / "manifest.json")
        if manifest["format"] != FORMAT:
            raise DamagedCorpusError(f"it is of format {manifest['format']}, not {FORMAT}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedCorpusError(f"manifest.json cannot be read: {error}") from error
    return manifest


def open_split(folder: Path, name: str, entry: Mapping[str, Any], lengths: NDArray[np.int32] | None) -> Split:
    """Map the files of one split as `entry` of the manifest describes them; `lengths`: bytes of each token."""
    return Split(
        name=name,
        tokens=_map(folder / f"{name}.tokens", entry["dtype"]),
        starts=_map(folder / f"{name}.starts", "<i8"),
        document_bytes=_map(folder / f"{name}.bytes", "<i8"),
        byte_lengths=lengths,
    )


def _map(path: Path, dtype: str) -> NDArray[Any]:
    if path.stat().st_size == 0:
        return np.empty(0, dtype)  # an empty file cannot be mapped
    return np.memmap(path, dtype, mode="r")
