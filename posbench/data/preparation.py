"""Prepare the text of a configuration once, and find it again at once: reading, tokenizing, and the cache between runs.

    <cache>/index/<request>.json    a request (what was asked for, and what the source was recognised by) -> its corpus
    <cache>/corpora/<corpus>/       see `shards`
    <cache>/locks/                  one process prepares a request, others wait for it

A corpus is made in a folder beside and renamed when whole. It is checked each time it is opened; a damaged one is made again.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from posbench.config import Config, ConfigError
from posbench.data import tokenization
from posbench.data.shards import FORMAT, Corpus, DamagedCorpus, SplitWriter, open_corpus, write_file, write_manifest
from posbench.data.sources import SOURCES, Source
from posbench.data.splitting import SPLITS, split_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Notice = Callable[[str], None]
_BATCH_CHARACTERS = 1 << 22  # of text encoded at a time
_NOTICE_SECONDS = 10.0  # between words about a long preparation


def say(message: str) -> None:
    """Print to standard error."""
    print(message, file=sys.stderr, flush=True)


def prepare(config: Config, quiet: bool = False, notice: Notice = say) -> Corpus:
    """The tokenized text of this configuration: from the cache where it is whole, else read, tokenized and kept there.

    Arguments: `notice` is told of everything that takes long or was not expected, unless `quiet`.
    Raises: ConfigError where the text or the tokenizer cannot be had, or the cache cannot be written.
    """
    if quiet:
        notice = _silent
    source = SOURCES[config.data.source](config.data)
    cache = cache_folder(config.data.cache_dir)
    request = _request(config, source)
    corpus = _find(cache, request, notice)
    if corpus is not None:
        return corpus
    try:
        return _prepare_alone(config, source, cache, request, notice)
    except OSError as error:
        raise ConfigError(
            f"the token cache {cache} cannot be written ({error.strerror or error}): make room or set data.cache_dir=... "
            "(or POSBENCH_CACHE) to a folder that can be"
        ) from error


def cache_folder(cache_dir: str | None) -> Path:
    """`cache_dir`, else $POSBENCH_CACHE, else `posbench` in the user's cache folder."""
    named = cache_dir or os.environ.get("POSBENCH_CACHE")
    if named:
        return Path(named).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "posbench"


def _silent(message: str) -> None:
    pass


def _request(config: Config, source: Source) -> str:
    """A hash of everything that decides what the corpus will be, made without reading text."""
    data = {key: value for key, value in asdict(config.data).items() if key not in ("name", "cache_dir")}
    tokenizer = asdict(config.tokenizer)
    if config.tokenizer.kind == "file":
        tokenizer["content"] = tokenization.fingerprint(tokenization.read_file(config.tokenizer, []))
    wanted = {"format": FORMAT, "data": data, "source": source.identity(), "tokenizer": tokenizer}
    return sha256(json.dumps(wanted, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _find(cache: Path, request: str, notice: Notice) -> Corpus | None:
    """The corpus that answered this request before, if it is still whole."""
    try:
        name = json.loads((cache / "index" / f"{request}.json").read_bytes())["corpus"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    folder = cache / "corpora" / Path(name).name
    try:
        return open_corpus(folder)
    except DamagedCorpus as damage:
        notice(f"the token cache {folder} is damaged ({damage}): making it again")
        return None


def _prepare_alone(config: Config, source: Source, cache: Path, request: str, notice: Notice) -> Corpus:
    from filelock import FileLock, Timeout

    for name in ("index", "corpora", "locks"):
        (cache / name).mkdir(parents=True, exist_ok=True)
    lock = FileLock(cache / "locks" / f"{request}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        notice("another process is preparing this text: waiting for it")
        lock.acquire()
    try:
        made_meanwhile = _find(cache, request, _silent)
        return made_meanwhile or _make(config, source, cache, request, notice)
    finally:
        lock.release()


def _make(config: Config, source: Source, cache: Path, request: str, notice: Notice) -> Corpus:
    beside = cache / "corpora" / f".{request}.unfinished"
    shutil.rmtree(beside, ignore_errors=True)  # what a killed process left
    beside.mkdir()
    try:
        manifest = _write(config, source, beside, notice)
        name = f"{manifest['fingerprint'][:16]}-{manifest['tokenizer_fingerprint'][:16]}"
        corpus = _publish(beside, cache / "corpora" / name)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    index = cache / "index" / f"{request}.json"
    written = index.with_suffix(f".{os.getpid()}.tmp")
    written.write_text(json.dumps({"corpus": name}))
    written.replace(index)
    return corpus


def _publish(beside: Path, folder: Path) -> Corpus:
    """Rename to the final place, unless another request has led to the same corpus and it is whole."""
    from filelock import FileLock

    with FileLock(folder.parent.parent / "locks" / "publish.lock"):
        with suppress(DamagedCorpus):
            return open_corpus(folder)
        shutil.rmtree(folder, ignore_errors=True)
        beside.rename(folder)
    return open_corpus(folder)


def _write(config: Config, source: Source, folder: Path, notice: Notice) -> dict[str, Any]:
    """Read all documents once and write the files of the corpus. Returns its manifest."""
    started = time.monotonic()
    documents = Documents(source)
    head: list[tuple[str, str]] = []  # read for the tokenizer, and encoded first
    tokenizer = tokenization.TOKENIZERS[config.tokenizer.kind](
        config.tokenizer, _sample(documents, head, config.tokenizer.training_bytes)
    )
    tokenizer.encode_special_tokens = True
    bos = tokenization.find_bos(tokenizer)
    assert bos is not None
    lengths = tokenization.byte_lengths(tokenizer)
    size = tokenization.vocab_size(tokenizer)
    writers = {name: SplitWriter(folder, name, "<u2" if size <= 1 << 16 else "<u4") for name in SPLITS}
    told = started
    for split, document, tokens in encoded(tokenizer, bos, chain(head, documents)):
        if split == "train" and documents.train_is_full:
            continue
        writers[split].add(document, tokens)
        if lengths is not None and int(lengths[tokens].sum()) != len(document):
            lengths = None  # a normalizer is at work: tokens do not stand for the bytes that were read
        budget = config.data.token_budget
        documents.train_is_full = budget is not None and writers["train"].num_tokens >= budget
        if time.monotonic() - told > _NOTICE_SECONDS:
            told = time.monotonic()
            read = sum(writer.num_bytes for writer in writers.values())
            notice(f"tokenizing: {read / 1e6:,.0f} MB of text in {told - started:.0f} s")
    splits = {name: writer.close() for name, writer in writers.items()}
    _check_splits(config, source, splits)
    files = {"tokenizer.json": write_file(folder / "tokenizer.json", tokenizer.to_str().encode())}
    if lengths is not None:
        files["vocabulary.bytes"] = write_file(folder / "vocabulary.bytes", lengths.astype("<i4").tobytes())
    manifest = {
        "format": FORMAT,
        "fingerprint": sha256(json.dumps([splits[name]["fingerprint"] for name in SPLITS]).encode()).hexdigest(),
        "tokenizer_fingerprint": tokenization.fingerprint(tokenizer),
        "vocab_size": size,
        "bos_id": bos,
        "exact_bytes": lengths is not None,
        "splits": splits,
        "files": files,
    }
    write_manifest(folder, manifest)
    notice(_summary(config, manifest, time.monotonic() - started))
    return manifest


class Documents:
    """All documents of a source with their splits, train stream first. Blank ones are left out.

    Set `train_is_full` when enough has been read: the train stream then ends, and other streams follow.
    """

    def __init__(self, source: Source) -> None:
        self.train_is_full = False
        self._source = source
        self._documents = self._read()

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return self._documents

    def _read(self) -> Iterator[tuple[str, str]]:
        config = self._source.config
        fractions = {name: getattr(config, f"{name}_fraction") for name in self._source.cut}
        streams = self._source.streams()
        for name in SPLITS:
            for text in streams.get(name, ()):
                if name == "train" and self.train_is_full:
                    break
                if text and not text.isspace():
                    yield (split_of(text.encode(), fractions) if name == "train" else name), text


def _sample(documents: Documents, head: list[tuple[str, str]], num_bytes: int) -> Iterator[str]:
    """The first `num_bytes` or so of train text in pieces, every document read for them kept in `head`."""
    sampled = 0
    for split, text in documents:
        head.append((split, text))
        for piece in tokenization.pieces(text) if split == "train" else ():
            yield piece
            sampled += len(piece.encode())
            if sampled >= num_bytes:
                return


def encoded(
    tokenizer: Tokenizer, bos: int, documents: Iterable[tuple[str, str]]
) -> Iterator[tuple[str, bytes, NDArray[np.int64]]]:
    """(split, text in UTF-8, [BOS] + tokens) of each document, encoded on all cores a batch of pieces at a time."""
    batch: list[tuple[str, str]] = []
    characters = 0
    for split, text in documents:
        batch.append((split, text))
        characters += len(text)
        if characters >= _BATCH_CHARACTERS:
            yield from _encoded_batch(tokenizer, bos, batch)
            batch, characters = [], 0
    yield from _encoded_batch(tokenizer, bos, batch)


def _encoded_batch(
    tokenizer: Tokenizer, bos: int, batch: list[tuple[str, str]]
) -> Iterator[tuple[str, bytes, NDArray[np.int64]]]:
    cut = [list(tokenization.pieces(text)) for _, text in batch]
    encodings = iter(tokenizer.encode_batch_fast(list(chain.from_iterable(cut)), add_special_tokens=False))
    for (split, text), parts in zip(batch, cut, strict=True):
        tokens = np.concatenate([[bos], *(np.array(next(encodings).ids, np.int64) for _ in parts)])
        if (tokens[1:] == bos).any():
            raise ConfigError(
                f"the tokenizer turns ordinary text into its own token {tokenizer.id_to_token(bos)!r}, which must stand for the "
                "beginning of a document alone: mark it as special in tokenizer.json, or take tokenizer=bpe"
            )
        yield split, text.encode(), tokens


def _check_splits(config: Config, source: Source, splits: dict[str, Any]) -> None:
    counts = ", ".join(f"{name} {splits[name]['documents']:,}" for name in SPLITS)
    if not any(splits[name]["documents"] for name in SPLITS):
        raise ConfigError(f"data={config.data.name} holds no text: every document is empty or blank")
    for name in SPLITS:
        if splits[name]["documents"]:
            continue
        raise ConfigError(f"the {name} split came out empty (documents: {counts})")


def _summary(config: Config, manifest: dict[str, Any], seconds: float) -> str:
    counts = "; ".join(
        f"{name} {split['documents']:,} documents, {split['tokens']:,} tokens"
        for name, split in manifest["splits"].items()
    )
    return f"prepared data={config.data.name} in {seconds:.1f} s: {counts}; vocabulary {manifest['vocab_size']:,}"
