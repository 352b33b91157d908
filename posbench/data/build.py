"""Documents in, the files of a corpus out: one pass over the text (a second over its tokens), in bounded memory.

The head of the train text is kept while the tokenizer is trained on it, and encoded first; everything behind it streams
from the source through the tokenizer into the files.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import sha256
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from posbench.config import Config, ConfigError
from posbench.data import tokenization
from posbench.data.overlap import measure_overlap, overlap_warning
from posbench.data.shards import FORMAT, SplitWriter, open_split, write_file, write_manifest
from posbench.data.sources import Source
from posbench.data.splitting import SPLITS, WHOLE, split_of, tuning_split

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Item = TypeVar("Item")

_BATCH_CHARACTERS = 1 << 21  # of text encoded at a time
_FOREIGN = ("file", "hub")  # kinds of tokenizer that may lose a part of the text
_MEASURED = 50  # documents by which that is measured
_NOTICE_SECONDS = 10.0  # between words about a long preparation


def write_corpus(config: Config, source: Source, folder: Path, notice: Callable[[str], None]) -> dict[str, Any]:
    """Read every document once and write the files of the corpus to `folder`. Returns its manifest.

    Raises: ConfigError where the text cannot be had, or leaves a split empty.
    """
    started = time.monotonic()
    for remark in source.remarks():
        notice(remark)
    streams = source.streams()
    source.check()
    documents = Documents(source, streams)
    head: list[tuple[str, str]] = []
    sample = _sample(documents, head, config.tokenizer.training_bytes)
    tokenizer = tokenization.TOKENIZERS[config.tokenizer.kind](config.tokenizer, sample)
    named = config.tokenizer.path or config.tokenizer.name or f"tokenizer={config.tokenizer.kind}"
    tokenizer.encode_special_tokens = True
    bos = tokenization.find_bos(tokenizer)
    assert bos is not None
    vocab_size = tokenization.vocab_size(tokenizer)
    lengths = tokenization.byte_lengths(tokenizer)
    if config.tokenizer.kind in _FOREIGN:
        # They do not train on text, so nothing was read yet.
        head += islice(documents, _MEASURED)
        measured = (next(tokenization.pieces(text)) for _, text in head)
        if loss := tokenization.loss_of(tokenizer, measured, named).describe(named):
            notice(loss)
    writers = {name: SplitWriter(folder, name, "<u2" if vocab_size <= 1 << 16 else "<u4") for name in SPLITS}
    told = started
    for split, document, tokens in encoded(tokenizer, bos, chain(head, documents), named):
        if split == "train" and documents.train_is_full:
            continue
        writers[split].add(document, tokens)
        if lengths is not None and int(lengths[tokens].sum()) != len(document):
            lengths = None  # a normalizer is at work: the tokens do not stand for the bytes that were read
        if config.data.token_budget is not None and writers["train"].num_tokens >= config.data.token_budget:
            documents.train_is_full = True
        if time.monotonic() - told > _NOTICE_SECONDS:
            told = time.monotonic()
            megabytes = sum(writer.num_bytes for writer in writers.values()) / 1e6
            notice(f"tokenizing {source.describe(split)}: {megabytes:,.0f} MB of text in {told - started:.0f} s")
    splits = {name: writer.close() for name, writer in writers.items()}
    _check_splits(source, streams, splits, notice)
    mapped = {name: open_split(folder, name, entry, None) for name, entry in splits.items()}
    overlap = measure_overlap(tokenizer, mapped, source.name)
    files = {"tokenizer.json": write_file(folder / "tokenizer.json", tokenizer.to_str().encode())}
    if lengths is not None:
        files["vocabulary.bytes"] = write_file(folder / "vocabulary.bytes", lengths.astype("<i4").tobytes())
    manifest = {
        "format": FORMAT,
        "fingerprint": sha256(json.dumps([splits[name]["fingerprint"] for name in SPLITS]).encode()).hexdigest(),
        "tokenizer_fingerprint": tokenization.fingerprint(tokenizer),
        "vocab_size": vocab_size,
        "bos_id": bos,
        "exact_bytes": lengths is not None,
        "overlap": overlap,
        "splits": splits,
        "files": files,
    }
    write_manifest(folder, manifest)
    warning = overlap_warning(overlap, config.data.name)
    notice("\n".join([_summary(config, source, manifest, time.monotonic() - started), *warning]))
    return manifest


class Documents:
    """All documents of a source with their splits, the train stream first. Blank ones are left out.

    Set `train_is_full` when enough has been read: the train stream then ends, and the other streams follow.
    """

    def __init__(self, source: Source, streams: Mapping[str, Iterable[str]]) -> None:
        self.train_is_full = False
        self._documents = self._read(source, streams)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return self._documents

    def _read(self, source: Source, streams: Mapping[str, Iterable[str]]) -> Iterator[tuple[str, str]]:
        fractions = {name: getattr(source.config, f"{name}_fraction") for name in source.cut}
        tuning = source.config.tuning_fraction if source.by_document else 0.0
        for name in ("train",) if tuning else SPLITS:
            for text in streams.get(name, ()):
                if name == "train" and self.train_is_full:
                    break
                if text and not text.isspace():
                    split = split_of(text.encode(), fractions) if name == "train" else name
                    of_tuning = tuning_split(split, text.encode(), tuning)
                    if of_tuning is not None:
                        yield of_tuning, text


def _sample(documents: Documents, head: list[tuple[str, str]], num_bytes: int) -> Iterator[str]:
    """The first `num_bytes` or so of train text in pieces; every document read on the way is kept in `head`."""
    sampled = 0
    for split, text in documents:
        head.append((split, text))
        for piece in tokenization.pieces(text) if split == "train" else ():
            yield piece
            sampled += len(piece.encode())
            if sampled >= num_bytes:
                return


def encoded(
    tokenizer: Tokenizer, bos: int, documents: Iterable[tuple[str, str]], named: str = "the tokenizer"
) -> Iterator[tuple[str, bytes, NDArray[np.uint32]]]:
    """(split, text in UTF-8, [BOS] + tokens) of each document, a batch of pieces at a time on all cores."""
    for batch in _batched(documents, lambda document: len(document[1])):
        cut = [list(tokenization.pieces(text)) for _, text in batch]
        tokens_of_pieces = _encode_pieces(tokenizer, bos, list(chain.from_iterable(cut)), named)
        for (split, text), parts in zip(batch, cut, strict=True):
            tokens = [np.array([bos], np.uint32), *(next(tokens_of_pieces) for _ in parts)]
            yield split, text.encode(), np.concatenate(tokens)


def _encode_pieces(tokenizer: Tokenizer, bos: int, pieces: list[str], named: str) -> Iterator[NDArray[np.uint32]]:
    for batch in _batched(pieces, len):  # again, for the batch that is one very long document
        with tokenization.panics_explained(named):
            encodings = tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        for encoding in encodings:
            tokens = np.array(encoding.ids, np.uint32)
            if (tokens == bos).any():
                raise ConfigError(
                    f"the tokenizer turns ordinary text into {tokenizer.id_to_token(bos)!r}, which may only mark "
                    "the beginning of a document: mark it as special in tokenizer.json, or use tokenizer=bpe"
                )
            yield tokens


def _batched(items: Iterable[Item], characters: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Lists of items that reach `_BATCH_CHARACTERS` together."""
    batch: list[Item] = []
    total = 0
    for item in items:
        batch.append(item)
        total += characters(item)
        if total >= _BATCH_CHARACTERS:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


def _check_splits(
    source: Source, streams: Iterable[str], splits: dict[str, Any], notice: Callable[[str], None]
) -> None:
    """Refuse an empty split that should have text; tell of one that was left empty on purpose."""
    documents = {name: splits[name]["documents"] for name in SPLITS}
    tuning = source.config.tuning_fraction
    if tuning and not documents["validation"]:
        raise ConfigError(
            f"data.tuning_fraction={tuning:g} of the {documents['train']:,} documents of "
            f"{source.describe('train')} leaves none to score pilots on: raise it, or give more documents"
        )
    wanted = SPLITS if source.is_trained_on else streams
    for name in (name for name in wanted if not documents[name] and not tuning):
        fraction = getattr(source.config, f"{name}_fraction", None)
        if not any(documents.values()) or (name in streams and not (name == "train" and source.cut)):
            raise ConfigError(f"{source.describe(name)} has no text, every document is empty or blank: give other text")
        if name not in streams and (name not in source.cut or fraction == 0):
            notice(
                f"there is no {name} text ({source.describe(name)}): commands that need the {name} split will refuse"
            )
            continue
        counts = ", ".join(f"{name} {number:,}" for name, number in documents.items())
        total = sum(documents.values())
        raise ConfigError(
            f"{source.describe(name)} has {total:,} document{'s' * (total != 1)} ({counts}). "
            f"Splits are whole documents, chosen by a hash of each, and there is no {name} text: name the files "
            "of each split (data=files data.train_path=... data.validation_path=... data.test_path=...), give more "
            "documents (each text file is one, and each row of JSONL or parquet; data.cut_bytes=100000 cuts text files)"
            + (f", raise data.{name}_fraction={fraction:g}" if fraction else "")
            + (", or raise data.token_budget" if source.config.token_budget is not None else "")
        )


def _summary(config: Config, source: Source, manifest: dict[str, Any], seconds: float) -> str:
    splits = manifest["splits"]
    if not source.is_trained_on:
        splits = {name.replace("train", WHOLE): split for name, split in splits.items() if split["documents"]}
    counts = "; ".join(
        f"{name} {split['documents']:,} documents, {split['tokens']:,} tokens" for name, split in splits.items()
    )
    vocabulary = f"vocabulary {manifest['vocab_size']:,}"
    if config.tokenizer.kind == "bpe" and manifest["vocab_size"] < config.tokenizer.vocab_size:
        vocabulary += f" (the text is too short for tokenizer.vocab_size={config.tokenizer.vocab_size})"
    return f"prepared data={config.data.name} in {seconds:.1f} s: {counts}; {vocabulary}"
