"""Prepare the text of a configuration once, and find it again at once: reading, tokenizing, and the cache between runs.

    <cache>/index/<request>.json    a request (what was asked for, and what the source was recognised by) -> its corpus
    <cache>/corpora/<corpus>/       see `shards`
    <cache>/overlaps/<both>.json    how much of one corpus also occurs in another, which models were trained on
    <cache>/locks/                  one process prepares a request, others wait for it

A corpus is made in a folder beside and renamed when whole. The sizes of its files are compared each time it is opened,
and a damaged one is made again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path

from posbench.config import Config, ConfigError
from posbench.console import say
from posbench.data.build import write_corpus
from posbench.data.overlap import Shares, overlap_between, parsed_shares
from posbench.data.shards import FORMAT, Corpus, DamagedCorpusError, open_corpus, read_manifest
from posbench.data.sources import SOURCES, Source
from posbench.data.sources.held_out import HeldOut
from posbench.data.splitting import WHOLE
from posbench.data.tokenization import file_content
from posbench.machine.files import folder_beside, publish_folder, read_json, write_json

Notice = Callable[[str], None]
_MANY_TOKENS = 1 << 27  # whose text takes minutes to read
# Fields that do not decide what the text is; the source's identity has the paths, looked up.
_NOT_TEXT = {"name", "cache_dir", "path", "train_path", "validation_path", "test_path"}


def prepare(config: Config, quiet: bool = False, notice: Notice = say, check: bool = False) -> Corpus:
    """The tokenized text of this configuration: from the cache where it is whole, else read, tokenized and kept there.

    Arguments: `notice` is told of everything that takes long or was not expected, unless `quiet`; check, whether every
    byte of the cache is compared with its checksum, and not sizes alone.
    Raises: ConfigError where the text or the tokenizer cannot be had, or the cache cannot be written.
    """
    return _prepared(config, SOURCES[config.data.source](config.data), _silent if quiet else notice, check)


def prepare_held_out(config: Config, notice: Notice = say) -> Corpus:
    """The text of this configuration to score models on that were trained on another; the tokenizer is one of a file.

    Returns: a corpus whose validation and test splits are those of the source, one for the other where it has only one
    of the two, and both the whole text where it has none.
    Raises: as `prepare`.
    """
    corpus = _prepared(config, HeldOut(SOURCES[config.data.source](config.data)), notice)
    given = [split for split in (corpus.validation, corpus.test) if split.num_documents]
    splits = given or [replace(corpus.train, name=WHOLE)]
    return replace(corpus, splits={**corpus.splits, "validation": splits[0], "test": splits[-1]})


def find_prepared(config: Config) -> Corpus | None:
    """The text of this configuration where it lies in the cache, whole; None where it does not. Nothing is made."""
    try:
        source = SOURCES[config.data.source](config.data)
        return _find(cache_folder(config.data.cache_dir), _request(config, source), _silent)
    except (ConfigError, OSError):  # said by who prepares it
        return None


def find_overlap(trained_on: Corpus, held_out: Corpus, notice: Notice = say) -> Shares:
    """How much of each split of a text to score also occurs in the train split of another: measured once, and kept.

    Returns: split -> the share of its 13-grams.
    """
    name = f"{trained_on.folder.name}+{held_out.folder.name}.json"
    file = held_out.folder.parents[1] / "overlaps" / name
    with suppress(OSError, ValueError):
        return parsed_shares(read_json(file))
    if trained_on.train.num_tokens > _MANY_TOKENS:
        notice(f"measuring how much of this text occurs in {trained_on.train.num_tokens:,} tokens of training text")
    shares = overlap_between(trained_on, held_out)
    with suppress(OSError):  # a cache that cannot be written: measured again the next time
        file.parent.mkdir(exist_ok=True)
        write_json(file, shares)
    return shares


def _prepared(config: Config, source: Source, notice: Notice, check: bool = False) -> Corpus:
    """What `prepare` says, of a source."""
    cache = cache_folder(config.data.cache_dir)
    request = _request(config, source)
    corpus = _find(cache, request, notice, check)
    if corpus is not None:
        return corpus
    try:
        return _prepare_alone(config, source, cache, request, notice, check)
    except OSError as error:
        raise ConfigError(
            f"the token cache {cache} cannot be written ({error.strerror or error}): make room, or set data.cache_dir "
            "(or POSBENCH_CACHE) to a folder that can be written"
        ) from error


def prepared_tokens(config: Config) -> int | None:
    """The tokens of the train split where the text lies in the cache; None where it does not. Nothing else is read."""
    try:
        cache = cache_folder(config.data.cache_dir)
        request = _request(config, SOURCES[config.data.source](config.data))
        name = Path(read_json(cache / "index" / f"{request}.json")["corpus"]).name
        return int(read_manifest(cache / "corpora" / name)["splits"]["train"]["tokens"])
    except (ConfigError, DamagedCorpusError, OSError, ValueError, KeyError, TypeError):  # said by who prepares it
        return None


def cache_folder(cache_dir: str | None) -> Path:
    """`cache_dir`, else $POSBENCH_CACHE, else `posbench` in the user's cache folder."""
    named = cache_dir or os.environ.get("POSBENCH_CACHE")
    place = named or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/posbench"
    try:
        return Path(place).expanduser().absolute()
    except RuntimeError as error:  # ~ of nobody
        raise ConfigError(
            f"the token cache {place!r} cannot be looked up: {error}; set data.cache_dir or POSBENCH_CACHE"
        ) from error


def is_cache(cache_dir: str | None) -> bool:
    """Whether there is a cache in this folder."""
    return cache_dir is not None and (cache_folder(cache_dir) / "corpora").is_dir()


def _silent(message: str) -> None:
    pass


def _request(config: Config, source: Source) -> str:
    """A hash of everything that decides what the corpus will be, made without reading text."""
    data = {key: value for key, value in asdict(config.data).items() if key not in _NOT_TEXT}
    tokenizer = asdict(config.tokenizer)
    if config.tokenizer.path is not None:
        tokenizer["path"] = sha256(file_content(config.tokenizer)).hexdigest()
    wanted = {"format": FORMAT, "data": data, "source": source.identity(), "tokenizer": tokenizer}
    return sha256(json.dumps(wanted, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _find(cache: Path, request: str, notice: Notice, check: bool = False) -> Corpus | None:
    """The corpus that answered this request before, if it is still whole."""
    try:
        name = Path(read_json(cache / "index" / f"{request}.json")["corpus"]).name
    except (OSError, ValueError, KeyError, TypeError):
        return None
    folder = cache / "corpora" / name
    try:
        return open_corpus(folder, check)
    except DamagedCorpusError as damage:
        notice(f"the token cache {folder} is damaged ({damage}): making it again")
        return None


def _prepare_alone(config: Config, source: Source, cache: Path, request: str, notice: Notice, check: bool) -> Corpus:
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
        made_meanwhile = _find(cache, request, _silent, check)
        return made_meanwhile or _make(config, source, cache, request, notice, check)
    finally:
        lock.release()


def _make(config: Config, source: Source, cache: Path, request: str, notice: Notice, check: bool) -> Corpus:
    with folder_beside(cache / "corpora" / request) as beside:
        manifest = write_corpus(config, source, beside, notice)
        name = f"{manifest['fingerprint'][:16]}-{manifest['tokenizer_fingerprint'][:16]}"
        folder = cache / "corpora" / name
        try:  # another request may have led to the same corpus
            corpus = open_corpus(folder, check)
        except DamagedCorpusError:
            publish_folder(beside, folder)
            corpus = open_corpus(folder)
    write_json(cache / "index" / f"{request}.json", {"corpus": name})
    return corpus
