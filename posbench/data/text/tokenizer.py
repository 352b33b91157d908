"""Turn text into tokens with the `tokenizers` library, so that one `tokenizer.json` describes a tokenizer.

Ordinary text never becomes a special token. Only posbench itself puts a BOS before each document.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from posbench.config import ConfigError, TokenizerConfig

BOS = "<|bos|>"
# Usual names of BOS in other tokenizers. A tokenizer without any uses its end-of-document token, as GPT-2 does.
_BOS_NAMES = (BOS, "<s>", "<bos>", "<|begin_of_text|>", "<|startoftext|>", "[BOS]", "[CLS]")
_EOS_NAMES = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "[EOS]")
_BOS_ENTRY = "BOS"  # entry in the template of tokenizer.json that records a BOS with an unusual name

CONVERT = (
    "transformers converts vocab.json and merges.txt, a sentencepiece .model or a .tiktoken file to one: "
    "AutoTokenizer.from_pretrained('FOLDER').save_pretrained('OUT')"
)
HUB_SECONDS = 5.0  # time for the hub to answer; a download would retry for half a minute
# Long documents are encoded in pieces of about this size, to bound memory and to use all cores.
PIECE_CHARACTERS = 1 << 16
_PIECES_AT_ONCE = 64  # pieces to encode at a time, on all cores
_JOINED_WORDS = re.compile(r"[^\s▁Ġ][ ▁Ġ]")  # a vocabulary entry that spans more than one word


def train_bpe(config: TokenizerConfig, texts: Iterable[str]) -> Tokenizer:
    """Return a byte-level BPE trained on `texts`: BOS, the 256 bytes, and merges up to `vocab_size` entries."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[BOS],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def plain_bytes(config: TokenizerConfig, texts: Iterable[str]) -> Tokenizer:
    """Return a tokenizer whose token ids 0 to 255 are the bytes and whose BOS is 256."""
    vocabulary = {letter: byte for byte, letter in enumerate(_byte_letters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BOS])
    return tokenizer


def file_content(config: TokenizerConfig) -> bytes:
    """Return the bytes of the file `tokenizer.path`. Raises: ConfigError if it cannot be read."""
    try:
        return Path(str(config.path)).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"tokenizer.path={config.path!r} cannot be read ({error.strerror}): give the path of a tokenizer.json, "
            "or use tokenizer=bpe"
        ) from error


def bos_token(config: TokenizerConfig) -> str | None:
    """Return `bos_token` of the tokenizer_config.json beside `tokenizer.path`, or None.

    Raises: ConfigError if the file cannot be read.
    """
    path = Path(str(config.path)).with_name("tokenizer_config.json")
    if not path.is_file():
        return None
    try:
        token = json.loads(path.read_bytes()).get("bos_token")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): repair it, or remove it") from error
    return token["content"] if isinstance(token, dict) else token


def read_file(config: TokenizerConfig, texts: Iterable[str]) -> Tokenizer:
    """Return the tokenizer in the file `tokenizer.path`, with the BOS that the files beside it name.

    Raises: ConfigError if the file is missing or holds no tokenizer.
    """
    return _adapted(_parsed(file_content(config), f"tokenizer.path={config.path!r}"), bos_token(config))


def read_hub(config: TokenizerConfig, texts: Iterable[str]) -> Tokenizer:
    """Return the tokenizer of a repository of the Hugging Face hub, which is downloaded once.

    Raises: ConfigError if the repository has no tokenizer, or if the hub cannot be reached and its cache lacks a file.
    """
    from huggingface_hub import hf_hub_download, snapshot_download

    repository, names = str(config.name), ("tokenizer_config.json", "tokenizer.json")
    get = partial(hf_hub_download, repository, revision=config.revision, local_files_only=True)
    try:
        path = [get(filename=name) for name in names][-1]
    except OSError:  # one is not in the hub's cache
        check_hub(
            "model", repository, config.revision, "check tokenizer.name and tokenizer.revision, or use tokenizer=file"
        )
        path = f"{snapshot_download(repository, revision=config.revision, allow_patterns=[*names])}/{names[-1]}"
    return read_file(replace(config, kind="file", path=path), texts)


def check_hub(kind: str, repository: str, revision: str | None, remedy: str) -> None:
    """Raise ConfigError, within seconds, unless the Hugging Face hub has a repository and its revision.

    Arguments: kind, `dataset` or `model`; remedy, the advice at the end of the error message.
    """
    from huggingface_hub import HfApi, constants

    try:
        HfApi().repo_info(repository, repo_type=kind, revision=revision, timeout=HUB_SECONDS)
    except Exception as error:  # the library and its HTTP client raise their own classes
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ConfigError(
            f"the {kind} {repository} (revision {revision}) cannot be read from the Hugging Face hub "
            f"{constants.ENDPOINT} ({reason}): connect, set HF_ENDPOINT to a mirror, {remedy}"
        ) from error


TOKENIZERS: dict[str, Callable[[TokenizerConfig, Iterable[str]], Tokenizer]] = {
    "bpe": train_bpe,
    "bytes": plain_bytes,
    "file": read_file,
    "hub": read_hub,
}


def tokenizer_in(content: bytes, name: str, expected: str | None = None) -> Tokenizer:
    """Return the tokenizer in the content of a `tokenizer.json`, set so that text never becomes special tokens.

    Arguments: expected, the fingerprint it must have, None for any.
    Raises: ConfigError if the content is not a tokenizer, or has another fingerprint.
    """
    tokenizer = _parsed(content, name)
    if expected is not None and fingerprint(tokenizer) != expected:
        raise ConfigError(
            f"{name} is not the tokenizer that the run was trained with (fingerprint {fingerprint(tokenizer)[:12]}, "
            f"the run's is {expected[:12]}): restore the run's own"
        )
    # The file itself cannot record this setting.
    tokenizer.encode_special_tokens = True
    return tokenizer


def _parsed(content: bytes, name: str) -> Tokenizer:
    try:
        return Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(
            f"{name} is not a tokenizer.json of the tokenizers library ({str(error)[:200]}): save one with "
            f"Tokenizer.save, or use tokenizer=bpe ({CONVERT})"
        ) from error


def _adapted(tokenizer: Tokenizer, bos: str | None) -> Tokenizer:
    """Return the tokenizer without truncation and padding, and with a BOS that `find_bos` finds.

    BOS is `bos` if given, else a token with a usual name, else the new token `<|bos|>`.
    """
    tokenizer.no_truncation()
    tokenizer.no_padding()
    number = find_bos(tokenizer)
    if bos is None and number is None:
        bos = BOS
    if bos is not None and (number is None or number != tokenizer.token_to_id(bos)):
        tokenizer.add_special_tokens([bos])
        number = tokenizer.token_to_id(bos)
        # Its name is unusual, so record it in the file, for `find_bos`.
        if find_bos(tokenizer) != number:
            entry = {"id": _BOS_ENTRY, "ids": [number], "tokens": [bos]}
            tokenizer.post_processor = processors.TemplateProcessing(single=f"{_BOS_ENTRY} $A", special_tokens=[entry])
    return tokenizer


def find_bos(tokenizer: Tokenizer) -> int | None:
    """Return the id of the special token that begins documents, or None."""
    content = json.loads(tokenizer.to_str())
    recorded = ((content["post_processor"] or {}).get("special_tokens") or {}).get(_BOS_ENTRY)
    if recorded:
        return int(recorded["ids"][0])
    special = {token["content"]: token["id"] for token in content["added_tokens"] if token["special"]}
    for name in (*_BOS_NAMES, *_EOS_NAMES):
        if name in special:
            return special[name]
    return None


def vocab_size(tokenizer: Tokenizer) -> int:
    """Return the largest token id plus one, since ids may have gaps."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def fingerprint(tokenizer: Tokenizer) -> str:
    """Return the SHA-256, in hex, of the content of the tokenizer's `tokenizer.json`."""
    return sha256(tokenizer.to_str().encode()).hexdigest()


def dropout_of(content: str | bytes) -> float:
    """Return the share of merges that the BPE in a `tokenizer.json` leaves out at random, or 0."""
    try:
        return float(json.loads(content)["model"].get("dropout") or 0)
    except (ValueError, LookupError, TypeError, AttributeError):
        return 0.0  # it is no tokenizer, which is said when it is read


def text_encoder(tokenizer: Tokenizer) -> Tokenizer:
    """Return a copy of the tokenizer without special tokens, so that text never becomes one, and without dropout."""
    # With `encode_special_tokens` alone, a Unigram model still finds its entry `</s>` in a text. The copy splits such
    # text into ordinary tokens, as sentencepiece does.
    tokenizer_file = tokenizer.to_str()
    content = json.loads(tokenizer_file)
    special = {token["content"] for token in content.pop("added_tokens") if token["special"]}
    model = content["model"]
    # The same text must have the same tokens each time.
    if model["type"] == "BPE":
        model["dropout"] = None
    if model["type"] == "Unigram":  # the ids are the order of a list, so an entry can only be renamed
        model["vocab"] = [[" \0" if entry in special else entry, score] for entry, score in model["vocab"]]
    else:
        special -= {model.get("unk_token")}
        model["vocab"] = {entry: number for entry, number in model["vocab"].items() if entry not in special}
    if model["type"] == "BPE":
        model["merges"] = [pair for pair in model["merges"] if special.isdisjoint((*pair, "".join(pair)))]
    encoder: Any = Tokenizer.from_str(tokenizer_file)
    encoder.model = Tokenizer.from_str(json.dumps(content)).model
    encoder.encode_special_tokens = True
    return encoder


def encoded(
    tokenizer: Tokenizer, bos: int, documents: Iterable[tuple[str, str]]
) -> Iterator[tuple[str, bytes, NDArray[np.uint32]]]:
    """Tokenize documents, pairs (split, text), and yield each as (split, UTF-8 text, [BOS] + tokens).

    Raises: ConfigError if a text becomes BOS, which happens if BOS also means an unknown word.
    """
    encoder = text_encoder(tokenizer)
    vocabulary = encoder.get_vocab(with_added_tokens=False)
    # An entry of several words could span a cut, so then nothing is cut.
    is_cut = not any(map(_JOINED_WORDS.search, vocabulary))
    # Some tokenizers put a space before a text. So later pieces of a document get a letter in front, whose tokens are
    # dropped.
    letters = [entry for entry in vocabulary if len(entry) == 1 and entry.isalpha()]
    letter = min(letters, default="x")
    context = encoder.encode(letter, add_special_tokens=False).ids
    numbered = _numbered_pieces(documents, is_cut)
    # Of the document so far: the BOS and its pieces.
    tokens = [np.array([bos], np.uint32)]
    while batch := list(islice(numbered, _PIECES_AT_ONCE)):
        texts = [piece if n == 1 else letter + piece for _, _, piece, n, _ in batch]
        encodings = encoder.encode_batch_fast(texts, add_special_tokens=False)
        for (split, text, piece, n, is_last), encoding in zip(batch, encodings, strict=True):
            ids = encoding.ids
            if n > 1 and ids[: len(context)] == context:
                ids = ids[len(context) :]
            elif n > 1:  # the letter became one token with the piece
                ids = encoder.encode(piece, add_special_tokens=False).ids
            tokens.append(np.array(ids, np.uint32))
            if (tokens[-1] == bos).any():
                raise ConfigError(
                    f"the tokenizer turns ordinary text of the {split} document that begins with {text[:60]!r} into "
                    f"{tokenizer.id_to_token(bos)!r}, which may only mark the beginning of a document: remove "
                    "that text, or use tokenizer=bpe"
                )
            if is_last:
                yield split, text.encode(), np.concatenate(tokens)
                tokens = tokens[:1]


def _numbered_pieces(documents: Iterable[tuple[str, str]], is_cut: bool) -> Iterator[tuple[str, str, str, int, bool]]:
    """Yield (split, text, piece, its number from 1, is it the last) for each piece of each document."""
    for split, text in documents:
        parts = list(pieces(text)) if is_cut else [text]
        for n, piece in enumerate(parts, 1):
            yield split, text, piece, n, n == len(parts)


def pieces(text: str) -> Iterator[str]:
    """Yield pieces of `text`, about `PIECE_CHARACTERS` each, whose tokens together are the tokens of the whole text.

    Text without spaces is cut before a line break, and text without either when the piece is full, which may end a
    token early, but loses nothing.
    """
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        end = _cut(text, start + PIECE_CHARACTERS // 2, start + PIECE_CHARACTERS)
        yield text[start:end]
        start = end
    yield text[start:]


def _cut(text: str, low: int, high: int) -> int:
    """Return the last index between `low` and `high` at which a cut changes no token, or `high` if there is none."""
    for space in (" ", "\n"):
        index = text.rfind(space, low, high)
        while index > low:
            # A cut comes before a space that follows a visible character. No token spans such a border.
            if not text[index - 1].isspace():
                return index
            index = text.rfind(space, low, index)
    return high


def byte_lengths(tokenizer: Tokenizer) -> NDArray[np.int32] | None:
    """Return each token's bytes of text, int32 [V], 0 for special tokens; None if not byte-level."""
    if (json.loads(tokenizer.to_str())["decoder"] or {}).get("type") != "ByteLevel":
        return None
    letters = set(_byte_letters())
    lengths = np.zeros(vocab_size(tokenizer), np.int32)
    for token, number in tokenizer.get_vocab(with_added_tokens=False).items():
        if not letters.issuperset(token):
            return None
        lengths[number] = len(token)  # a letter stands for a byte
    for number, added in tokenizer.get_added_tokens_decoder().items():
        lengths[number] = 0 if added.special else len(added.content.encode())
    return lengths


def _byte_letters() -> list[str]:
    # As in Radford et al. 2019 (GPT-2).
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    letters, code_points = [], iter(range(256, 512))
    # A printable Latin-1 byte is written as its own character, and the other bytes as the code points from 256 on.
    for byte in range(256):
        code_point = byte if byte in printable else next(code_points)
        letters.append(chr(code_point))
    return letters
