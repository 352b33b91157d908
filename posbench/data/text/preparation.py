"""Prepare the text of a configuration once, and find it again at once: read, tokenize, and keep the tokens in a cache.

    <cache>/corpora/<request>/           a corpus (corpus.py); the request is a hash of what was asked
                                         for, and of what the source is recognised by
    <cache>/corpora/<request>.lock       one process prepares a text, others wait for it
    .../<request>/overlap-<another>.json how much of this text also occurs in another that models were trained on

A corpus is made in a folder beside and renamed when it is whole.
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

from filelock import FileLock
from tokenizers import Tokenizer

from posbench.config import Config, ConfigError
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
from posbench.data.text.overlap import WARN_ABOVE, measure_overlap
from posbench.data.text.sotu import Sotu
from posbench.data.text.sources import Files, Hub, Source, Splitter
from posbench.data.text.stdlib import StandardLibrary
from posbench.data.text.tokenizer import (
    TOKENIZERS,
    bos_token,
    byte_lengths,
    encoded,
    file_content,
    find_bos,
    fingerprint,
    pieces,
    vocab_size,
)
from posbench.system.console import Say, say
from posbench.system.files import folder_beside, publish_folder

SOURCES: dict[str, type[Source]] = {"sotu": Sotu, "stdlib": StandardLibrary, "files": Files, "hub": Hub}
FEW_DOCUMENTS = 3  # of a split: its loss says little about other text
_LONG = 200_000  # bytes of a document on average: data.cut_bytes=100000 makes more of them
WHOLE = "whole"  # a text that is scored and was not split
_FORMAT = 4
_MEASURED = 50  # documents by which is measured what a tokenizer loses
_NOTICE_SECONDS = 10.0  # between lines about a long preparation
# Fields that do not decide what the text is; the paths are in the source's identity.
_NOT_TEXT = {"name", "cache_dir", "path", "train_path", "validation_path", "test_path", "document_mask"}


def prepare(config: Config, notice: Say = say, check: bool = False, held_out: bool = False) -> Corpus:
    """The tokenized text of this configuration: from the cache where it is whole, else read, tokenized and kept there.

    Arguments: notice, called with lines about what takes long or is worth a warning; check, whether
    every byte of the cache is compared with its checksum, and not the sizes of files alone.
    Raises: ConfigError where the text or the tokenizer cannot be had, or the cache cannot be written, and for a task.
    """
    if config.is_task:
        raise ConfigError(
            f"data={config.data.name} is a task, whose problems are drawn while training: nothing to prepare"
        )
    source = SOURCES[config.data.source](config.data)
    folder = _folder(config, source, held_out)
    with suppress(DamagedCorpusError):
        return open_corpus(folder, check)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"), folder_beside(folder) as beside:
            try:
                return open_corpus(folder, check)  # made meanwhile
            except DamagedCorpusError as damage:
                if folder.exists():
                    notice(f"the token cache {folder} is damaged ({damage}): making it again")
            _write_corpus(config, source, beside, notice, held_out)
            publish_folder(beside, folder)
        return open_corpus(folder)
    except OSError as error:
        raise ConfigError(
            f"the token cache {folder.parent} cannot be written ({error.strerror or error}): make room, or set "
            "data.cache_dir (or POSBENCH_CACHE) to a folder that can be written"
        ) from error


def prepare_held_out(config: Config, notice: Say = say) -> Corpus:
    """The text of this configuration to score models on that were trained on another; the tokenizer is one of a file.

    Returns: a corpus whose validation and test splits are those of the source, one for the other where it has only one
    of the two, and both the whole text where it has none. The train text of a source with held-out splits is not read.
    Raises: as `prepare`.
    """
    corpus = prepare(config, notice, held_out=True)
    given = [split for split in (corpus.validation, corpus.test) if split.num_documents]
    splits = given or [replace(corpus.train, name=WHOLE)]
    return replace(corpus, splits={**corpus.splits, "validation": splits[0], "test": splits[-1]})


def find_prepared(config: Config) -> Corpus | None:
    """Return the text of this configuration if it is whole in the cache, else None, as for a task. Nothing is made."""
    with suppress(ConfigError, OSError, DamagedCorpusError):  # `prepare` says what is wrong
        if not config.is_task:
            return open_corpus(_folder(config, SOURCES[config.data.source](config.data), held_out=False))
    return None


def cache_folder(cache_dir: str | None) -> Path:
    """`cache_dir`, else $POSBENCH_CACHE, else `posbench` in the user's cache folder."""
    place = cache_dir or os.environ.get("POSBENCH_CACHE")
    return Path(place or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/posbench").expanduser().absolute()


def warnings(corpus: Corpus, data: str) -> list[str]:
    """Lines about a text whose losses say less than they seem to. Arguments: data, the name of the text."""
    total, lines = sum(split.num_documents for split in corpus.splits.values()), []
    counts = {name: corpus.splits[name].num_documents for name in SPLITS[1:]}
    if few := [name for name, n in counts.items() if 0 < n < FEW_DOCUMENTS]:
        is_long = sum(split.num_bytes for split in corpus.splits.values()) > _LONG * total
        listed = " and ".join(f"{name} has {counts[name]} of {total:,} documents" for name in few)
        lines.append(
            f"{listed}, so a loss there says little about other text: give more documents, "
            f"{'cut text files (data.cut_bytes=100000), ' if is_long else ''}"
            f"or raise {' and '.join(f'data.{name}_fraction' for name in few)}"
        )
    shares = {name: split["share"] for name, split in corpus.overlap["splits"].items()}
    much = [f"{share:.1%} of {name}" for name, share in shares.items() if share > WARN_ABOVE]
    if much:
        lines.append(
            f"{' and '.join(much)} also occur in train (more than {WARN_ABOVE:.0%}), so a low loss there is partly "
            "memory: remove copies of documents, or keep them in one split (posbench prepare names the worst documents)"
        )
    return [f"warning: data={data}: {line}" for line in lines]


def _folder(config: Config, source: Source, held_out: bool) -> Path:
    """Where the corpus of a configuration lies: named by all that decides what it will be; no text is read."""
    data = {key: value for key, value in asdict(config.data).items() if key not in _NOT_TEXT}
    tokenizer = asdict(config.tokenizer)
    if config.tokenizer.path is not None:
        tokenizer["path"] = sha256(file_content(config.tokenizer)).hexdigest()
        if bos := bos_token(config.tokenizer):
            tokenizer["bos_token"] = bos
    request = [_FORMAT, data, source.identity(), tokenizer, held_out]
    name = sha256(json.dumps(request, sort_keys=True, default=str).encode()).hexdigest()[:32]
    return cache_folder(config.data.cache_dir) / "corpora" / name


def _write_corpus(
    config: Config,
    source: Source,
    folder: Path,
    notice: Say,
    held_out: bool,
    splitter: Splitter | None = None,
) -> None:
    """Read every document once and write the files of the corpus to `folder`, in bounded memory.

    The head of the train text is kept while the tokenizer is trained on it, and encoded first; everything behind it
    streams from the source through the tokenizer into the files. If a split stays empty, which only happens with few
    documents, all of this is done again with a `splitter` that fills it.
    Raises: ConfigError where the text cannot be had, or leaves a split empty.
    """
    started = time.monotonic()
    if splitter is None:
        fractions = {} if held_out else {name: getattr(config.data, f"{name}_fraction") for name in source.cut}
        splitter = Splitter(fractions, config.data.tuning_fraction if source.by_document and not held_out else 0.0)
        if source.skipped:
            notice(f"skipped {source.kinds_skipped()} files; to read them as text: data.path='FOLDER/**/*.SUFFIX'")
        if not held_out and (sentence := source.cut_few_files()):
            notice(sentence)
    streams = source.streams()
    if held_out:
        streams = {split: texts for split, texts in streams.items() if split != "train"} or streams
    budget, writers = config.data.token_budget, dict[str, SplitWriter]()

    def is_full() -> bool:
        return budget is not None and "train" in writers and writers["train"].num_tokens >= budget

    documents = _documents(streams, splitter, is_full)
    head: list[tuple[str, str]] = []
    sample = _sample(documents, head, config.tokenizer.training_bytes, notice)
    tokenizer = TOKENIZERS[config.tokenizer.kind](config.tokenizer, sample)
    tokenizer.encode_special_tokens = True
    if config.tokenizer.kind in ("file", "hub"):  # not trained on this text, of which nothing was read yet
        head += islice(documents, _MEASURED)
        _check_kept(config, tokenizer, head, notice)
    bos, entries, lengths = find_bos(tokenizer), vocab_size(tokenizer), byte_lengths(tokenizer)
    assert bos is not None
    dtype = "<u2" if entries <= 1 << 16 else "<u4"
    began = last_notice = time.monotonic()
    with ExitStack() as files:
        writers |= {name: SplitWriter(folder, name, dtype, files) for name in SPLITS}
        for split, document, tokens in encoded(tokenizer, bos, chain(head, documents)):
            if split == "train" and is_full():
                continue
            writers[split].add(document, tokens)
            if lengths is not None and int(lengths[tokens].sum()) != len(document):
                lengths = None  # a normalizer is at work: the tokens do not stand for the bytes that were read
            if time.monotonic() - last_notice > _NOTICE_SECONDS:
                last_notice = time.monotonic()
                megabytes = sum(writer.num_bytes for writer in writers.values()) / 1e6
                notice(f"tokenizing data={config.data.name}: {megabytes:,.1f} MB in {last_notice - began:.0f} s")
    if not is_full() and (empty := splitter.fill()):  # what a budget leaves unread depends on the tokenizer
        notice(
            f"data={config.data.name}: no document falls into {' or '.join(sorted(empty))} by its hash, so those with "
            "the nearest hashes go there"
        )
        source.repaired = 0
        return _write_corpus(config, source, folder, notice, held_out, splitter)
    if source.repaired:
        notice(f"data={config.data.name}: half a surrogate pair became U+FFFD in {source.repaired:,} documents")
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    if lengths is not None:
        (folder / "vocabulary.bytes").write_bytes(lengths.astype("<i4").tobytes())
    splits = open_splits(folder, dtype)
    _check_splits(source, streams, splits, notice, held_out)
    corpus = Corpus(
        folder=folder,
        splits=splits,
        fingerprint=sha256(json.dumps([writers[name].fingerprint for name in SPLITS]).encode()).hexdigest(),
        tokenizer_fingerprint=fingerprint(tokenizer),
        vocab_size=entries,
        bos_id=bos,
        has_exact_bytes=lengths is not None,
        overlap=measure_overlap(tokenizer, splits),
    )
    write_contents(corpus, dtype)
    counts = "; ".join(
        f"{WHOLE if held_out and name == 'train' else name} {split.num_documents:,} documents, "
        f"{split.num_tokens:,} tokens"
        for name, split in splits.items()
        if split.num_documents or not held_out
    )
    summary = (
        f"prepared data={config.data.name} in {time.monotonic() - started:.1f} s: {counts}; vocabulary {entries:,}"
    )
    notice("\n".join([summary, *warnings(corpus, config.data.name)]))


def _documents(
    streams: Mapping[str, Iterable[str]], splitter: Splitter, is_full: Callable[[], bool]
) -> Iterator[tuple[str, str]]:
    """(split, text) of all documents that are not blank, the train stream first, which ends when `is_full`."""
    for name in SPLITS[:1] if splitter.tuning else SPLITS:
        for text in streams.get(name, ()):
            if name == "train" and is_full():
                break
            if text and not text.isspace():
                split = splitter.split(text.encode()) if name == "train" else name
                if split is not None:
                    yield split, text


def _sample(
    documents: Iterator[tuple[str, str]], head: list[tuple[str, str]], num_bytes: int, notice: Say
) -> Iterator[str]:
    """The first `num_bytes` or so of train text in pieces; every document read on the way is kept in `head`."""
    sampled = 0
    for split, text in documents:
        head.append((split, text))
        for piece in pieces(text) if split == "train" else ():
            yield piece
            sampled += len(piece.encode())
            if sampled >= num_bytes:
                notice(f"training the tokenizer on the first {sampled / 1e6:,.1f} MB of train text")
                return


def _check_kept(config: Config, tokenizer: Tokenizer, head: list[tuple[str, str]], notice: Say) -> None:
    """Say how many of the first documents the tokenizer does not give back."""
    texts = [next(pieces(text)) for _, text in head]
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    decoded = [tokenizer.decode(each, skip_special_tokens=False) for each in ids]
    changed = sum(a.removeprefix(" ") != b.removeprefix(" ") for a, b in zip(texts, decoded, strict=True))
    named = config.tokenizer.path or config.tokenizer.name
    if changed:
        notice(
            f"{named} does not give this text back: {changed / len(texts):.0%} "
            "of the documents come back changed (unknown words, case, accents or whitespace). Losses are of the "
            "changed text, so they cannot be compared with those of other tokenizers, not even in bits per byte"
        )


def _check_splits(
    source: Source, streams: Iterable[str], splits: Mapping[str, Split], notice: Say, held_out: bool
) -> None:
    """Refuse an empty split that should have text; tell of one that was left empty on purpose."""
    config, counts = source.config, {name: split.num_documents for name, split in splits.items()}
    wanted = streams if held_out else SPLITS[:2] if config.tuning_fraction else SPLITS
    for name in (name for name in wanted if not counts[name]):
        fraction = getattr(config, f"{name}_fraction", None)
        if name not in streams and not config.tuning_fraction and (name not in source.cut or fraction == 0):
            notice(f"data={config.name} has no {name} text: commands that need the {name} split will refuse")
            continue
        listed = ", ".join(f"{split} {count:,}" for split, count in counts.items())
        remedy = "give more text, or files for each split (data.train_path=, data.validation_path=, data.test_path=)"
        if config.token_budget is not None:
            remedy = f"raise data.token_budget or data.{name}_fraction, or {remedy}"
        raise ConfigError(
            f"data={config.name}: there is no {name} text in {sum(counts.values()):,} documents ({listed}; blank "
            f"ones do not count): {remedy}"
        )
